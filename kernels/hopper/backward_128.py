"""dq, dk and dv of heads of 128 on sm_90, in Gluon: backward_64.py where registers are scarcer.

dk and dv of 64 keys take 128 registers of a thread. So k and v stay in shared memory, dP is issued only once
P has been rounded, and P is read back from its 16 bits for dS = P * (dP - delta). S, which no other product
would overlap, is issued one step ahead, after dk. In a tile's last step this is the S of the next tile's
first step, so k has two buffers. dv leaves through the buffer of v and dk through that of k; the next v
follows them. dq is computed in two halves of its columns, so that the third warpgroup, like the producer,
leaves nearly all registers to the two consumers. Without SUMS_DQ there is no third warpgroup: dq.py computes
dq, in a fixed order.

Sources: FlashAttention-2 (arXiv:2307.08691), FlashAttention-3 (arXiv:2407.08608).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.block_lists import BlockLists
from kernels.hopper.dropout import (
    ROWS_OF_EIGHT,
    Dropout,
    gradient_of_marked,
    make_dropout,
    make_words,
    mark,
)
from kernels.hopper.key_tiles import (
    BLOCK_N,
    CONSUMERS,
    NOT_SPECIALIZED,
    ROWS,
    KeyTiles,
    begin_dp,
    begin_to_drop,
    columns,
    copy_queries,
    draw,
    hand_over,
    key_limits,
    leave,
    make_key_tiles,
    minus_deltas,
    probabilities,
    query_block,
    stage_dq,
    store_ds,
)
from kernels.hopper.primitives import (
    Ring,
    announce,
    announced,
    make_numbers,
    make_ring,
    not_negative,
    opaque,
    pack_pairs,
    record,
    reduce_add_to_global,
    thread_barrier,
    unpack_pairs,
    widen_pairs,
)
from kernels.hopper.schedule import Mask

HEAD_DIM = gl.constexpr(128)
# dq is computed in this many parts of its columns
HALVES = gl.constexpr(2)
# layouts of a 64 x 64 product, and of dk and dv
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
D_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    k: gl.shared_memory_descriptor  # (KV_STAGES, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor  # (V_STAGES, 1, 1, BLOCK_N, D)
    number: gl.shared_memory_descriptor  # (KV_STAGES, 1) int32, the tile's number in order
    q: gl.shared_memory_descriptor  # (STAGES, 1, 1, ROWS, D)
    dout: gl.shared_memory_descriptor
    minus_lse: gl.shared_memory_descriptor  # (STAGES, ROWS)
    minus_delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # (DS_STAGES, BLOCK_N, ROWS)
    dq: gl.shared_memory_descriptor  # (HALVES, ROWS, ROWS)
    k_ring: Ring
    v_ring: Ring
    q_ring: Ring
    ds_ring: Ring
    last_dq_ring: Ring  # full once dq no longer needs a tile's k
    out_ring: Ring  # full once dk and dv have replaced k and v
    work: KeyTiles
    dropout: Dropout
    SUMS_DQ: gl.constexpr

    @gluon.jit
    def take(self, t):
        """The number in order of this thread block's tile t, once its keys have arrived."""
        return announced(self.number.index(self.k_ring.take(t)))

    @gluon.jit
    def keys(self, t):
        """k of tile t, (BLOCK_N, D)."""
        return self.k.index(t % self.k_ring.STAGES).reshape([BLOCK_N, HEAD_DIM])


@gluon.jit
def copy_gradients(tiles, dk_desc, dv_desc, i, t):
    """Copies out dk and dv of tile t, the i-th in order, and waits until they have left their buffers."""
    tiles.out_ring.take(t)
    batch, kv_head, key, _, _, _, _ = tiles.work.locate(i)
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, key, 0], tiles.v.index(t % tiles.v_ring.STAGES))
    k = tiles.k.index(t % tiles.k_ring.STAGES)
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, key, 0], k)
    tma.store_wait(0)


