"""A free name for what is set aside, so that nothing is overwritten."""

from collections.abc import Callable
from itertools import count
from pathlib import Path


def first_free(name: Callable[[int], Path]) -> Path:
    """The first of name(1), name(2), ... that does not exist yet."""
    return next(path for path in map(name, count(1)) if not path.exists())
