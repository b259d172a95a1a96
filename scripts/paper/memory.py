"""The GPU's memory between measurements: each starts without what the one before has kept."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_memory() -> None:
    """Gives back what nobody holds any more: to the next measurement, and to processes of their own."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def reason_in(row: dict, errors: type | tuple = torch.OutOfMemoryError) -> Iterator[None]:
    """Frees memory; an error of these types ends the measurement and leaves its first line as row["why"]."""
    # before and not after: the error itself holds on to the tensors until it is gone
    free_memory()
    try:
        yield
    except errors as error:
        if type(error) not in (RuntimeError, ValueError, torch.OutOfMemoryError):
            # not what a backend refuses with: a compiler's, say, whose first line tells little
            traceback.print_exc()
        row["why"] = (str(error) or repr(error)).splitlines()[0]
