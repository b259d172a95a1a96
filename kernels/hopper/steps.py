"""What a warpgroup of the forward kernel does with one block of keys, and with a finished tile.

tiles: forward.Tiles. p: (ROWS, BLOCK_N // 2), pairs of probabilities; o: (ROWS, D); m_i: (ROWS,) in base 2;
l_i: (ROWS, 4), see softmax.partial_sum. n counts blocks of keys, and so uses of the rings of K and V.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.block_lists import hide_unseen
from kernels.hopper.dropout import is_lowered, weights
from kernels.hopper.primitives import (
    copy_out,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    unpack_pairs,
)
from kernels.hopper.query_tiles import ROWS, words_at
from kernels.hopper.schedule import quotient
from kernels.hopper.softmax import (
    LOWERED_BY,
    add_excess,
    hide,
    outweighing,
    partial_sum,
    probabilities,
    raise_maximum,
    rescale,
    rounded_sum,
)
from kernels.hopper.wide_heads import copy_out_channels, scale_rows

LN2 = gl.constexpr(0.6931471805599453)
# the first of the hardware's named barriers by which warpgroups take turns, one for each
TURN_BARRIER = gl.constexpr(9)


@gluon.jit
def take_turn(token, INDEX: gl.constexpr):
    """Waits until every other warpgroup has issued its products since this one last did.

    Issuing at the same time, they would interleave instruction by instruction, finish together and then wait
    together.
    """
    named_barrier_sync(token, TURN_BARRIER + INDEX, 256)


@gluon.jit
def pass_turn(token, INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next warpgroup issue its products, see take_turn."""
    named_barrier_arrive(token, TURN_BARRIER + (INDEX + 1) % CONSUMERS, 256)


@gluon.jit
def scores_of_nothing(tiles):
    """Zeros (ROWS, BLOCK_N), in the layout of a product."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    return gl.full([ROWS, tiles.BLOCK_N], 0.0, gl.float32, S_LAYOUT)


@gluon.jit
def begin_to_drop(tiles, batch, head, row):
    """Dropout's words for 64 rows."""
    dropping = gl.to_tensor(0)
    if tiles.dropout.IS_ON:
        dropping = tiles.dropout.rows_of(scores_of_nothing(tiles), batch, head, row)
    return dropping


@gluon.constexpr_function
def reads_early(consumers, mask):
    """Whether a block's dropout words are read before its softmax, so that drawing overlaps with it.

    Three warpgroups lack the registers for the words until the previous block's P is gone; so do two that
    also hold both edges of a window.
    """
    return consumers == 2 and mask != "window"


@gluon.jit
def words_buffer(tiles, n):
    """The buffer of the words of block n of keys.

    If read late, they need one buffer more than k: this k is released before they are read, the next k after.
    """
    return n % tiles.dropout.words.shape[0]


@gluon.jit
def read_words(tiles, n):
    """Dropout's words for block n of keys."""
    words = gl.to_tensor(0)
    if tiles.dropout.IS_ON:
        words = tiles.dropout.read(scores_of_nothing(tiles), words_buffer(tiles, n))
    return words


