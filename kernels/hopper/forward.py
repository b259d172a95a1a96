"""out = softmax(q k^T * scale) v and its log-sum-exp on sm_90, in Gluon.

A thread block is persistent: one warp fills rings of q, k and v tiles by bulk copies, and CONSUMERS
warpgroups own 64 query rows each. The rings run on from one tile to the next, and so does the arithmetic:
step j of a tile issues S_j = q k_j^T and o += P_{j-1} v_{j-1} together, and step 0 issues the last product of
the previous tile. While one warpgroup computes a softmax, the others use the tensor cores. Keys are visited
from the last to the first, of a list whole blocks before the others, in separate loops for masked and whole
blocks; under a causal mask a warpgroup skips the blocks that only others see. With BLOCKS = 2, which heads of
64 have in short rows and under most masks, a step issues one product after the other instead: short_steps.py.
So do heads of 136 to 256: wide_steps.py.

Sources: FlashAttention-2 (arXiv:2307.08691), FlashAttention-3 (arXiv:2407.08608).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from kernels.hopper.block_lists import BLOCK_SIZE, BlockLists, hide_unseen
from kernels.hopper.dropout import PAIRS_OF_EIGHT, Dropout, is_lowered, make_dropout, make_words, weights
from kernels.hopper.overflow import NOTHING, Overflow, make_overflow
from kernels.hopper.primitives import (
    Ring,
    announce,
    announced,
    make_numbers,
    make_ring,
    opaque,
    pack_pairs,
    record,
)
from kernels.hopper.query_tiles import ROWS, key_block, locate, make_steps, places, words_at
from kernels.hopper.schedule import Mask, TileOrder
from kernels.hopper.short_steps import consume_short
from kernels.hopper.softmax import LOWEST, hide, partial_sum, row_maximum, shift_of
from kernels.hopper.steps import (
    begin_to_drop,
    count_excess,
    finish,
    no_excess,
    pass_turn,
    products,
    read_words,
    reads_early,
    skip_in_turn,
    store,
    take_turn,
    walk,
    words_buffer,
)
from kernels.hopper.wide_heads import copies_of, copy_in
from kernels.hopper.wide_steps import consume_wide


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    q: gl.shared_memory_descriptor  # (Q_STAGES * CONSUMERS, 1, 1, ROWS, D)
    number: gl.shared_memory_descriptor  # (Q_STAGES, 1) int32, the number in order of q's tile
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, D), or REST of D for heads of 256
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    overflow: Overflow
    order: TileOrder
    mask: Mask
    dropout: Dropout
    n_head: gl.tensor
    by_n_head: gl.tensor
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    REST: gl.constexpr  # of heads of 256: the channels behind the first 128 that count; else 0
    CONSUMERS: gl.constexpr
    KEEPS_MAXIMUM: gl.constexpr  # whether whole blocks, and those behind them, keep the maximum before

    @gluon.jit
    def take(self, nth):
        """The number in order of this thread block's nth tile, once its queries have arrived."""
        return announced(self.number.index(self.q_ring.take(nth)))

    @gluon.jit
    def queries(self, nth, part):
        """(ROWS, D), part number `part` of that tile's rows."""
        buffer = nth % self.q_ring.STAGES * self.CONSUMERS + part
        return self.q.index(buffer).reshape([ROWS, self.HEAD_DIM])


@gluon.jit
def produce(tiles, q_desc, k_desc, v_desc, group, counter_ptr, DEALT: gl.constexpr):
    """Sends all tiles of this thread block, and then once more those that overflow.py has noted."""
    nth = gl.to_tensor(0)
    n = gl.to_tensor(0)
    index = gl.to_tensor(-1)
    if tiles.KEEPS_MAXIMUM:
        for anew in range(2):
            i = tiles.order.dealt(nth)
            if anew > 0:
                mbarrier.wait(tiles.overflow.done, 0)
                i, index = tiles.overflow.next(gl.to_tensor(NOTHING), index, tiles.order.total())
            nth, n, index = send(
                tiles, q_desc, k_desc, v_desc, group, counter_ptr, nth, n, index, i, anew, DEALT
            )
    else:
        i = tiles.order.dealt(nth)
        send(tiles, q_desc, k_desc, v_desc, group, counter_ptr, nth, n, index, i, 0, DEALT)