@gluon.jit
def produce(
    tiles, q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, minus_lse_desc, minus_delta_desc, counter_ptr
):  # fmt: skip
    """Takes tiles and fills the rings: a tile's k, then the queries that see it, head by head.

    v follows the first queries, whose scores are computed while the previous tile still uses its own v. If v
    has only one buffer, it also waits until the gradients of the previous tile have left.
    """
    n = 0
    t = 0
    before = 0
    i = gl.program_id(0)
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, _, _, end = tiles.work.locate(i)
        # the buffer is free: the gradients of tile t - 2 have left it
        stage = t % tiles.k_ring.STAGES
        full = tiles.k_ring.full.index(stage)
        announce(tiles.number.index(stage), i)
        mbarrier.expect(full, k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key, 0], full, tiles.k.index(stage))
        head = kv_head * tiles.work.group
        line = tiles.work.first_line(batch, kv_head, 0)
        place = begin
        n_places = (end - begin) * tiles.work.group
        # wait for the previous tile's gradients as late as possible: if this tile has a v buffer of its own,
        # its first queries go ahead, as many as the ring holds
        late = gl.minimum(tiles.q_ring.STAGES, n_places) - 1 if tiles.v_ring.STAGES > 1 else 0
        for j in range(n_places):
            copy_queries(
                tiles, q_desc, dout_desc, minus_lse_desc, minus_delta_desc, batch, head, line, place, n
            )
            if (j == late) & (t > 0):
                copy_gradients(tiles, dk_desc, dv_desc, before, t - 1)
            if j == 0:
                v_stage = t % tiles.v_ring.STAGES
                full = tiles.v_ring.full.index(v_stage)
                mbarrier.expect(full, v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [batch, kv_head, key, 0], full, tiles.v.index(v_stage)
                )
            n += 1
            place += 1
            if place == end:
                place = begin
                head += 1
                line += tiles.work.padded
        before = i
        t += 1
        i = tiles.work.take_behind_the_first(counter_ptr)
    # a number past the last tile ends the consumers, which have also asked for its first queries
    stage = t % tiles.k_ring.STAGES
    announce(tiles.number.index(stage), i)
    mbarrier.arrive(tiles.k_ring.full.index(stage), count=1)
    stage, full = tiles.q_ring.fill(n)
    mbarrier.arrive(full, count=1)
    # every thread block has had a tile
    copy_gradients(tiles, dk_desc, dv_desc, before, t - 1)


@gluon.jit
def take_queries(tiles, n):
    """Queries n, (ROWS, D), and their -lse / scale broadcast over the keys, S's initial accumulator."""
    stage = tiles.q_ring.take(n)
    return tiles.q.index(stage).reshape([ROWS, HEAD_DIM]), columns(tiles.minus_lse.index(stage), S_LAYOUT)


@gluon.constexpr_function
def reads_limits_late(tiles):
    """Whether key limits are read only in steps that document edges cut: dropout takes their registers."""
    return tiles.SUMS_DQ and tiles.dropout.IS_ON and tiles.work.mask.KIND == "intervals"


