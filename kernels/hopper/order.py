"""What the host tells kernels about the order of their tiles, see schedule.py."""

from functools import lru_cache

from kernels.hopper.tiles import MOST_SHAPES


@lru_cache(MOST_SHAPES)
def order_arguments(n_heads: int, n_tiles: int, section: int) -> tuple[int, int, int, int]:
    """The arguments of schedule.TileOrder: the heads of a section, and divisions by the sizes of sections.

    n_heads: of all batches; n_tiles: of one head.
    """
    last_section = n_heads % section or section
    return section, division(section * n_tiles), division(section), division(last_section)


@lru_cache(MOST_SHAPES)
def division(divisor: int) -> int:
    """What schedule.quotient takes instead of a divisor: a multiplier in 32 bits, a shift above them.

    Exact for 0 <= n < 2**30. Source: Granlund and Montgomery, Division by invariant integers, 1994.
    """
    shift = (divisor - 1).bit_length()
    multiplier = 2**32 * (2**shift - divisor) // divisor + 1
    # the highest bit makes every one an int64, so that no divisor compiles a kernel of its own
    return 1 << 62 | shift << 32 | multiplier