@gluon.jit
def send(
    tiles, q_desc, k_desc, v_desc, group, counter_ptr, nth, n, index, i, anew, DEALT: gl.constexpr
):  # fmt: skip
    """Fills the rings with tile i and those that follow it: Q, then each K with the V of the block before.

    With one buffer of Q, which empties last, the first K precedes it, and each K has its own V with it: the
    last V of a tile would wait for the next Q, which waits for that V. nth and n count the tiles and blocks
    of keys that have been sent; index is that of overflow.next.
    """
    ONE_Q: gl.constexpr = tiles.q_ring.STAGES == 1
    batch_before = 0
    head_before = 0
    block_before = 0
    n_first = n
    while i < tiles.order.total():
        batch, head, row, begin, whole_begin, whole_end, end = locate(tiles, i)
        steps = make_steps(tiles, begin, whole_begin, whole_end, end, anew)
        kv_head = head // group
        number = i
        if not ONE_Q:
            copy_queries(tiles, q_desc, batch, head, row, number, nth)
        nth += 1
        for j in range(steps.count):
            # a thread block asks for its next tile as late as it can without waiting for the answer: so it
            # gets as much work as any other
            if j == steps.count - 1:
                if anew > 0:
                    i, index = tiles.overflow.next(i, index, tiles.order.total())
                else:
                    i = tiles.order.next(nth, counter_ptr, DEALT)
            block = key_block(tiles, steps.place(j)) * tiles.BLOCK_N
            stage, full = tiles.k_ring.fill(n)
            if tiles.dropout.IS_ON:
                tiles.dropout.leave_pairs(words_buffer(tiles, n), block)
            mbarrier.expect(full, copies_of(tiles.REST) * k_desc.block_type.nbytes)
            copy_in(k_desc, batch, kv_head, block, full, tiles.k.index(stage), tiles.REST)
            if ONE_Q:
                if j == 0:
                    copy_queries(tiles, q_desc, batch, head, row, number, nth - 1)
                copy_values(tiles, v_desc, batch, kv_head, block, n)
            elif n > n_first:
                copy_values(tiles, v_desc, batch_before, head_before, block_before, n - 1)
            batch_before = batch
            head_before = kv_head
            block_before = block
            n += 1
    if not ONE_Q:
        # every thread block has a tile, but not every one a noted tile
        any_tile = n > n_first if tiles.KEEPS_MAXIMUM else True
        if any_tile:
            copy_values(tiles, v_desc, batch_before, head_before, block_before, n - 1)
    # a number past the last tile ends the consumers' loop
    stage, full = tiles.q_ring.fill(nth)
    announce(tiles.number.index(stage), i)
    mbarrier.arrive(full, count=1)
    return nth + 1, n, index


@gluon.jit
def copy_queries(tiles, q_desc, batch, head, row, i, nth):
    """Fills the ring of Q with the rows of the i-th tile in order, the nth of this thread block."""
    stage, full = tiles.q_ring.fill(nth)
    announce(tiles.number.index(stage), i)
    mbarrier.expect(full, tiles.CONSUMERS * copies_of(tiles.REST) * q_desc.block_type.nbytes)
    for c in gl.static_range(tiles.CONSUMERS):
        buffer = tiles.q.index(stage * tiles.CONSUMERS + c)
        copy_in(q_desc, batch, head, row + c * ROWS, full, buffer, tiles.REST)


@gluon.jit
def copy_values(tiles, v_desc, batch, kv_head, block, n):
    """Fills the ring of V with keys from `block` on, use n of the ring."""
    stage, full = tiles.v_ring.fill(n)
    mbarrier.expect(full, copies_of(tiles.REST) * v_desc.block_type.nbytes)
    copy_in(v_desc, batch, kv_head, block, full, tiles.v.index(stage), tiles.REST)


@gluon.jit
def consume(tiles, out_desc, lse_ptr, scale_log2, BLOCKS: gl.constexpr, INDEX: gl.constexpr):
    """Attention of 64 rows of every tile of this thread block, and once more of those that are sent again."""
    TAKES_TURNS: gl.constexpr = BLOCKS == 1
    # blocks of keys that this warpgroup has finished, and tiles
    n = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    if TAKES_TURNS and INDEX == tiles.CONSUMERS - 1:
        pass_turn(n, INDEX, tiles.CONSUMERS)
    if tiles.KEEPS_MAXIMUM:
        anew = gl.to_tensor(0)
        while anew < 2:
            n, nth = consume_tiles(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, BLOCKS, INDEX)
            tiles.overflow.end(tiles, nth - 1)
            # opaque: otherwise the condition is computed above, and spilled
            anew = opaque(anew) + 1
    else:
        n, nth = consume_tiles(tiles, out_desc, lse_ptr, scale_log2, n, nth, 0, BLOCKS, INDEX)
    tma.store_wait(0)
    if TAKES_TURNS and INDEX == 0:
        take_turn(n, INDEX)


