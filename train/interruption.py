"""Signals that ask a run to stop: it finishes its step, saves, and leaves with a code that says so."""

import os
import signal
import sys
import time
from contextlib import suppress

# "temporary failure, try again", EX_TEMPFAIL of sysexits.h: the run can go on from its checkpoint
EXIT_INTERRUPTED = 75
# SIGHUP comes from a terminal that is closed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# one request may come twice: from the terminal or Slurm, and again from torchrun
ECHO_SECONDS = 2.0


def end_at_ctrl_c() -> None:
    """Has Ctrl-C end a command, python -m NAME, at once: Python, still importing, would print a traceback.

    If SIGINT is ignored, as in a shell's background job, it stays ignored.
    """
    # sys.argv looks like this until Python has found the module of that name
    is_command = sys.argv[:1] == ["-m"]
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def answer_ctrl_c() -> None:
    """Undoes end_at_ctrl_c: from here on a KeyboardInterrupt is handled."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupted(Exception):  # noqa: N818, no error
    """The run stopped before its end because a signal asked it to; its state is saved."""


class Interruption:
    """While entered: one of SIGNALS sets `requested`, and a later second one ends the process at once.

    If SIGHUP is ignored, as under nohup, it stays ignored.
    """

    def __init__(self):
        self.requested = False
        self._first = 0.0
        self._before = {}

    def __enter__(self) -> "Interruption":
        goes_on = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        heard = [number for number in SIGNALS if not (goes_on and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        if not self.requested:
            self.requested, self._first = True, time.monotonic()
            # os.write, not print: a handler may come in the middle of a print
            _say(f"{name}: finishing the step and saving; once more to exit at once")
        elif time.monotonic() - self._first > ECHO_SECONDS:
            _say(f"{name} again: exiting without saving")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _say(message: str) -> None:
    # an error here would end the run that is to be saved
    with suppress(OSError, AttributeError):
        os.write(sys.__stderr__.fileno(), f"{message}\n".encode())
