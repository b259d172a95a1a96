"""Prepares text in a process of its own, while this one does other work."""

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from data.child import start_child
from data.prepare import DataConfig, prepare

# for removing what was written
SECONDS_TO_STOP = 10.0

# of the process that prepares
_parent_is_gone = threading.Event()


def prepare_beside(config: DataConfig, work: Callable[[], None]) -> Path:
    """What prepare(config) returns or raises, after `work`, which is done in this process meanwhile.

    It is not begun before the source has been found and the folder can be written, nor if there is nothing to
    prepare. If it raises, or Ctrl-C comes, preparation is stopped as by Ctrl-C; so it is if this process is
    killed. Raises ChildProcessError, an OSError, if the other process is.
    """
    level = logging.getLogger("data").getEffectiveLevel()
    process, pipe = start_child(_prepare, config, level, daemon=False)
    try:
        outcome = _receive(pipe, process, config)
        if outcome is None:
            work()
            outcome = _receive(pipe, process, config)
    finally:
        pipe.close()
        process.join()
    if isinstance(outcome, Path):
        return outcome
    error, cause = outcome
    raise error from cause


def _receive(
    pipe: Connection, process: BaseProcess, config: DataConfig
) -> Path | tuple[Exception, OSError | None] | None:
    try:
        return pipe.recv()
    except EOFError as error:
        process.join()
        killed = "; -9 most likely means too little memory: lower data.workers"
        raise ChildProcessError(
            f"the process that prepares {config.folder} ended with code {process.exitcode}"
            + (killed if process.exitcode == -signal.SIGKILL else ": see above")
        ) from error


def _prepare(pipe: Connection, config: DataConfig, level: int) -> None:
    """Sends None when it begins, then the folder, or the error and what of the system caused it."""
    signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_stop_with, args=(pipe,), daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("data").setLevel(level)
    # whoever interrupts this process does not listen any more
    with suppress(KeyboardInterrupt, BrokenPipeError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            outcome = prepare(config, begins=lambda: pipe.send(None))
        except (ValueError, OSError, MemoryError) as error:
            cause = error.__cause__
            outcome = _plain(error), OSError(str(cause)) if isinstance(cause, OSError) else None
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(outcome)


def _plain(error: Exception) -> Exception:
    """The error in a form that travels whole: those of libraries may lose their words, or not arrive."""
    if isinstance(error, OSError) and error.errno is not None:
        plain = OSError(error.errno, error.strerror, error.filename)
    else:
        kind = next(kind for kind in (OSError, MemoryError, ValueError) if isinstance(error, kind))
        plain = kind(str(error))
    # printed where a traceback is
    plain.add_note("".join(traceback.format_exception(error)))
    return plain


def _interrupt(*_) -> None:
    """The terminal's Ctrl-C comes here too, but the parent answers it: by its end, or not at all."""
    if _parent_is_gone.is_set():
        # not a second time, when prepare cleans up
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt


def _stop_with(pipe: Connection) -> None:
    """Interrupts the main thread, whatever it waits for, when the other end of the pipe is gone."""
    with suppress(EOFError, OSError):
        pipe.recv()
    _parent_is_gone.set()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    # where a library has swallowed it
    time.sleep(SECONDS_TO_STOP)
    os._exit(1)
