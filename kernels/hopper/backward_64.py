"""dq, dk and dv of heads of 64 on sm_90, in Gluon: P = exp(S - lse), dS = P * (dP - delta).

A thread block is persistent: it takes tiles of BLOCK_N keys from a counter, the longest first under a causal
mask. Two consumer warpgroups own 64 keys of a tile each, hold k and v in registers as left operands, and
compute dk and dv. They hold scores transposed, (keys, queries), so that P and dS are the left operands of
dv += P^T dout and dk += dS^T q without leaving the registers. The accumulators of S and dP start from
-lse / scale and -delta, which saves the subtractions. The consumers leave dS in a ring. From it a third
warpgroup computes dq = dS k and adds it to a float32 sum by bulk reduction, so that neither consumer waits
for the other's half of dS, nor for a reduction; it also copies dk and dv out. One producer warp copies in
what the others read, a tile ahead. Two more warps round the sums of finished sections (sums.py). Without
SUMS_DQ the third warpgroup and these two warps are absent: dq.py computes dq, in a fixed order.

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
from kernels.hopper.dropout import ROWS_OF_EIGHT, Dropout, gradient, make_dropout, make_words
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
    copy_out,
    make_numbers,
    make_ring,
    opaque,
    pack_pairs,
    record,
    reduce_add_to_global,
    unpack_pairs,
)
from kernels.hopper.schedule import Mask
from kernels.hopper.sums import TAKEN, WARPS, Sums, make_parts, round_sums

HEAD_DIM = gl.constexpr(64)


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    k: gl.shared_memory_descriptor  # (KV_STAGES, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor
    number: gl.shared_memory_descriptor  # (KV_STAGES, 1) int32, twice the tile's number in order + is_open
    q: gl.shared_memory_descriptor  # (STAGES, 1, 1, ROWS, D)
    dout: gl.shared_memory_descriptor
    minus_lse: gl.shared_memory_descriptor  # (STAGES, ROWS)
    minus_delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # (DS_STAGES, BLOCK_N, ROWS)
    dq: gl.shared_memory_descriptor  # (DQ_STAGES, ROWS, D)
    dk: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, D)
    dv: gl.shared_memory_descriptor
    kv_ring: Ring
    q_ring: Ring
    ds_ring: Ring
    out_ring: Ring  # of dk and dv
    work: KeyTiles
    dropout: Dropout
    sums: Sums
    KV_STAGES: gl.constexpr
    DQ_STAGES: gl.constexpr
    SUMS_DQ: gl.constexpr

    @gluon.jit
    def take(self, t):
        """The number in order of this thread block's tile t, and Sums.is_open, once k and v have arrived."""
        number = announced(self.number.index(self.kv_ring.take(t)))
        return number >> 1, (number & 1) == 1


@gluon.jit
def produce(tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc):
    """Takes tiles and fills the rings: a tile's k and v, then the queries that see it, head by head."""
    n = 0
    t = 0
    # even the first tile is taken: nobody may wait for a tile of a thread block that is not running yet
    i = tiles.work.take(tiles.sums.count(0, TAKEN))
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, _, _, end = tiles.work.locate(i)
        stage, full = tiles.kv_ring.fill(t)
        is_open = tiles.sums.is_open(tiles.work.order.section_of(i))
        announce(tiles.number.index(stage), 2 * i + is_open.to(gl.int32))
        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key, 0], full, tiles.k.index(stage))
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key, 0], full, tiles.v.index(stage))
        for g in range(tiles.work.group):
            head = kv_head * tiles.work.group + g
            line = tiles.work.first_line(batch, kv_head, g)
            for place in range(begin, end):
                copy_queries(
                    tiles, q_desc, dout_desc, minus_lse_desc, minus_delta_desc, batch, head, line, place, n
                )
                n += 1
        t += 1
        i = tiles.work.take(tiles.sums.count(0, TAKEN))
    # a number past the last tile ends the other partitions
    stage, full = tiles.kv_ring.fill(t)
    announce(tiles.number.index(stage), 2 * i)
    mbarrier.arrive(full, count=1)


