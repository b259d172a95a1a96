"""One run folder, one run: a lock that ends with its process, however that ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from train.distributed import Processes


@contextmanager
def lock_run(folder: Path, processes: Processes) -> Iterator[None]:
    """Rank 0 holds folder/lock during the body. Raises ValueError, on every rank, if another run holds it.

    A POSIX record lock: the system drops it with the process, and NFS knows it.
    """
    with ExitStack() as held:

        def lock() -> None:
            held.enter_context(_locked(folder))

        processes.from_main(lock)
        yield


def _locked(folder: Path) -> TextIO:
    """folder/lock, locked until it is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is in use by {holder}: wait for it, stop it, or choose another name="
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