@gluon.jit
def consume_tiles(
    tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, BLOCKS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """All tiles up to a number past the last one, in the order of steps that their size allows.

    n and nth, returned, count blocks of keys and tiles; anew: see overflow.py.
    """
    if tiles.HEAD_DIM == 256:
        n, nth = consume_wide(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX)
    elif BLOCKS == 2:
        n, nth = consume_short(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX)
    else:
        n, nth = consume_overlapped(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX)
    return n, nth


@gluon.jit
def consume_overlapped(tiles, out_desc, lse_ptr, scale_log2, n, nth, anew, INDEX: gl.constexpr):
    """consume_tiles with each product of P and V beside the next block's scores, across tiles too."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.HEAD_DIM, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    KIND: gl.constexpr = tiles.mask.KIND
    nothing = gl.full([ROWS, tiles.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    p = pack_pairs(nothing, tiles.q.dtype)
    o = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    m_i = gl.full([ROWS], LOWEST, gl.float32, ROW_LAYOUT)
    l_i = partial_sum(nothing)
    excess = no_excess(tiles), no_excess(tiles)
    # whether a tile still lacks its last product, with the values of block n_before
    pending = n < 0
    n_before = n
    begun = n < 0
    i_before = 0
    head_before = 0
    row_before = 0
    i = tiles.take(nth)
    while i < tiles.order.total():
        tiles.overflow.wait_for_copies(anew)
        batch, head, row, begin, whole_begin, whole_end, end = locate(tiles, i)
        own_end = end
        # the last rows of a tile see most under a causal mask: in the next tile another warpgroup has them
        part = (INDEX + nth) % tiles.CONSUMERS if KIND != "full" else INDEX
        row += part * ROWS
        if KIND == "causal":
            _, whole_begin, whole_end, own_end = places(tiles, batch, row, ROWS)
        if row < 0:
            own_end = begin
        n_first = n + end - own_end
        # a pending product holds a buffer of v: more than STAGES blocks later, the ring would stall
        if pending & (n_first - n_before > tiles.v_ring.STAGES):
            finish(
                tiles, out_desc, lse_ptr, p, o, m_i, l_i, excess, n_before, begun, head_before, row_before,
                i_before, anew, INDEX
            )  # fmt: skip
            pending = n < 0
        for skipped in range(n, n_first):
            skip_in_turn(tiles, skipped, INDEX)
        n = n_first
        if row >= 0:
            steps = make_steps(tiles, begin, whole_begin, whole_end, own_end, anew)
            rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            if KIND == "blocks":
                # in place of an interval, each query has its line in the tiles of bits
                key_first = rows % BLOCK_SIZE
                key_end = key_first
                bits = words_at(tiles, steps.place(0), key_first, nothing)
            else:
                key_first, key_end = tiles.mask.keys_of(batch, rows)
            shift = shift_of(rows, tiles.q.dtype, is_lowered(tiles))
            q = tiles.queries(nth, part)

            # if nothing is pending, o becomes a meaningless product, which is not stored
            s, o, words, excess = products(
                tiles, q, p, o, l_i, excess, n, n_before, begun, pending, False, INDEX
            )
            if steps.is_masked(0):
                if KIND == "blocks":
                    s = hide_unseen(s, bits, float("-inf"))
                else:
                    s = hide(s, key_first, key_end, steps.place(0), float("-inf"), KIND)
            m_new = gl.maximum(row_maximum(s) * scale_log2 + shift, LOWEST)
            p_new = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
            l_new = partial_sum(p_new)
            o = warpgroup_mma_wait(0, deps=[o])
            if pending:
                tiles.v_ring.release(n_before)
                store(
                    tiles, out_desc, lse_ptr, o, m_i, l_i, excess[0], head_before, row_before, i_before,
                    anew, INDEX
                )  # fmt: skip
            # after the store, whose registers it can use
            dropping = begin_to_drop(tiles, batch, head, row)
            if not reads_early(tiles.CONSUMERS, KIND):
                words = read_words(tiles, n)
            p = weights(tiles, p_new, dropping, words)
            m_i = m_new
            l_i = l_new
            excess = no_excess(tiles), no_excess(tiles)

            # First the steps that raise the maximum. These are all of a tile that is computed anew, where a
            # mask that hides nothing does no harm. Then those without a mask, and those with one behind them.
            after_whole = gl.maximum(steps.whole, steps.kept)
            if KIND != "full" or tiles.KEEPS_MAXIMUM:
                p, o, m_i, l_i, excess = walk(
                    tiles, q, p, o, m_i, l_i, excess, n, steps, 1, steps.kept, key_first, key_end, scale_log2,
                    shift, dropping, KIND != "full", False, INDEX
                )  # fmt: skip
            p, o, m_i, l_i, excess = walk(
                tiles, q, p, o, m_i, l_i, excess, n, steps, steps.kept, after_whole, key_first, key_end,
                scale_log2, shift, dropping, False, tiles.KEEPS_MAXIMUM, INDEX
            )  # fmt: skip
            if KIND != "full" and KIND != "causal":
                p, o, m_i, l_i, excess = walk(
                    tiles, q, p, o, m_i, l_i, excess, n, steps, after_whole, steps.count, key_first, key_end,
                    scale_log2, shift, dropping, True, tiles.KEEPS_MAXIMUM, INDEX
                )  # fmt: skip
            excess = count_excess(tiles, excess[0], p, l_i, excess[1]), excess[1]
            n += steps.count
            pending = steps.count > 0
            n_before = n - 1
            begun = steps.count > 1
            i_before = i
            head_before = batch * tiles.n_head + head
            row_before = row
        tiles.q_ring.release(nth)
        nth += 1
        i = tiles.take(nth)

    if pending:
        finish(
            tiles, out_desc, lse_ptr, p, o, m_i, l_i, excess, n_before, begun, head_before, row_before,
            i_before, anew, INDEX
        )  # fmt: skip
    return n, nth + 1


@gluon.jit(
    do_not_specialize=[
        "n_batch",
        "n_head",
        "group",
        "seq_q",
        "seq_k",
        "window",
        "section",
        "by_section_tiles",
        "by_section",
        "by_last_section",
        "by_n_head",
        "stride_list_batch",
        "stride_list_head",
        "keep_limit",
        "keep_line",
    ]
)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, notes_ptr, counter_ptr, bounds_ptr,
    spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head,
    seed_ptr, keep_limit, keep_line, keep_scale,
    n_batch, n_head, group, seq_q, seq_k, window, section,
    by_section_tiles, by_section, by_last_section, by_n_head, scale_log2,
    MASK: gl.constexpr, DROPOUT: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, REST: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, DEALT: gl.constexpr,
    KEEPS_MAXIMUM: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    EARLY: gl.constexpr = HEAD_DIM < 256 and reads_early(CONSUMERS, MASK)
    WORDS_BUFFERS: gl.constexpr = STAGES if EARLY else STAGES + 1
    OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[3]
    words = make_words(DROPOUT, WORDS_BUFFERS, PAIRS_OF_EIGHT, BLOCK_N)
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        make_numbers(Q_STAGES),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, OUT_WIDTH], out_desc.layout),
        make_ring(Q_STAGES, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        make_overflow(notes_ptr, CONSUMERS, KEEPS_MAXIMUM),
        TileOrder(
            n_batch * n_head,
            gl.cdiv(seq_q, CONSUMERS * ROWS),
            section,
            by_section_tiles,
            by_section,
            by_last_section,
            MASK != "full",
        ),
        Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK),
        make_dropout(seed_ptr, keep_limit, keep_line, keep_scale, words, DROPOUT),
        n_head,
        by_n_head,
        BLOCK_N,
        HEAD_DIM,
        REST,
        CONSUMERS,
        KEEPS_MAXIMUM,
    )
    fence_async_shared()
    copies = (tiles, q_desc, k_desc, v_desc, group, counter_ptr, DEALT)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (tiles, out_desc, lse_ptr, scale_log2, BLOCKS, gl.constexpr(0))),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, BLOCKS, gl.constexpr(1))),
                (produce, copies),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, out_desc, lse_ptr, scale_log2, BLOCKS, gl.constexpr(0))),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, BLOCKS, gl.constexpr(1))),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, BLOCKS, gl.constexpr(2))),
                (produce, copies),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
