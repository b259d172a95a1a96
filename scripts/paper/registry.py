"""The experiments by name, in the order of the report."""

from importlib import import_module
from types import ModuleType

# each name is a module of this package with TITLE, PAPER, HERE, Sizes, QUICK, measure, judge, describe and
# draw; each number estimates its seconds on one H200, so that the longest can start first
EXPERIMENTS = {
    "figure1": 20,
    "figure2_left": 90,
    "figure2_middle": 120,
    "figure2_right": 50,
    "figure3": 300,
    "table7": 70,
    "table2": 270,
    "figure4": 140,
    "table4": 510,
    "table3": 430,
    "table6": 400,
    "table1": 150,
}


def choose(words: list[str]) -> list[str]:
    """The names that begin with one of the words, as three do with figure2; without words, all names."""
    for word in words:
        if not any(name.startswith(word) for name in EXPERIMENTS):
            raise ValueError(f"experiments must be of {', '.join(EXPERIMENTS)}, got {word!r}")
    return [name for name in EXPERIMENTS if not words or any(name.startswith(word) for word in words)]


def load(name: str) -> ModuleType:
    return import_module(f"scripts.paper.{name}")
