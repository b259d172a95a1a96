"""The GPU's memory between measurements: each starts without what the previous one has kept."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_memory() -> None:
    """Frees the memory that nothing uses any more, for the next measurement and for other processes."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def reason_in(row: dict, errors: type | tuple = torch.OutOfMemoryError) -> Iterator[None]:
    """Frees memory; an error of these types ends the measurement, and its first line becomes row["why"]."""
    # before and not after: an error holds on to the tensors until it is gone
    free_memory()
    try:
        yield
    except errors as error:
        if type(error) not in (RuntimeError, ValueError, torch.OutOfMemoryError):
            # a backend refuses with one of these; another may be a compiler's, whose first line says little
            traceback.print_exc()
        row["why"] = (str(error) or repr(error)).splitlines()[0]
