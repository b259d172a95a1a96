"""Starts a process with a pipe to this one, so that either notices when the other is gone."""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType


def start_child(target: Callable[..., None], *args, daemon: bool) -> tuple[BaseProcess, Connection]:
    """A process that calls target(pipe, *args), and this end of its pipe. Ctrl-C is blocked in it.

    target: a function of a module. daemon: it may start no processes, and ends with this one.
    """
    # spawn: this process may hold threads and a CUDA context, which do not survive a fork
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=target, args=(other_end, *args), daemon=daemon)
    # started first: it unblocks signals when it starts, which otherwise is with the first process
    resource_tracker.ensure_running()
    # a process that is still importing would print a traceback, and so would one whose parent was stopped
    # before it had sent all that its child needs to begin
    with ctrl_c_waits(), _without_main():
        process.start()
    # only the child holds it now: when the child ends, so does the pipe
    other_end.close()
    return process, pipe


@contextmanager
def _without_main() -> Iterator[None]:
    """Keeps a process that is started inside from running the user's script again, of which it needs nothing.

    multiprocessing would, all that does not stand behind `if __name__ == "__main__"`: such a script would
    come to the same call, and wait for this one.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Defers Ctrl-C until after the body, and keeps it from a process that is started inside."""
    came: list[int] = []
    answer = signal.getsignal(signal.SIGINT)
    # masking is not enough: a library's thread may take the signal, and Python would answer it here
    answers = threading.current_thread() is threading.main_thread() and answer is not None
    if answers:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if answers:
            signal.signal(signal.SIGINT, answer)
        if came:
            signal.raise_signal(signal.SIGINT)
