"""A verdict: what the paper claims, what was measured here, and whether the one reaches the other."""

from dataclasses import dataclass

REACHED, NOT_REACHED, NOT_MEASURED = "reached", "not reached", "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One claim. `gate` is what must be reached here, at least or (at_most) at most, and `ours` what was.

    paper: the paper's own number, with its version where the two differ. ours is None where this run did
    not measure it; then `note` says why. unit: written behind the numbers.
    """

    claim: str
    paper: str
    gate: float
    ours: float | None
    unit: str = "x"
    at_most: bool = False
    note: str = ""

    @property
    def word(self) -> str:
        if self.ours is None:
            return NOT_MEASURED
        reached = self.ours <= self.gate if self.at_most else self.ours >= self.gate
        return REACHED if reached else NOT_REACHED


def matching(rows: list[dict], **wanted) -> list[dict]:
    """The rows that hold all of these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def at_sizes(rows: list[dict], **sizes) -> list[dict]:
    """The rows of these sizes; older ones do not tell all of theirs, which were the paper's."""
    return [row for row in rows if all(row.get(key, size) == size for key, size in sizes.items())]


def value(rows: list[dict], key: str, **wanted) -> float | None:
    """That number of the one row that holds all of these values; None if there is none or it is empty."""
    found = matching(rows, **wanted)
    assert len(found) <= 1, f"{len(found)} rows hold {wanted}"
    return found[0].get(key) if found else None


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either was not measured."""
    return None if a is None or b is None else a / b


def least(numbers: list[float | None]) -> float | None:
    """The smallest, or None where any was not measured."""
    return None if not numbers or None in numbers else min(numbers)


def total(row: dict) -> float | None:
    """forward_ms + backward_ms of a row."""
    if row.get("forward_ms") is None or row.get("backward_ms") is None:
        return None
    return row["forward_ms"] + row["backward_ms"]


def only_total(rows: list[dict], **wanted) -> float | None:
    """`total` of the one row that holds all of these values; None if there is none."""
    found = matching(rows, **wanted)
    assert len(found) <= 1, f"{len(found)} rows hold {wanted}"
    return total(found[0]) if found else None
