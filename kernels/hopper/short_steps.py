"""A warpgroup of the forward kernel where two thread blocks share a multiprocessor: one product at a time.

Other warpgroups fill the gaps that steps.py fills with products of its own, and nothing stays pending from
tile to tile: so S (64 x 64), P and o fit in 104 registers. tiles: forward.Tiles.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.block_lists import hide_unseen
from kernels.hopper.dropout import is_lowered, weights
from kernels.hopper.primitives import unpack_pairs
from kernels.hopper.query_tiles import ROWS, locate, make_steps, own_places, skip, words_at
from kernels.hopper.softmax import (
    LOWEST,
    hide,
    partial_sum,
    probabilities,
    raise_maximum,
    rescale,
    shift_of,
)
from kernels.hopper.steps import (
    begin_to_drop,
    count_excess_if,
    no_excess,
    read_words,
    scores_of_nothing,
    some_outweigh,
    store,
)


@gluon.jit
def step(tiles, q, o, m_i, l_i, excess, n, first, end, place, masked, kept, scale_log2, shift, dropping):
    """Adds one block of keys, use n of the rings.

    first, end: of the keys that each query sees; with lists, both are the query's line in tiles of bits.
    kept: whether the maximum of the blocks before serves, see softmax.probabilities.
    """
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    zeros = scores_of_nothing(tiles)
    k = tiles.k.index(tiles.k_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (ROWS, BLOCK_N)
    words = read_words(tiles, n)
    s = warpgroup_mma_wait(0, deps=[s])
    tiles.k_ring.release(n)
    if masked:
        if tiles.mask.KIND == "blocks":
            s = hide_unseen(s, words_at(tiles, place, first, s), float("-inf"))
        else:
            s = hide(s, first, end, place, float("-inf"), tiles.mask.KIND)
    raised = not kept if tiles.KEEPS_MAXIMUM else True
    if raised:
        m_i, alpha = raise_maximum(s, m_i, scale_log2, shift)
        l_i, o = rescale(l_i, alpha), rescale(o, alpha)
        if tiles.KEEPS_MAXIMUM:
            excess = rescale(excess, alpha)
    p, sums = probabilities(s, m_i, scale_log2)
    l_i += sums
    # compared before the product is issued: behind that, the comparison would hold up its second instruction
    some = some_outweigh(tiles, l_i, sums)
    pairs = weights(tiles, p, dropping, words)
    p = unpack_pairs(pairs, tiles.q.dtype, P_LAYOUT)
    v = tiles.v.index(tiles.v_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    o = warpgroup_mma(p, v, o, is_async=True)  # (ROWS, D)
    excess = count_excess_if(tiles, some, excess, pairs, l_i, sums)
    o = warpgroup_mma_wait(0, deps=[o])
    tiles.v_ring.release(n)
    return o, m_i, l_i, excess


@gluon.jit
def consume_short(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX: gl.constexpr):
    """forward.consume_tiles in these steps."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.HEAD_DIM, 16])
    LISTED: gl.constexpr = tiles.mask.KIND == "blocks"
    i = tiles.take(nth)
    while i < tiles.order.total():
        tiles.overflow.wait_for_copies(anew)
        batch, head, row, begin, whole_begin, whole_end, end = locate(tiles, i)
        row += INDEX * ROWS
        lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        if LISTED:
            first = INDEX * ROWS + lines
            key_end = first
        else:
            first, key_end = tiles.mask.keys_of(batch, gl.maximum(row, 0) + lines)
        own_begin, whole_begin, whole_end, own_end = own_places(
            tiles, batch, row, begin, whole_begin, whole_end, end
        )
        shift = shift_of(row + lines, tiles.q.dtype, is_lowered(tiles))
        dropping = begin_to_drop(tiles, batch, head, row)
        q = tiles.queries(nth, INDEX)
        o = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        m_i = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l_i = partial_sum(scores_of_nothing(tiles))
        excess = no_excess(tiles)
        if not LISTED:
            for skipped in range(n, n + end - own_end):
                skip(tiles, skipped, skipped)
            n += end - own_end
        steps = make_steps(tiles, own_begin, whole_begin, whole_end, own_end, anew)
        for j in range(steps.count):
            o, m_i, l_i, excess = step(
                tiles, q, o, m_i, l_i, excess, n + j, first, key_end, steps.place(j), steps.is_masked(j),
                j >= steps.kept, scale_log2, shift, dropping
            )  # fmt: skip
        tiles.q_ring.release(nth)
        n += steps.count
        if not LISTED:
            for skipped in range(n, n + own_begin - begin):
                skip(tiles, skipped, skipped)
            n += own_begin - begin
        if LISTED or row >= 0:
            store(
                tiles, out_desc, lse_ptr, o, m_i, l_i, excess, batch * tiles.n_head + head, row, i, anew,
                INDEX
            )  # fmt: skip
        nth += 1
        i = tiles.take(nth)
    return n, nth + 1