@gluon.jit
def step(
    tiles, s, words, dk, dv, k_of_next, v, n, t, is_first, place, masked, limits, scale_log2, dropping,
    INDEX: gl.constexpr
):  # fmt: skip
    """Adds one block of queries, given its scores s and dropout words; returns those of the next block too.

    limits: of the keys, from key_limits; or batch and first key, where they are read late.
    """
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    dtype: gl.constexpr = tiles.q.dtype
    stage = n % tiles.q_ring.STAGES
    q = tiles.q.index(stage).reshape([ROWS, HEAD_DIM])
    dout = tiles.dout.index(stage).reshape([ROWS, HEAD_DIM])
    LATE: gl.constexpr = reads_limits_late(tiles)
    p = pack_pairs(probabilities(tiles.work, s, place, masked, limits, scale_log2, LATE), dtype)
    if tiles.dropout.IS_ON:
        p = mark(p, tiles.dropout.masks(s, words, TRANSPOSED=True))
    # load a product's initial accumulator before another product is issued, which the load would wait for
    dp = begin_dp(tiles, stage, S_LAYOUT)
    kept = not_negative(p, dtype) if tiles.dropout.IS_ON else p
    dv = warpgroup_mma(unpack_pairs(kept, dtype, A_LAYOUT), dout, dv, is_async=True)  # (keys, D)
    tiles.v_ring.take(t, is_first)
    # (keys, queries)
    dp = warpgroup_mma(v, dout.permute((1, 0)), dp, use_acc=not tiles.dropout.IS_ON, is_async=True)
    dp, dv = warpgroup_mma_wait(0, deps=[dp, dv])
    if tiles.dropout.IS_ON:
        # all gradients are multiplied by keep_scale at the end, so delta has been divided by it
        ds = gradient_of_marked(p, dp, minus_deltas(tiles, stage, dp), dtype)
        ds = unpack_pairs(ds, dtype, S_LAYOUT)
    else:
        ds = (widen_pairs(p, dtype, S_LAYOUT) * dp).to(dtype)
    if tiles.SUMS_DQ:
        full = store_ds(tiles, ds, n, INDEX)
    next_q, minus_lse = take_queries(tiles, n + 1)
    dk = warpgroup_mma(gl.convert_layout(ds, A_LAYOUT), q, dk, is_async=True)  # (keys, D)
    s = warpgroup_mma(k_of_next, next_q.permute((1, 0)), minus_lse, is_async=True)  # (keys, queries)
    if tiles.SUMS_DQ:
        hand_over(full)
    words = draw(tiles, minus_lse, dropping, n + 1)
    dk = warpgroup_mma_wait(1, deps=[dk])
    tiles.q_ring.release(n)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, words, dk, dv


@gluon.jit
def consume(tiles, scale_log2, softmax_scale, INDEX: gl.constexpr):
    """dk, dv and dS of 64 keys of every tile of this thread block."""
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    i = tiles.take(t)
    q, minus_lse = take_queries(tiles, n)
    k = tiles.keys(0).slice(INDEX * ROWS, ROWS, 0)
    s = warpgroup_mma(k, q.permute((1, 0)), minus_lse, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    while i < tiles.work.order.total():
        batch, _, key, begin, whole_begin, whole_end, end = tiles.work.locate(i)
        v = tiles.v.index(t % tiles.v_ring.STAGES).reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, 0)
        key += INDEX * ROWS
        LATE: gl.constexpr = reads_limits_late(tiles)
        limits = batch, key
        if not LATE:
            limits = key_limits(tiles.work.mask, batch, key, tiles.work.padded, s)
        dk = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, D_LAYOUT)
        dv = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, D_LAYOUT)
        place = begin
        dropping = begin_to_drop(tiles, s, key)
        last = n + (end - begin) * tiles.work.group - 1
        words = draw(tiles, s, dropping, n)
        for j in range(n, last + 1):
            masked = (place < whole_begin) | (place >= whole_end)
            # the scores after a tile's last ones are the first of the next tile
            tile_of_next = t + (j == last).to(gl.int32)
            tiles.k_ring.take(tile_of_next, j == last)
            k_of_next = tiles.keys(tile_of_next).slice(INDEX * ROWS, ROWS, 0)
            s, words, dk, dv = step(
                tiles, s, words, dk, dv, k_of_next, v, j, t, j == n, place, masked, limits, scale_log2,
                dropping, INDEX
            )  # fmt: skip
            place += 1
            if place == end:
                place = begin
        n = last + 1
        if tiles.dropout.IS_ON:
            dv *= tiles.dropout.keep_scale
        # opaque: otherwise the addresses are computed before the loop, and spilled
        stage = opaque(t % tiles.v_ring.STAGES)
        own_v = tiles.v.index(stage).reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, 0)
        leave(own_v, dv)
        if tiles.SUMS_DQ:
            tiles.last_dq_ring.take(t)
        leave(tiles.keys(t).slice(INDEX * ROWS, ROWS, 0), dk * softmax_scale)
        hand_over(tiles.out_ring.full.index(0))
        t += 1
        i = tiles.take(t)


