"""The experiments by name, in the order of the report."""

from importlib import import_module
from types import ModuleType

# each a module of this package with TITLE, PAPER, HERE, Sizes, QUICK, measure, judge, describe and draw
EXPERIMENTS = (
    "figure1",
    "figure2_left",
    "figure2_middle",
    "figure2_right",
    "figure3",
    "table7",
    "table2",
    "figure4",
    "table4",
    "table3",
    "table6",
    "table1",
)


def choose(words: list[str]) -> list[str]:
    """The names that a word begins, figure2 for three of them; all of them without words."""
    for word in words:
        if not any(name.startswith(word) for name in EXPERIMENTS):
            raise ValueError(f"experiments must be of {', '.join(EXPERIMENTS)}, got {word!r}")
    return [name for name in EXPERIMENTS if not words or any(name.startswith(word) for word in words)]


def load(name: str) -> ModuleType:
    return import_module(f"scripts.paper.{name}")
