"""What torchrun would start again in vain: a run that was refused, and would be refused once more.

torchrun --max-restarts is for workers that die, but starts all of them again after any exit code that is not
0, and no code stops it. So a process that has told of such an error notes it in torchrun's store, and the
processes of the next start look there before they begin. So do those that wait for others to join them, which
may have been refused on another host. The store lives as long as this launch of torchrun, so that nothing is
left behind, and all hosts share it, so that none waits for processes that end on another.
"""

import os
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

# how long a process that leaves the telling to another one waits for it: torchrun ends that one, untold, a
# tenth of a second after the first process that has ended
PATIENCE = timedelta(seconds=10)
# torchrun has its store before it starts a process: one that does not answer is that of a host that has ended
CONNECT_TIMEOUT = timedelta(minutes=1)


def is_first_here() -> bool:
    """Whether this is the first process of its host, which says what all of them find."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def comes_again(error: Exception) -> bool:
    """Whether a run that this error ended would end with it again if it were started again as it is.

    Of what ends with EXIT_REFUSED all but what comes from the system, such as a full disk, a file system or
    network that is away for a while, or a run folder that another process holds.
    """
    is_refused = isinstance(error, ValueError | FloatingPointError | MemoryError)
    return is_refused and not is_of_system(error)


def is_of_system(error: BaseException | None) -> bool:
    """Whether the error is an OSError, or was raised from one."""
    return error is not None and (isinstance(error, OSError) or is_of_system(error.__cause__))


def tell(error: str, *, is_ours: bool, again: bool) -> None:
    """Prints why this process ends, for all of its host that end by the same.

    is_ours: it is this process's to tell; another one waits until the first of its host has told, and tells
    in its place where that takes too long. again: the run would end so again if it were started again, which
    is noted after it was told: no process shall end by the note before a line says why.
    """
    store = None
    # torchrun, and with it its store, may be gone
    with suppress(dist.DistError):
        store = _store()
        if not is_ours:
            # without a store nobody ends the first one
            if store is not None:
                store.wait([_told_key()], PATIENCE)
            return
    print(error, file=sys.stderr, flush=True)
    if store is not None:
        with suppress(dist.DistError):
            if again:
                store.set(_key(), "")
            store.set(_told_key(), "")


def was_refused() -> bool:
    """Whether a process of this launch of torchrun has ended with an error that comes again.

    Raises ConnectionError if torchrun's store does not answer.
    """
    # not by TORCHELASTIC_RESTART_COUNT: a host that starts again because another one does counts none
    try:
        store = _store()
        return store is not None and store.check([_key()])
    except dist.DistError as error:
        raise gone(error) from error


def gone(error: dist.DistError) -> ConnectionError:
    """What to say where torchrun's store does not answer."""
    reason = str(error).splitlines()[0]
    return ConnectionError(
        f"torchrun's store is gone ({reason}): see why torchrun has ended on the first host; the same "
        "command goes on"
    )


def _key() -> str:
    # an elastic launch may go on with fewer or more processes, which other settings fit
    return f"nanoflash/refused/{os.environ['WORLD_SIZE']}"


def _told_key() -> str:
    # of one host, and of one start of its processes
    given = os.environ
    return f"nanoflash/told/{given.get('GROUP_RANK')}/{given.get('TORCHELASTIC_RESTART_COUNT')}"


def _store() -> dist.Store | None:
    """What torchrun keeps over its restarts; None without torchrun, or if it keeps nothing."""
    given = os.environ
    if given.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # not as one of the world's processes, which it counts
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
