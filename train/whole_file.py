"""Files that stay whole whenever the process ends: they hold the old text or the new one."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes the text beside path first, then renames it to path; a failure leaves nothing new.

    A link stays one: the file that it leads to is written.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # without this some file systems have the name but not the text after a power cut
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
