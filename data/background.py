"""Prepares text in a process of its own, while this one does other work."""

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from data.child import start_child
from data.prepare import DataConfig, prepare


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
        raise ChildProcessError(
            f"the process that prepares {config.folder} ended with code {process.exitcode}; -9 most likely "
            "means too little memory: lower data.workers"
        ) from error


def _prepare(pipe: Connection, config: DataConfig, level: int) -> None:
    """Sends None when it begins, then the folder, or the error and what of the system caused it."""
    signal.signal(signal.SIGINT, _interrupt_once)
    threading.Thread(target=_stop_with, args=(pipe,), daemon=True).start()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("data").setLevel(level)
    # whoever interrupts this process does not listen any more
    with suppress(KeyboardInterrupt, BrokenPipeError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            outcome = prepare(config, begins=lambda: pipe.send(None))
        except (ValueError, OSError) as error:
            # its causes do not travel with an error, and those of libraries may not travel at all
            cause = error.__cause__
            outcome = error, OSError(str(cause)) if isinstance(cause, OSError) else None
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(outcome)


def _interrupt_once(*_) -> None:
    """Ctrl-C comes from the terminal, and then again by the pipe's end, when prepare cleans up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _stop_with(pipe: Connection) -> None:
    """Interrupts the main thread, whatever it waits for, when the other end of the pipe is gone."""
    with suppress(EOFError, OSError):
        pipe.recv()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
