"""A verdict: what the paper claims, what was measured here, and whether the claim is reached."""

from dataclasses import dataclass

REACHED, NOT_REACHED, NOT_MEASURED = "reached", "not reached", "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One claim. `ours`, the value measured here, must be at least (or, with at_most, at most) `gate`.

    paper: the paper's own number, and the paper's version where its two versions differ. ours is None if this
    run did not measure it; `note` then says why. unit: written after the numbers.
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
    """The rows of these sizes; a size that an older row does not name was the paper's."""
    return [row for row in rows if all(row.get(key, size) == size for key, size in sizes.items())]


def only(rows: list[dict], **wanted) -> dict:
    """The one row that holds all of these values; an empty one if there is none."""
    found = matching(rows, **wanted)
    assert len(found) <= 1, f"{len(found)} rows hold {wanted}"
    return found[0] if found else {}


def value(rows: list[dict], key: str, **wanted) -> float | None:
    """The number under `key` of the one row that holds all of these values; None if either is missing."""
    return only(rows, **wanted).get(key)


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
    return total(only(rows, **wanted))
