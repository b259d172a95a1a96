"""A warpgroup of the forward kernel with heads of 136 to 256: O alone takes 128 registers of a thread.

So tiles of keys are 64 wide, and nothing stays pending from tile to tile. S of the next block is issued
behind the product with V; the two warpgroups take turns, so that one computes its softmax while the other's
products run. tiles: forward.Tiles; o: the two parts of wide_heads.py.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from kernels.hopper.block_lists import BLOCK_SIZE, hide_unseen
from kernels.hopper.dropout import is_lowered, weights
from kernels.hopper.primitives import opaque, unpack_pairs
from kernels.hopper.query_tiles import ROWS, locate, make_steps, own_places, words_at
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
    pass_turn,
    read_words,
    scores_of_nothing,
    skip_in_turn,
    some_outweigh,
    store,
    take_turn,
)
from kernels.hopper.wide_heads import (
    FIRST,
    LEFT_LAYOUT,
    for_channels,
    over_channels,
    scale_rows,
    zeros_of_channels,
)


@gluon.jit
def scores(tiles, n, INDEX: gl.constexpr):
    """Issues S = Q K_n^T, (ROWS, BLOCK_N)."""
    k = tiles.k.index(n % tiles.k_ring.STAGES).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    # opaque: otherwise the addresses of q's parts are computed before the loop, and spilled
    q = tiles.q.index(opaque(gl.to_tensor(INDEX))).reshape([ROWS, tiles.HEAD_DIM])
    return over_channels(q, k, scores_of_nothing(tiles), tiles.REST, use_acc=False)


@gluon.jit
def hide_at(tiles, s, batch, row, place):
    """s, -inf where queries do not see keys; what they see is found anew, for lack of registers."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
    if tiles.mask.KIND == "blocks":
        s = hide_unseen(s, words_at(tiles, place, rows % BLOCK_SIZE, s), float("-inf"))
    else:
        first, end = tiles.mask.keys_of(batch, rows)
        s = hide(s, first, end, place, float("-inf"), tiles.mask.KIND)
    return s


@gluon.jit
def step(
    tiles, s, o, m_i, l_i, excess, n, batch, row, place, masked, kept, scale_log2, shift, dropping,
    LAST: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Adds block n of keys, given its scores s; returns the next block's too, unless it is the LAST.

    kept: whether the maximum of the blocks before serves, see softmax.probabilities.
    """
    if masked:
        s = hide_at(tiles, s, batch, row, place)
    raised = not kept if tiles.KEEPS_MAXIMUM else True
    if raised:
        m_i, alpha = raise_maximum(s, m_i, scale_log2, shift)
        l_i, o = rescale(l_i, alpha), scale_rows(o, alpha)
        if tiles.KEEPS_MAXIMUM:
            excess = rescale(excess, alpha)
    p, sums = probabilities(s, m_i, scale_log2)
    l_i += sums
    pairs = weights(tiles, p, dropping, read_words(tiles, n))
    some = some_outweigh(tiles, l_i, sums)
    # measured: behind the products with heads of 192, before them with heads of 256
    BEHIND: gl.constexpr = tiles.REST < FIRST
    if not BEHIND:
        excess = count_excess_if(tiles, some, excess, pairs, l_i, sums)
    p = unpack_pairs(pairs, tiles.q.dtype, LEFT_LAYOUT)
    v = tiles.v.index(tiles.v_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    if not LAST:
        tiles.k_ring.take(n + 1)
    take_turn(n, INDEX)
    o = for_channels(p, v, o)
    if not LAST:
        s = scores(tiles, n + 1, INDEX)
    pass_turn(n, INDEX, tiles.CONSUMERS)
    if BEHIND:
        excess = count_excess_if(tiles, some, excess, pairs, l_i, sums)
    # scores are two products, too
    o = warpgroup_mma_wait(0 if LAST else 2, deps=[o[0], o[1]])
    tiles.v_ring.release(n)
    if not LAST:
        s = warpgroup_mma_wait(0, deps=[s])
        tiles.k_ring.release(n + 1)
    return s, o, m_i, l_i, excess


@gluon.jit
def consume_wide(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX: gl.constexpr):
    """forward.consume_tiles in these steps."""
    # so a warpgroup's queries are always in the buffer of its number
    gl.static_assert(tiles.q_ring.STAGES == 1)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    i = tiles.take(nth)
    while i < tiles.order.total():
        tiles.overflow.wait_for_copies(anew)
        batch, head, row, begin, whole_begin, whole_end, end = locate(tiles, i)
        row += INDEX * ROWS
        if tiles.mask.KIND == "blocks" and not tiles.KEEPS_MAXIMUM:
            # opaque: otherwise the address of out's copy is spilled
            row = opaque(row)
        own_begin, whole_begin, whole_end, own_end = own_places(
            tiles, batch, row, begin, whole_begin, whole_end, end
        )
        for skipped in range(n, n + end - own_end):
            skip_in_turn(tiles, skipped, INDEX)
        n += end - own_end
        steps = make_steps(tiles, own_begin, whole_begin, whole_end, own_end, anew)
        if own_begin < own_end:
            lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
            shift = shift_of(row + lines, tiles.q.dtype, is_lowered(tiles))
            dropping = begin_to_drop(tiles, batch, head, row)
            o = zeros_of_channels(ROWS, tiles.REST)
            m_i = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            l_i = partial_sum(scores_of_nothing(tiles))
            excess = no_excess(tiles)
            tiles.k_ring.take(n)
            take_turn(n, INDEX)
            s = scores(tiles, n, INDEX)
            pass_turn(n, INDEX, tiles.CONSUMERS)
            s = warpgroup_mma_wait(0, deps=[s])
            tiles.k_ring.release(n)
            last = steps.count - 1
            for j in range(last):
                s, o, m_i, l_i, excess = step(
                    tiles, s, o, m_i, l_i, excess, n + j, batch, row, steps.place(j), steps.is_masked(j),
                    j >= steps.kept, scale_log2, shift, dropping, False, INDEX
                )  # fmt: skip
            # all scores are there
            tiles.q_ring.release(nth)
            _, o, m_i, l_i, excess = step(
                tiles, s, o, m_i, l_i, excess, n + last, batch, row, steps.place(last),
                steps.is_masked(last), last >= steps.kept, scale_log2, shift, dropping, True, INDEX
            )  # fmt: skip
            store(
                tiles, out_desc, lse_ptr, o, m_i, l_i, excess, batch * tiles.n_head + head, row, i, anew,
                INDEX
            )  # fmt: skip
        else:
            take_turn(n, INDEX)
            pass_turn(n, INDEX, tiles.CONSUMERS)
            tiles.q_ring.release(nth)
        n += steps.count
        for skipped in range(n, n + own_begin - begin):
            skip_in_turn(tiles, skipped, INDEX)
        n += own_begin - begin
        nth += 1
        i = tiles.take(nth)
    return n, nth + 1
