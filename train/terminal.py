"""Output to a terminal, a pipe or a file that may go away before the run ends."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parent.parent
# where the warnings that a run prints as its own come from
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("data", "kernels", "model", "train"))


def warn(message: str) -> None:
    """Tells of a fault that ends nothing."""
    print(f"WARNING: {message}", file=sys.stderr, flush=True)


def warn_without_source_lines() -> None:
    """From now on Python prints warnings of this project's code as `warn` does, and others as before."""
    usual = warnings.formatwarning

    def formatted(message, category, filename, lineno, line=None) -> str:
        if filename.startswith(ROOMS):
            return f"WARNING: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


def open_closed_streams() -> None:
    """Opens to nowhere what was closed at the start, as by 2>&-: input is empty, and output is lost.

    Otherwise the next file that is opened gets the number of the closed one, and what C libraries print.
    """
    names = ("stdin", "stdout", "stderr")
    for number in range(len(names)):
        try:
            os.fstat(number)
        except OSError:
            # gets this number, the lowest that is free; processes that this one starts inherit it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in enumerate(names):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
            setattr(sys, name, stream)


@contextmanager
def words_may_fail() -> Iterator[None]:
    """While entered, failed output is lost but ends nothing; characters that an encoding lacks are escaped.

    Ctrl-C also ends the `tee` behind a pipe, and a log may lie on the disk that is full: the run must still
    save its checkpoint.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Patient(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Patient):
                stream.close_if_gone()
        sys.stdout, sys.stderr = before


class Patient:
    """A stream of text that drops what cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def close_if_gone(self) -> None:
        """Sends the rest of a stream that is gone to nowhere, so that Python does not complain at its end."""
        try:
            self._stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)