@gluon.jit
def step(tiles, dk, dv, k, v, n, place, masked, first, end, scale_log2, dropping, INDEX: gl.constexpr):
    """Adds one block of queries to dk and dv, and stores its dS."""
    S_LAYOUT: gl.constexpr = dk.type.layout
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    dtype: gl.constexpr = tiles.q.dtype
    stage = tiles.q_ring.take(n)
    q = tiles.q.index(stage).reshape([ROWS, HEAD_DIM])
    dout = tiles.dout.index(stage).reshape([ROWS, HEAD_DIM])
    minus_lse = columns(tiles.minus_lse.index(stage), S_LAYOUT)
    dp = begin_dp(tiles, stage, S_LAYOUT)
    s = warpgroup_mma(k, q.permute((1, 0)), minus_lse, is_async=True)  # (keys, queries)
    dp = warpgroup_mma(v, dout.permute((1, 0)), dp, use_acc=not tiles.dropout.IS_ON, is_async=True)
    if tiles.dropout.IS_ON:
        masks = tiles.dropout.masks(minus_lse, draw(tiles, minus_lse, dropping, n), TRANSPOSED=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = probabilities(tiles.work, s, place, masked, (first, end), scale_log2)
    if tiles.dropout.IS_ON:
        kept = unpack_pairs(pack_pairs(p, dtype) & masks, dtype, A_LAYOUT)
    else:
        kept = gl.convert_layout(p.to(dtype), A_LAYOUT)
    dv = warpgroup_mma(kept, dout, dv, is_async=True)  # (keys, D)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if tiles.dropout.IS_ON:
        # all gradients are multiplied by keep_scale at the end, so delta has been divided by it
        ds = unpack_pairs(gradient(p, dp, minus_deltas(tiles, stage, dp), masks, dtype), dtype, S_LAYOUT)
    else:
        ds = (p * dp).to(dtype)
    if tiles.SUMS_DQ:
        full = store_ds(tiles, ds, n, INDEX)
    dk = warpgroup_mma(gl.convert_layout(ds, A_LAYOUT), q, dk, is_async=True)  # (keys, D)
    if tiles.SUMS_DQ:
        hand_over(full)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    tiles.q_ring.release(n)
    return dk, dv


@gluon.jit
def consume(tiles, dk_desc, dv_desc, scale_log2, softmax_scale, INDEX: gl.constexpr):
    """dk, dv and dS of 64 keys of every tile of this thread block."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    HELD: gl.constexpr = tiles.SUMS_DQ and not tiles.dropout.IS_ON
    n = gl.to_tensor(0)
    t = 0
    i, _ = tiles.take(t)
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, whole_begin, whole_end, end = tiles.work.locate(i)
        stage = t % tiles.KV_STAGES
        k = tiles.k.index(stage).reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, 0)
        v = tiles.v.index(stage).reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, 0)
        # without dS to store, ptxas would put P into registers that k and v still need; under dropout, the
        # draws take those registers: in both cases k and v stay in shared memory
        if HELD:
            k = k.load(A_LAYOUT)
            v = v.load(A_LAYOUT)
            tiles.kv_ring.release(t)
        key += INDEX * ROWS
        dk = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, S_LAYOUT)
        dv = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, S_LAYOUT)
        query_first, query_end = key_limits(tiles.work.mask, batch, key, tiles.work.padded, dk)
        place = begin
        dropping = begin_to_drop(tiles, dk, key)
        for j in range((end - begin) * tiles.work.group):
            masked = (place < whole_begin) | (place >= whole_end)
            dk, dv = step(
                tiles, dk, dv, k, v, n + j, place, masked, query_first, query_end, scale_log2, dropping, INDEX
            )
            place += 1
            if place == end:
                place = begin
        n += (end - begin) * tiles.work.group
        if not HELD:
            tiles.kv_ring.release(t)
        if tiles.dropout.IS_ON:
            dv *= tiles.dropout.keep_scale

        if tiles.SUMS_DQ:
            _, full = tiles.out_ring.fill(t)
            # opaque: otherwise the addresses are computed before the loop, and spilled
            part = opaque(gl.to_tensor(INDEX))
            leave(tiles.dv.index(part).reshape([ROWS, HEAD_DIM]), dv)
            leave(tiles.dk.index(part).reshape([ROWS, HEAD_DIM]), dk * softmax_scale)
            hand_over(full)
        else:
            copy_out(dv_desc, [batch, kv_head, key, 0], dv, tiles.dv.index(INDEX), 1)
            copy_out(dk_desc, [batch, kv_head, key, 0], dk * softmax_scale, tiles.dk.index(INDEX), 1)
        t += 1
        i, _ = tiles.take(t)
    tma.store_wait(0)


@gluon.jit
def reduce(tiles, sum_desc, dk_desc, dv_desc):
    """Adds dq of every step to its sum, and copies out every tile's dk and dv."""
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    n = 0
    t = 0
    # the previous tile's section until that tile is counted, else -1; the first step of the next counts it
    uncounted = -1
    i, is_open = tiles.take(t)
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, _, _, end = tiles.work.locate(i)
        first = n
        section = tiles.work.order.section_of(i)
        k = tiles.k.index(t % tiles.KV_STAGES).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        k = k.load(gl.DotOperandLayout(0, DQ_LAYOUT, 2))
        tiles.kv_ring.release(t)
        if not is_open:
            tiles.sums.open(section, uncounted)
            uncounted = -1
        behind = tiles.sums.behind(section)
        for g in range(tiles.work.group):
            line = tiles.work.first_line(batch, kv_head, g) - behind
            for place in range(begin, end):
                ds = tiles.ds.index(tiles.ds_ring.take(n))
                zeros = gl.full([HEAD_DIM, ROWS], 0.0, gl.float32, DQ_LAYOUT)
                dq = warpgroup_mma(k, ds, zeros, use_acc=False, is_async=True)  # (D, queries)
                dq = warpgroup_mma_wait(0, deps=[dq])
                tiles.ds_ring.release(n)
                buffer = tiles.dq.index(n % tiles.DQ_STAGES)
                stage_dq(dq, buffer, tiles.DQ_STAGES - 1)
                reduce_add_to_global(sum_desc, [line + query_block(tiles.work.mask, place) * ROWS, 0], buffer)
                # one step into this tile, the previous one's copies have long arrived
                if (n == first) & (t > 0):
                    if uncounted >= 0:
                        tiles.sums.count_tile(uncounted, 1)
                        uncounted = -1
                    tma.store_wait(1)
                    tiles.out_ring.release(t - 1)
                n += 1
        for c in gl.static_range(CONSUMERS):
            # wait once for each half: without a wait between the copies, the assembler sets an address under
            # a condition, and carries it around all loops
            tiles.out_ring.take(t)
            coordinates = [batch, kv_head, key + c * ROWS, 0]
            tma.async_copy_shared_to_global(dv_desc, coordinates, tiles.dv.index(c))
            tma.async_copy_shared_to_global(dk_desc, coordinates, tiles.dk.index(c))
        uncounted = gl.where(section < tiles.sums.n_rounded, section, -1)
        t += 1
        i, is_open = tiles.take(t)
    if uncounted >= 0:
        tiles.sums.count_tile(uncounted, 0)
    # until then the copies read shared memory, which the next thread block may overwrite
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_64_kernel(
    q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, sum_desc, dk_desc, dv_desc,
    bounds_ptr, spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head,
    seed_ptr, keep_limit, keep_line, keep_scale, counts_ptr,
    part_desc, dq_ptr, stride_dqb, stride_dqt, stride_dqh, n_rounded,
    group, seq_q, seq_k, window, padded, n_heads, n_tiles, n_kv_head, section,
    by_section_tiles, by_section, by_last_section, by_n_kv_head, scale_log2, softmax_scale,
    MASK: gl.constexpr, DROPOUT: gl.constexpr, SUMS_DQ: gl.constexpr,
    KV_STAGES: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, REDUCER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    work = make_key_tiles(
        Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK), group, padded, n_heads, n_tiles, n_kv_head,
        section, by_section_tiles, by_section, by_last_section, by_n_kv_head
    )  # fmt: skip
    words = make_words(DROPOUT, STAGES, ROWS_OF_EIGHT, ROWS)
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        make_numbers(KV_STAGES),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_delta_desc.layout),
        gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_N, ROWS], DS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [DQ_STAGES, ROWS, HEAD_DIM], sum_desc.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], dk_desc.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], dv_desc.layout),
        make_ring(KV_STAGES, CONSUMERS + SUMS_DQ),
        make_ring(STAGES, CONSUMERS),
        make_ring(DS_STAGES, 1, CONSUMERS),
        make_ring(1, 1, CONSUMERS),
        work,
        make_dropout(seed_ptr, keep_limit, keep_line, keep_scale, words, DROPOUT),
        Sums(
            work,
            dq_ptr,
            counts_ptr,
            stride_dqb,
            stride_dqt,
            stride_dqh,
            softmax_scale,
            n_rounded,
            SUMS_DQ,
        ),
        KV_STAGES,
        DQ_STAGES,
        SUMS_DQ,
    )
    if SUMS_DQ:
        parts = make_parts(part_desc)
    fence_async_shared()
    copies = (tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc)
    if SUMS_DQ:
        gl.warp_specialize(
            [
                (consume, (tiles, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(0))),
                (consume, (tiles, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(1))),
                (reduce, (tiles, sum_desc, dk_desc, dv_desc)),
                (produce, copies),
                (round_sums, (tiles.sums, parts, part_desc)),
            ],
            [4, 4, 1, WARPS],
            [CONSUMER_REGISTERS, REDUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(0))),
                (consume, (tiles, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(1))),
                (produce, copies),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
