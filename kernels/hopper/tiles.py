"""Block sizes of the Hopper kernels, measured on an H200: the only tuning file here."""

import math
from functools import lru_cache
from typing import NamedTuple

# shapes whose derived numbers are cached, because computing them takes Python longer than a launch
MOST_SHAPES = 1024
# how much of the 50 MB of L2 the data that is reread within one section of heads may take
SECTION_BYTES = 32 * 2**20


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up; Triton's own takes Python ten times as long."""
    return -(-n // size)


class ForwardTile(NamedTuple):
    """The sizes of the forward kernel.

    consumers: warpgroups of 64 query rows; q_stages: buffers in the ring of Q; stages: of K and V.
    blocks: thread blocks per multiprocessor. dealt: tiles a thread block gets before it asks a counter.
    """

    consumers: int
    block_n: int
    q_stages: int
    stages: int
    consumer_registers: int
    producer_registers: int
    blocks: int = 1
    dealt: int = 2


# value of `dealt` with which no counter is asked
EVERY = 2**31 - 1

# a second thread block fills the gaps of two warpgroups; small key blocks waste little at a mask's edges
SHORT = ForwardTile(2, 64, 2, 4, 104, 24, blocks=2)
# measured: up to this many keys per query, on average, SHORT is faster
SHORT_ROWS = {"full": 1100, "causal": 1100, "window": math.inf}
# the same where SHORT cannot keep the maximum, as measured when nothing did
SHORT_ROWS_THAT_RAISE = {"full": 400, "causal": 520, "window": 1024}


def forward_tile(
    width: int, mask: str, keys_per_query: float, dropout: bool = False, has_room: bool = True
) -> ForwardTile:
    """has_room: whether probabilities may be as large as kept maxima make them, see launch.has_room."""
    if width == 256:
        # the first warpgroup gets what these leave of 504 registers, 232 either way. Under dropout, and where
        # no block keeps the maximum, numbers that the producer holds too are spilled if it has 32
        others = (232, 40) if dropout or not has_room else (240, 32)
        return ForwardTile(2, 64, 1, 2, *others)
    if width == 128:
        return ForwardTile(2, 128, 2, 2, 240, 24)
    # a list serves 128 queries, so two warpgroups; the length of documents is not known here
    if mask in ("blocks", "intervals"):
        return SHORT
    keeps = has_room and keeps_maximum(SHORT, mask, dropout)
    if keys_per_query <= (SHORT_ROWS if keeps else SHORT_ROWS_THAT_RAISE)[mask]:
        return SHORT
    # a third warpgroup fills the gaps of two, but a step with a mask takes twice as long as another, and
    # under a window 192 rows need more of them than 128
    if mask == "window":
        return ForwardTile(2, 128, 2, 3, 240, 24)
    return ForwardTile(3, 128, 2, 3, 160, 32, dealt=EVERY)


def keeps_maximum(tile: ForwardTile, mask: str, dropout: bool) -> bool:
    """Whether blocks of keys keep the maximum of those before, see softmax.probabilities.

    It is faster wherever it was measured. But with dropout, short tiles lack the registers if they hold both
    edges of a mask.
    """
    return not (dropout and tile.blocks == 2 and mask in ("window", "intervals"))


class BackwardTile(NamedTuple):
    """The sizes of a backward kernel.

    stages, kv_stages, ds_stages, dq_stages: buffers in the rings of queries, K, dS and (heads of 64) dq. The
    reducer is the warpgroup that computes dq. Without it (SUMS_DQ=False) ds_stages and dq_stages have no
    effect; with it, heads of 128 have one buffer of V. Otherwise V has as many as K. Heads of 256 have no
    reducer, and one buffer of K and V each; their ds_stages are buffers of P.
    """

    stages: int
    kv_stages: int
    ds_stages: int
    dq_stages: int
    consumer_registers: int
    reducer_registers: int
    producer_registers: int


def backward_tile(width: int, sums_dq: bool = True) -> BackwardTile:
    if width == 256:
        return BackwardTile(2, 1, 2, 0, 240, 0, 32)
    # without dq, shared memory has room for more stages, or for a second V
    if not sums_dq:
        return BackwardTile(4 if width == 64 else 3, 2, 1, 1, 240, 0, 24)
    if width == 64:
        return BackwardTile(3, 2, 2, 2, 192, 104, 24)
    return BackwardTile(2, 2, 2, 0, 208, 72, 24)


# GB/s of an H200, to which the bounds below apply
H200_BANDWIDTH = 4917
# dq.py is faster up to this many keys per query, on average; all keys of listed blocks count. Chosen between
# what was measured on an H200 and on an H100, scaled by bandwidth
ROWS_WITHOUT_SUMS = {
    64: {"full": 405, "causal": 345, "window": 230, "intervals": 180, "blocks": 370},
    128: {"full": 900, "causal": 740, "window": 520, "intervals": 370, "blocks": 700},
}


def sum_pays(width: int, mask: str, keys_per_query: float, bandwidth: float) -> bool:
    """Whether to sum dq in float32 beside dk and dv, rather than run dq.py; bandwidth: of memory, GB/s.

    The sum costs 16 D bytes per query, to zero, add to and round, however few keys it sees; dq.py costs two
    more products for each block. docs/hopper.md shows where the two break even.
    """
    return keys_per_query * bandwidth > ROWS_WITHOUT_SUMS[width][mask] * H200_BANDWIDTH


class DqTile(NamedTuple):
    """The sizes of dq.py.

    consumers: warpgroups of 64 query rows; q_stages: buffers in the rings of Q and dout; stages: of K and V,
    but of K alone for heads of 256, which have one of V.
    """

    consumers: int
    block_n: int
    q_stages: int
    stages: int
    consumer_registers: int
    producer_registers: int


def dq_tile(width: int, mask: str, dropout: bool = False) -> DqTile:
    if width == 256:
        return DqTile(2, 64, 1, 2, 240, 32)
    # dropout's draws take the registers of 64 keys
    if width == 128 and dropout:
        return DqTile(2, 64, 1, 4, 240, 24)
    # blocks of 64 keys leave registers for a third warpgroup with heads of 64
    if width == 64 and mask in ("full", "causal"):
        return DqTile(3, 64, 2, 4, 160, 32)
    # only with heads of 64 does shared memory hold the next tile's queries beside this one's
    return DqTile(2, 128, 2, 4, 240, 24) if width == 64 else DqTile(2, 128, 1, 2, 240, 24)


def key_section_bytes(mask: str, head_dim: int) -> int:
    """The most bytes that the keys and values of one section take, as measured.

    The fewer the heads, the more thread blocks read one of them at a time; under a full mask, in step.
    """
    # otherwise a section of wide heads has about as many tiles as there are multiprocessors, and in the
    # rounds that dq.py deals some would get the long tiles of every section
    causal = 1 if head_dim > 128 else 2
    return SECTION_BYTES // {"full": 4, "causal": causal}.get(mask, 1)


@lru_cache(MOST_SHAPES)
def section_heads(seq_k: int, head_dim: int, mask: str, group: int, n_heads: int) -> int:
    """Query heads whose keys and values stay in L2 together, in sections of equal size."""
    bytes_per_head = 2 * seq_k * head_dim * 2
    n_kv_heads = n_heads // group
    most = key_section_bytes(mask, head_dim) // bytes_per_head
    n_sections = cdiv(n_kv_heads, max(1, most))
    return cdiv(n_kv_heads, n_sections) * group


@lru_cache(MOST_SHAPES)
def backward_section_heads(seq_q: int, width: int, group: int, n_kv_heads: int) -> int:
    """Heads of k and v whose queries, dout and float32 sums of dq stay in L2 together."""
    bytes_per_head = 8 * seq_q * width * group
    heads = SECTION_BYTES // bytes_per_head
    if width == 128:
        # measured: half of those that fit, but two where two fit
        heads = min(heads, max(2, heads // 2))
    return min(max(1, heads), n_kv_heads)


def turns_pay(n_tiles: int, n_sm: int, keys_per_query: float) -> bool:
    """Whether sums of dq take turns, see sums.py, or all exist at once; n_tiles: of all heads of q.

    Measured: few tiles end while some of them wait for others' sums, and short ones leave no time to round.
    """
    return n_tiles >= 8 * n_sm and keys_per_query >= 384


@lru_cache(MOST_SHAPES)
def turn_heads(n_tiles: int, n_kv_heads: int, n_sm: int) -> int:
    """Heads of k and v of a section whose sums take turns, see sums.py; n_tiles: of one head.

    Measured, without grouped heads: about one tile for each multiprocessor. With fewer, tiles wait for
    others' sums to be rounded (0.8 of the speed with half as many); with more, less stays in L2.
    """
    return min(math.ceil(15 / 16 * n_sm / n_tiles), n_kv_heads)
