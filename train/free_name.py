"""A name for what is set aside, so that nothing takes the place of anything."""

from collections.abc import Callable
from itertools import count
from pathlib import Path


def first_free(name: Callable[[int], Path]) -> Path:
    """name(1), or that of the next number, of which there is nothing yet."""
    return next(path for path in map(name, count(1)) if not path.exists())
