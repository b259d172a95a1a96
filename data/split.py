"""Which documents are kept, and which are for validation: by content or package, never by position."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from data.duplicates import DigestSet
from data.sources import Source

# with fewer groups chance alone would miss the requested fraction by too much: then sizes decide as well
MANY_GROUPS = 10_000
# where the sizes differ so much that more of the groups are for validation, a warning says so
MOST_OF_GROUPS = 2 / 3

log = logging.getLogger(__name__)


def unique_documents(
    source: Source, max_documents: int | None, counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    """(group, text) of the first max_documents documents (None: all) that hold text and were not seen before.

    Documents without a group get the digest of their content as their own. counts: gets what is left out.
    """
    return islice(_unique_documents(source, counts), max_documents)


def _unique_documents(source: Source, counts: Counter[str]) -> Iterator[tuple[str, str]]:
    seen = DigestSet()
    for group, text in source.documents(counts):
        if not text or text.isspace():
            counts["empty"] += 1
            continue
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if not seen.add(int.from_bytes(digest[:8], "little")):
            counts["duplicate"] += 1
            continue
        yield group if group is not None else digest.hex(), text


class Plan(NamedTuple):
    """Which groups are for validation, and the total of characters, None if they were not counted."""

    is_validation: Callable[[str], bool]
    characters: int | None


def plan_validation(documents: Iterable[tuple[str, str]], fraction: float, seed: int) -> Plan:
    """Decide by group what is for validation, the same for the same seed.

    With more than MANY_GROUPS groups, each goes to validation with probability fraction. With fewer, groups
    that fit are taken in the order of their hash until fraction of the characters is reached; if none fits,
    the smallest alone. So a package that is half the corpus never makes half of it validation. Reads
    documents only as far as needed.
    Raises ValueError if there are fewer than two groups.
    """
    characters: Counter[str] = Counter()
    for group, text in documents:
        characters[group] += len(text)
        if len(characters) > MANY_GROUPS:
            return Plan(lambda group: _position(group, seed) < fraction, None)
    if len(characters) < 2:
        raise ValueError(
            f"validation takes whole documents, so there must be at least 2, got {len(characters)}: give "
            "more text, or cut a file with split -C 100k --additional-suffix=.txt FILE PART_"
        )
    room = fraction * characters.total()
    chosen = set()
    for group in sorted(characters, key=lambda group: _position(group, seed)):
        if characters[group] <= room:
            chosen.add(group)
            room -= characters[group]
    chosen = chosen or {min(characters, key=lambda group: (characters[group], _position(group, seed)))}
    if len(chosen) > MOST_OF_GROUPS * len(characters):
        log.warning(
            "%d of %d documents or packages, %.1f%% of the text, are for validation, and training sees none "
            "of them: a smaller data.validation_fraction takes fewer",
            len(chosen),
            len(characters),
            100 * sum(characters[group] for group in chosen) / characters.total(),
        )
    return Plan(chosen.__contains__, characters.total())


def _position(group: str, seed: int) -> float:
    # in [0, 1); hash() differs from one process to the next
    digest = hashlib.blake2b(f"{seed}:{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
