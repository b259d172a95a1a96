"""Files that stay whole whenever the process ends: they hold what they held before, or what is new."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes text, in UTF-8, or bytes beside path first, then renames it to path; a failure changes nothing.

    A link stays one: the file that it leads to is written.
    """
    path = path.resolve()
    content = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            # without this some file systems have the name but not the content after a power cut
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