@gluon.jit
def reduce(tiles, dq_desc):
    """Adds dq of every step to its sum, half by half."""
    n = 0
    t = 0
    i = tiles.take(t)
    while i < tiles.work.order.total():
        batch, kv_head, _, begin, _, _, end = tiles.work.locate(i)
        k = tiles.keys(t)
        line = tiles.work.first_line(batch, kv_head, 0)
        place = begin
        for _ in range((end - begin) * tiles.work.group):
            ds = tiles.ds.index(tiles.ds_ring.take(n))
            row = line + query_block(tiles.work.mask, place) * ROWS
            for half in gl.static_range(HALVES):
                zeros = gl.full([ROWS, ROWS], 0.0, gl.float32, S_LAYOUT)
                k_half = k.slice(half * ROWS, ROWS, 1).permute((1, 0))
                dq = warpgroup_mma(k_half, ds, zeros, use_acc=False, is_async=True)  # (half of D, queries)
                dq = warpgroup_mma_wait(0, deps=[dq])
                if half == HALVES - 1:
                    tiles.ds_ring.release(n)
                buffer = tiles.dq.index(half)
                stage_dq(dq, buffer, HALVES - 1)
                reduce_add_to_global(dq_desc, [row * HALVES + half * ROWS, 0], buffer)
            n += 1
            place += 1
            if place == end:
                place = begin
                line += tiles.work.padded
        thread_barrier()
        mbarrier.arrive(tiles.last_dq_ring.full.index(0), count=1)
        t += 1
        i = tiles.take(t)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_128_kernel(
    q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    bounds_ptr, spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head,
    seed_ptr, keep_limit, keep_line, keep_scale, counter_ptr,
    group, seq_q, seq_k, window, padded, n_heads, n_tiles, n_kv_head, section,
    by_section_tiles, by_section, by_last_section, by_n_kv_head, scale_log2, softmax_scale,
    MASK: gl.constexpr, DROPOUT: gl.constexpr, SUMS_DQ: gl.constexpr,
    KV_STAGES: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, REDUCER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # a tile's last step waits for the next tile's k and first queries while it holds its own
    gl.static_assert(KV_STAGES > 1)
    gl.static_assert(STAGES > 1)
    # dq's buffers leave no room for a second v
    V_STAGES: gl.constexpr = 1 if SUMS_DQ else KV_STAGES
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    work = make_key_tiles(
        Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK), group, padded, n_heads, n_tiles, n_kv_head,
        section, by_section_tiles, by_section, by_last_section, by_n_kv_head
    )  # fmt: skip
    words = make_words(DROPOUT, STAGES, ROWS_OF_EIGHT, ROWS)
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        make_numbers(KV_STAGES),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_delta_desc.layout),
        gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_N, ROWS], DS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [HALVES, ROWS, ROWS], dq_desc.layout),
        make_ring(KV_STAGES, 1),
        make_ring(V_STAGES, 1),
        make_ring(STAGES, CONSUMERS),
        make_ring(DS_STAGES, 1, CONSUMERS),
        make_ring(1, 1),
        make_ring(1, 1, CONSUMERS),
        work,
        make_dropout(seed_ptr, keep_limit, keep_line, keep_scale, words, DROPOUT),
        SUMS_DQ,
    )
    fence_async_shared()
    # for speed alone: otherwise the compiler, unsure that the rings are ready, adds a barrier to the loop of
    # one consumer
    thread_barrier()
    copies = (
        tiles, q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, minus_lse_desc, minus_delta_desc,
        counter_ptr
    )  # fmt: skip
    if SUMS_DQ:
        gl.warp_specialize(
            [
                (consume, (tiles, scale_log2, softmax_scale, gl.constexpr(0))),
                (consume, (tiles, scale_log2, softmax_scale, gl.constexpr(1))),
                (reduce, (tiles, dq_desc)),
                (produce, copies),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, REDUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, scale_log2, softmax_scale, gl.constexpr(0))),
                (consume, (tiles, scale_log2, softmax_scale, gl.constexpr(1))),
                (produce, copies),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
