"""Keeps torchrun from restarting in vain a run that was refused and would be refused again.

torchrun --max-restarts is meant for workers that die, but it restarts all of them after any nonzero exit
code, and no code stops it. So a process that has reported such an error notes it in torchrun's store, and
restarted processes look there before they begin. So do processes that wait for others to join, which may have
been refused on another host. The store lives as long as this launch of torchrun, so nothing is left behind,
and all hosts share it, so none waits for processes that end on another.
"""

import os
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

# how long a process waits while another one reports the error for both: a tenth of a second after a first
# process has ended, torchrun would end the other, report or not
PATIENCE = timedelta(seconds=10)
# torchrun opens its store before it starts a process: if the store does not answer, its host has ended
CONNECT_TIMEOUT = timedelta(minutes=1)


def is_first_here() -> bool:
    """Whether this is the first process of its host, which reports what all of them find."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def comes_again(error: Exception) -> bool:
    """Whether a run that this error ended would end with it again if it were restarted unchanged.

    True for what ends with EXIT_REFUSED, except for errors of the system: a full disk, a file system or
    network that is away for a while, or a run folder that another process holds.
    """
    is_refused = isinstance(error, ValueError | FloatingPointError | MemoryError)
    return is_refused and not is_of_system(error)


def is_of_system(error: BaseException | None) -> bool:
    """Whether the error is an OSError, or was raised from one."""
    return error is not None and (isinstance(error, OSError) or is_of_system(error.__cause__))


def tell(error: str, *, is_ours: bool, again: bool) -> None:
    """Prints why this process ends, once for all processes of its host that end for the same reason.

    is_ours: this process prints it; any other waits until the first of its host has, and prints it instead if
    that takes too long. again: the run would end so again if it were restarted. That is noted only after the
    line is printed: no process may end because of the note before a line says why.
    """
    store = None
    # torchrun, and with it its store, may be gone
    with suppress(dist.DistError):
        store = _store()
        if not is_ours:
            # without a store nobody ends the first process
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
    """Whether a process of this launch of torchrun has ended with an error that would recur.

    Raises ConnectionError if torchrun's store does not answer.
    """
    # TORCHELASTIC_RESTART_COUNT cannot tell: a host that restarts because another one does counts no restart
    try:
        store = _store()
        return store is not None and store.check([_key()])
    except dist.DistError as error:
        raise gone(error) from error


def gone(error: dist.DistError) -> ConnectionError:
    """The error to raise if torchrun's store does not answer."""
    reason = str(error).splitlines()[0]
    return ConnectionError(
        f"torchrun's store is gone ({reason}): see why torchrun has ended on the first host; the same "
        "command goes on"
    )


def _key() -> str:
    # an elastic launch may go on with fewer or more processes, for which other settings are valid
    return f"nanoflash/refused/{os.environ['WORLD_SIZE']}"


def _told_key() -> str:
    # one key per host and per start of its processes
    given = os.environ
    return f"nanoflash/told/{given.get('GROUP_RANK')}/{given.get('TORCHELASTIC_RESTART_COUNT')}"


def _store() -> dist.Store | None:
    """What torchrun keeps over its restarts; None without torchrun, or if it keeps nothing."""
    given = os.environ
    if given.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # this connection must not be counted as one of the world's processes
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