@gluon.jit
def products(
    tiles, q, p, o, l_i, excess, n, n_before, begun, pending, KEPT: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Issues S = Q K_n^T and O += P V of the block before, and waits for S; gives words if read early, or 0.

    begun: whether O holds earlier blocks of its tile; pending: whether there is a block before. KEPT: whether
    this block keeps the maximum; so may the one before, whose excess is counted while the products run:
    excess[1] are its sums, and excess[0] is what is counted.
    """
    zeros = scores_of_nothing(tiles)
    k = tiles.k.index(tiles.k_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    take_turn(n, INDEX)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (ROWS, BLOCK_N)
    o = weigh(tiles, p, o, n_before, begun, pending)
    pass_turn(n, INDEX, tiles.CONSUMERS)
    words = gl.to_tensor(0)
    if reads_early(tiles.CONSUMERS, tiles.mask.KIND):
        words = read_words(tiles, n)
    if KEPT:
        excess = count_excess(tiles, excess[0], p, l_i, excess[1]), excess[1]
    s = warpgroup_mma_wait(1, deps=[s])
    tiles.k_ring.release(n)
    return s, o, words, excess


@gluon.jit
def weigh(tiles, p, o, n, begun, pending):
    """Issues O += P V_n, or O = P V_n unless the tile has `begun`."""
    v = tiles.v.index(tiles.v_ring.take(n, pending)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    p = unpack_pairs(p, tiles.q.dtype, P_LAYOUT)
    return warpgroup_mma(p, v, o, use_acc=begun, is_async=True)  # (ROWS, D)


@gluon.jit
def no_excess(tiles):
    """(ROWS, 4) zeros for softmax.add_excess."""
    return partial_sum(scores_of_nothing(tiles)) if tiles.KEEPS_MAXIMUM else gl.to_tensor(0)


@gluon.jit
def some_outweigh(tiles, l_i, sums):
    """softmax.outweighing in kernels that keep the maximum."""
    return outweighing(l_i, sums, is_lowered(tiles)) if tiles.KEEPS_MAXIMUM else gl.to_tensor(0)


@gluon.jit
def count_excess_if(tiles, some, excess, p, l_i, sums):
    """softmax.add_excess of a block whose pairs are p, in kernels that keep the maximum."""
    if tiles.KEEPS_MAXIMUM:
        excess = add_excess(excess, p, l_i, sums, some, is_lowered(tiles), tiles.dropout.IS_ON)
    return excess


@gluon.jit
def count_excess(tiles, excess, p, l_i, sums):
    """The same, compared and counted at once."""
    return count_excess_if(tiles, some_outweigh(tiles, l_i, sums), excess, p, l_i, sums)


@gluon.jit
def step(
    tiles, q, p, o, m_i, l_i, excess, n, begun, first, end, place, scale_log2, shift, dropping,
    MASKED: gl.constexpr, KEPT: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """One block of keys after the first, at `place`; if KEPT, with the maximum of the blocks before."""
    LISTED: gl.constexpr = MASKED and tiles.mask.KIND == "blocks"
    if LISTED:
        # loaded before the products are issued, to arrive while they run
        bits = words_at(tiles, place, first, scores_of_nothing(tiles))
    s, o, words, excess = products(tiles, q, p, o, l_i, excess, n, n - 1, begun, True, KEPT, INDEX)
    if LISTED:
        s = hide_unseen(s, bits, float("-inf"))
    elif MASKED:
        s = hide(s, first, end, place, float("-inf"), tiles.mask.KIND)
    if not KEPT:
        m_i, alpha = raise_maximum(s, m_i, scale_log2, shift)
        l_i = rescale(l_i, alpha)
    p_new, sums = probabilities(s, m_i, scale_log2)
    l_i += sums
    if KEPT:
        excess = excess[0], sums
    elif tiles.KEEPS_MAXIMUM:
        excess = rescale(excess[0], alpha), excess[1]
    o = warpgroup_mma_wait(0, deps=[o])
    tiles.v_ring.release(n - 1)
    if not reads_early(tiles.CONSUMERS, tiles.mask.KIND):
        words = read_words(tiles, n)
    if not KEPT:
        o = rescale(o, alpha)
    p = weights(tiles, p_new, dropping, words)
    return p, o, m_i, l_i, excess


@gluon.jit
def walk(
    tiles, q, p, o, m_i, l_i, excess, n, steps, start, stop, first, end, scale_log2, shift, dropping,
    MASKED: gl.constexpr, KEPT: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Steps start to stop of a tile whose step 0 is use n of the rings."""
    for j in range(start, stop):
        p, o, m_i, l_i, excess = step(
            tiles, q, p, o, m_i, l_i, excess, n + j, j > 1, first, end, steps.place(j), scale_log2, shift,
            dropping, MASKED, KEPT, INDEX
        )  # fmt: skip
    return p, o, m_i, l_i, excess


@gluon.jit
def skip_in_turn(tiles, n, INDEX: gl.constexpr):
    """query_tiles.skip for warpgroups that take turns in issuing their products."""
    tiles.k_ring.take(n)
    take_turn(n, INDEX)
    pass_turn(n, INDEX, tiles.CONSUMERS)
    tiles.k_ring.release(n)
    tiles.v_ring.take(n)
    tiles.v_ring.release(n)


@gluon.jit
def finish(
    tiles, out_desc, lse_ptr, p, o, m_i, l_i, excess, n, begun, head, row, i, anew, INDEX: gl.constexpr
):  # fmt: skip
    """Issues the last product of a tile, with no other to overlap with, and stores the tile."""
    o = weigh(tiles, p, o, n, begun, True)
    o = warpgroup_mma_wait(0, deps=[o])
    tiles.v_ring.release(n)
    store(tiles, out_desc, lse_ptr, o, m_i, l_i, excess[0], head, row, i, anew, INDEX)


@gluon.jit
def store(tiles, out_desc, lse_ptr, o, m_i, l_i, excess, head, row, i, anew, INDEX: gl.constexpr):
    """Writes 64 rows of tile i: o / l and the natural log-sum-exp; a row that saw nothing gives 0 and -inf.

    head counts over all batches; o: (ROWS, D), of wide heads in two parts. anew: see overflow.py.
    """
    rounded = l_i
    if tiles.KEEPS_MAXIMUM:
        rounded += excess
    rounded = gl.convert_layout(gl.sum(rounded, 1), m_i.type.layout)
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    if tiles.KEEPS_MAXIMUM:
        tiles.overflow.note(l_i, i, anew, INDEX)
    LOWERED: gl.constexpr = is_lowered(tiles)
    if LOWERED:
        l_i *= 2.0**LOWERED_BY
        rounded *= 2.0**LOWERED_BY
        m_i -= LOWERED_BY
    empty = l_i == 0.0
    rows = row + gl.arange(0, ROWS, layout=l_i.type.layout)
    inverse = gl.where(empty, 0.0, 1.0 / rounded_sum(rounded, rows, tiles.q.dtype))
    if tiles.dropout.IS_ON:
        inverse *= tiles.dropout.keep_scale
    if LOWERED:
        inverse *= 2.0**LOWERED_BY
    # opaque: otherwise addresses are computed at kernel start, and spilled where dropout takes the registers
    buffer = tiles.out.index(opaque(gl.to_tensor(INDEX)) if tiles.dropout.IS_ON else INDEX)
    batch = quotient(head, tiles.by_n_head)
    # once the previous tile has left the buffer
    if tiles.REST > 0:
        o = scale_rows(o, inverse)
        copy_out_channels(out_desc, batch, head - batch * tiles.n_head, row, o, buffer)
    else:
        o = rescale(o, inverse)
        copy_out(out_desc, [batch, head - batch * tiles.n_head, row, 0], o, buffer, 0)

    lse = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
    gl.store(lse_ptr + head.to(gl.int64) * tiles.mask.seq_q + rows, lse, mask=rows < tiles.mask.seq_q)
