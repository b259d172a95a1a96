"""One run folder, one run: a lock that every host sees, and that ends with its process, however that ends."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from train.agreement import ROOT
from train.distributed import Processes

# seconds for which a host may go by its cached view of a directory on NFS
PATIENCE = 90.0
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def lock_run(folder: Path, processes: Processes) -> Iterator[None]:
    """Rank 0 holds folder/lock during the body.

    A POSIX record lock: the system drops it with the process, and NFS supports it. Raises ValueError, on
    every rank, if another run holds it, or if a host has a folder of its own, to which no checkpoint could be
    written; OSError, on rank 0, if this user may not write there.
    """
    with ExitStack() as held:

        def lock() -> str:
            held.enter_context(_locked(folder))
            return _own_name()

        holder = processes.from_main(lock)
        # not on rank 0, which would drop the lock by closing the file again
        if processes.any(not processes.is_main and not _sees(folder, holder)):
            raise ValueError(
                f"{folder} is not the same folder on all hosts: each process writes its part of a checkpoint "
                "there, so start them in a folder that the hosts share"
            )
        yield


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _sees(folder: Path, holder: str) -> bool:
    """Whether this process finds the holder's lock in its own folder, where it may take a while to appear."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if (folder / "lock").read_text(encoding="utf-8").strip() == holder:
                return True
        except FileNotFoundError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _locked(folder: Path) -> TextIO:
    """folder/lock, locked until it is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        # of the system still: a disk that is mounted read-only may come back, and torchrun tries again
        raise OSError(
            f"{folder} cannot be written ({error}): start the command in a folder where this user may write, "
            f"with {ROOT} in PYTHONPATH, or choose another name= if only that folder is closed"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is in use by {holder}: wait for it, stop it, or choose another name="
        ) from error
    file.truncate(0)
    file.write(_own_name() + "\n")
    file.flush()
    # for other hosts to read
    os.fsync(file.fileno())
    return file
