"""Files that a process which ends at any moment leaves whole: the old text or the new one."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes the text beside path first, and then gives it that name; a failure leaves nothing new."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # a name without its text is what some file systems have after a power cut
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
