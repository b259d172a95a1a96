"""dq on sm_90 in a fixed order, in Gluon: dq = dS k, dS = P * (dP - delta), P = exp(S - lse).

For deterministic=True, for queries that see few keys (tiles.sum_pays), where backward_64.py and
backward_128.py leave dq out: they would add it to its sum in any order, and the sum costs 16 D bytes per
query; and for all heads of more than 128 channels, beside backward_256.py. This kernel runs before them and
writes lse and delta in the form that they read, or for wide heads reads them so, from prepare_kernel. Tiles,
roles and rings are those of forward.py: a thread block is persistent, one warp fills rings of q, dout, k and
v tiles by bulk copies, and CONSUMERS warpgroups own 64 query rows each, whose dq stays in registers. out,
read once per tile where delta is made here, passes through the ring of k. dS is the left operand of its
product without leaving the registers. q and dout, left operands throughout a tile, stay in shared memory:
ptxas would reuse their registers in the loop.

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

from kernels.hopper.block_lists import BLOCK_SIZE, BlockLists, hide_unseen
from kernels.hopper.dropout import (
    PAIRS_OF_EIGHT,
    Dropout,
    draw,
    gradient,
    gradient_of_marked,
    make_dropout,
    make_words,
    mark,
)
from kernels.hopper.primitives import (
    Ring,
    copy_out,
    make_ring,
    opaque,
    pack_pairs,
    record,
    unpack_pairs,
)
from kernels.hopper.query_tiles import ROWS, key_block, locate, places, skip, words_at
from kernels.hopper.schedule import Mask, TileOrder
from kernels.hopper.softmax import hide
from kernels.hopper.steps import begin_to_drop, scores_of_nothing
from kernels.hopper.wide_heads import (
    FIRST,
    LEFT_LAYOUT,
    copies_of,
    copy_in,
    copy_out_at_once,
    for_channels,
    over_channels,
    zeros_of_channels,
)


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    q: gl.shared_memory_descriptor  # (Q_STAGES * CONSUMERS, 1, 1, ROWS, D)
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (STAGES * BLOCK_N / ROWS, 1, 1, ROWS, D), shares k's memory
    dq: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, D); for heads of 256, q itself
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    order: TileOrder
    mask: Mask
    dropout: Dropout
    n_head: gl.tensor
    by_n_head: gl.tensor
    lse_ptr: gl.tensor  # (B, H, Tq) float32
    dlse_ptr: gl.tensor
    minus_lse_ptr: gl.tensor  # (B * H, padded) float32
    minus_delta_ptr: gl.tensor
    padded: gl.tensor
    scale_log2: gl.tensor
    softmax_scale: gl.tensor
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    REST: gl.constexpr  # of heads of 256: the channels behind the first 128 that count; else 0
    CONSUMERS: gl.constexpr
    HAS_DLSE: gl.constexpr
    OUT_STAGES: gl.constexpr  # buffers of k that a tile's out takes; 0 if lse and delta are there already


@gluon.jit
def produce(tiles, q_desc, dout_desc, out_desc, k_desc, v_desc, group):
    """Fills the rings as they empty: a tile's out, then k and v of each place, q and dout after the first.

    n counts blocks of keys, and so uses of the ring of v; a tile's out takes OUT_STAGES more uses of k's.
    """
    PARTS: gl.constexpr = tiles.BLOCK_N // ROWS
    n = 0
    for nth in range(tiles.order.n_dealt()):
        batch, head, row, begin, _, _, end = locate(tiles, tiles.order.dealt(nth))
        kv_head = head // group
        for i in gl.static_range(tiles.OUT_STAGES):
            stage, full = tiles.k_ring.fill(n + nth * tiles.OUT_STAGES + i)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            for c in gl.static_range(PARTS):
                first = [batch, head, row + (i * PARTS + c) * ROWS, 0]
                tma.async_copy_global_to_shared(out_desc, first, full, tiles.out.index(stage * PARTS + c))
        for place in range(begin, end):
            key = key_block(tiles, place) * tiles.BLOCK_N
            stage, full = tiles.k_ring.fill(n + (nth + 1) * tiles.OUT_STAGES)
            mbarrier.expect(full, copies_of(tiles.REST) * k_desc.block_type.nbytes)
            copy_in(k_desc, batch, kv_head, key, full, tiles.k.index(stage), tiles.REST)
            stage, full = tiles.v_ring.fill(n)
            if tiles.dropout.IS_ON:
                tiles.dropout.leave_pairs(stage, key)
            mbarrier.expect(full, copies_of(tiles.REST) * v_desc.block_type.nbytes)
            copy_in(v_desc, batch, kv_head, key, full, tiles.v.index(stage), tiles.REST)
            n += 1
            # the previous tile releases buffers of keys before those of its queries
            if place == begin:
                stage, full = tiles.q_ring.fill(nth)
                mbarrier.expect(full, 2 * tiles.CONSUMERS * copies_of(tiles.REST) * q_desc.block_type.nbytes)
                for c in gl.static_range(tiles.CONSUMERS):
                    own_row = row + c * ROWS
                    buffer = stage * tiles.CONSUMERS + c
                    copy_in(q_desc, batch, head, own_row, full, tiles.q.index(buffer), tiles.REST)
                    copy_in(dout_desc, batch, head, own_row, full, tiles.dout.index(buffer), tiles.REST)


@gluon.jit
def take_out(tiles, part, n):
    """out (ROWS, D) of one warpgroup; releases the tile's buffers of out, from use n of k's ring on."""
    PARTS: gl.constexpr = tiles.BLOCK_N // ROWS
    COLUMNS: gl.constexpr = tiles.HEAD_DIM // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // COLUMNS, COLUMNS], [4, 1], [1, 0])
    # every warpgroup waits for all of them: a buffer may be released only once it has been filled
    for i in gl.static_range(tiles.OUT_STAGES):
        tiles.k_ring.take(n + i)
    stage = (n + part // PARTS) % tiles.k_ring.STAGES
    out = tiles.out.index(stage * PARTS + part % PARTS).reshape([ROWS, tiles.HEAD_DIM]).load(LAYOUT)
    for i in gl.static_range(tiles.OUT_STAGES):
        tiles.k_ring.release(n + i)
    return out


@gluon.jit
def lse_and_delta(tiles, out, dout, line, rows):
    """-lse / softmax_scale and dlse - rowsum(out * dout) of rows of head `line`, stored for dk and dv too.

    A row that does not exist, or sees nothing, gets -inf, and so probability 0.
    """
    inside = rows < tiles.mask.seq_q
    lse = gl.load(tiles.lse_ptr + line * tiles.mask.seq_q + rows, mask=inside, other=float("-inf"))
    minus_lse = gl.where(lse == float("-inf"), float("-inf"), -lse / tiles.softmax_scale)
    delta = gl.sum(out.to(gl.float32) * dout.load(out.type.layout).to(gl.float32), 1)
    minus_delta = -gl.convert_layout(delta, rows.type.layout)
    if tiles.HAS_DLSE:
        minus_delta += gl.load(tiles.dlse_ptr + line * tiles.mask.seq_q + rows, mask=inside, other=0.0)
    if tiles.dropout.IS_ON:
        # dq, dk and dv are multiplied by keep_scale at the end
        minus_delta /= tiles.dropout.keep_scale
    gl.store(tiles.minus_lse_ptr + line * tiles.padded + rows, minus_lse)
    gl.store(tiles.minus_delta_ptr + line * tiles.padded + rows, minus_delta)
    return minus_lse, minus_delta


@gluon.jit
def scores(tiles, queries, keys):
    """Issues queries keys^T, (ROWS, BLOCK_N)."""
    zeros = scores_of_nothing(tiles)
    if tiles.REST > 0:
        x = over_channels(queries, keys, zeros, tiles.REST, use_acc=False)
    else:
        x = warpgroup_mma(queries, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return x


@gluon.jit
def step(tiles, buffer, dq, n_k, n_v, place, masked, limits, minus_lse, minus_delta, dropping):
    """Adds one block of keys to dq, uses n_k and n_v of the rings.

    buffer: of q and dout; limits: first and end of the keys that each query sees, or with lists its line in
    tiles of bits; minus_lse: (ROWS,) in base 2.
    """
    WIDE: gl.constexpr = tiles.REST > 0
    LEFT: gl.constexpr = LEFT_LAYOUT if WIDE else gl.DotOperandLayout(0, dq.type.layout, 2)
    # wide heads lack the registers for S, dP and dropout's words at a time: dP follows P, which is rounded
    LATE_DP: gl.constexpr = WIDE and tiles.dropout.IS_ON
    zeros = scores_of_nothing(tiles)
    if WIDE:
        # opaque: otherwise the addresses of all parts of q and dout are computed before the loop, and spilled
        buffer = opaque(buffer)
    q = tiles.q.index(buffer).reshape([ROWS, tiles.HEAD_DIM])
    dout = tiles.dout.index(buffer).reshape([ROWS, tiles.HEAD_DIM])
    k = tiles.k.index(tiles.k_ring.take(n_k)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    s = scores(tiles, q, k)
    v_stage = tiles.v_ring.take(n_v)
    if tiles.REST == FIRST:
        # so would those of the only v be, and with heads of 256 moved into uniform registers in each step
        v_stage = opaque(v_stage)
    v = tiles.v.index(v_stage).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    if not LATE_DP:
        dp = scores(tiles, dout, v)
        if tiles.dropout.IS_ON:
            masks = tiles.dropout.masks(zeros, draw(dropping, tiles.dropout.read(zeros, v_stage)))
    # wide dP is two products
    s = warpgroup_mma_wait(0 if LATE_DP else 2 if WIDE else 1, deps=[s])
    p = gl.exp2(s * tiles.scale_log2 + gl.expand_dims(minus_lse, 1))
    # mask after the exponentials: the assembler moves no wait across a branch, and dP overlaps with them
    if masked:
        if tiles.mask.KIND == "blocks":
            p = hide_unseen(p, words_at(tiles, place, limits[0], p), 0.0)
        else:
            p = hide(p, limits[0], limits[1], place, 0.0, tiles.mask.KIND)
    if LATE_DP:
        pairs = pack_pairs(p, k.dtype)
        dp = scores(tiles, dout, v)
        pairs = mark(pairs, tiles.dropout.masks(zeros, draw(dropping, tiles.dropout.read(zeros, v_stage))))
    dp = warpgroup_mma_wait(0, deps=[dp])
    tiles.v_ring.release(n_v)
    minus_delta = gl.expand_dims(minus_delta, 1)
    if tiles.dropout.IS_ON:
        minus_delta, _ = gl.broadcast(minus_delta, dp)
        if LATE_DP:
            ds = gradient_of_marked(pairs, dp, minus_delta, k.dtype)
        else:
            ds = gradient(p, dp, minus_delta, masks, k.dtype)
        ds = unpack_pairs(ds, k.dtype, LEFT)
    else:
        ds = gl.convert_layout((p * (dp + minus_delta)).to(k.dtype), LEFT)
    if WIDE:
        dq = for_channels(ds, k, dq)
        dq = warpgroup_mma_wait(0, deps=[dq[0], dq[1]])
    else:
        dq = warpgroup_mma(ds, k, dq, is_async=True)  # (ROWS, D)
        dq = warpgroup_mma_wait(0, deps=[dq])
    tiles.k_ring.release(n_k)
    return dq


@gluon.jit
def consume(tiles, dq_desc, INDEX: gl.constexpr):
    """dq of 64 rows of every tile of this thread block."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.HEAD_DIM, 16])
    KIND: gl.constexpr = tiles.mask.KIND
    WIDE: gl.constexpr = tiles.REST > 0
    n = gl.to_tensor(0)
    for nth in range(tiles.order.n_dealt()):
        batch, head, row, begin, whole_begin, whole_end, end = locate(tiles, tiles.order.dealt(nth))
        own_end = end
        # as in forward.py, but only under a causal mask: in the next tile another warpgroup has the last rows
        part = (INDEX + nth) % tiles.CONSUMERS if KIND == "causal" else INDEX
        row += part * ROWS
        if KIND == "causal":
            _, whole_begin, whole_end, own_end = places(tiles, batch, row, ROWS)
        n_k = n + (nth + 1) * tiles.OUT_STAGES
        q_stage = tiles.q_ring.take(nth)
        if tiles.OUT_STAGES > 0:
            out = take_out(tiles, part, n_k - tiles.OUT_STAGES)
        if row >= 0:
            # opaque: otherwise addresses derived from it are computed at kernel start, and spilled
            rows = opaque(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT)))
            buffer = q_stage * tiles.CONSUMERS + part
            line = batch * tiles.n_head + head
            if tiles.OUT_STAGES > 0:
                dout = tiles.dout.index(buffer).reshape([ROWS, tiles.HEAD_DIM])
                minus_lse, minus_delta = lse_and_delta(tiles, out, dout, line, rows)
            else:
                minus_lse = gl.load(tiles.minus_lse_ptr + line * tiles.padded + rows)
                minus_delta = gl.load(tiles.minus_delta_ptr + line * tiles.padded + rows)
            minus_lse *= tiles.scale_log2
            limits = (rows % BLOCK_SIZE, rows) if KIND == "blocks" else tiles.mask.keys_of(batch, rows)
            if WIDE:
                dq = zeros_of_channels(ROWS, tiles.REST)
            else:
                dq = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, DQ_LAYOUT)
            dropping = begin_to_drop(tiles, batch, head, row)
            for place in range(begin, own_end):
                masked = (place < whole_begin) | (place >= whole_end)
                j = place - begin
                dq = step(
                    tiles, buffer, dq, n_k + j, n + j, place, masked, limits, minus_lse, minus_delta, dropping
                )  # fmt: skip
            scale = tiles.softmax_scale
            if tiles.dropout.IS_ON:
                scale *= tiles.dropout.keep_scale
            if WIDE:
                dq = dq[0] * scale, dq[1] * scale
                # opaque: otherwise addresses in it are computed before the loop, and spilled
                copy_out_at_once(dq_desc, batch, head, row, dq, tiles.dq.index(opaque(buffer)))
                tma.store_wait(0)
                tiles.q_ring.release(nth)
            else:
                tiles.q_ring.release(nth)
                copy_out(dq_desc, [batch, head, row, 0], dq * scale, tiles.dq.index(INDEX), 0)
        else:
            own_end = begin
            tiles.q_ring.release(nth)
        for skipped in range(own_end - begin, end - begin):
            skip(tiles, n_k + skipped, n + skipped)
        n += end - begin
    tma.store_wait(0)


NOT_SPECIALIZED = [
    "n_heads", "n_tiles", "n_head", "group", "seq_q", "seq_k", "window", "section", "padded",
    "by_section_tiles", "by_section", "by_last_section", "by_n_head", "stride_list_batch", "stride_list_head",
    "keep_limit", "keep_line",
]  # fmt: skip


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def dq_kernel(
    q_desc, dout_desc, out_desc, k_desc, v_desc, dq_desc, lse_ptr, dlse_ptr,
    minus_lse_ptr, minus_delta_ptr, counter_ptr, bounds_ptr, spans_ptr, entries_ptr, bits_ptr,
    stride_list_batch, stride_list_head, seed_ptr, keep_limit, keep_line, keep_scale,
    n_heads, n_tiles, n_head, group, seq_q, seq_k, window, section,
    by_section_tiles, by_section, by_last_section, by_n_head, padded, scale_log2, softmax_scale,
    MASK: gl.constexpr, DROPOUT: gl.constexpr, HAS_DLSE: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, REST: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    order = TileOrder(
        n_heads, n_tiles, section,
        by_section_tiles, by_section, by_last_section, MASK != "full"
    )  # fmt: skip
    PARTS: gl.constexpr = BLOCK_N // ROWS
    WIDE: gl.constexpr = REST > 0
    OUT_STAGES: gl.constexpr = 0 if WIDE else (CONSUMERS + PARTS - 1) // PARTS
    V_STAGES: gl.constexpr = 1 if WIDE else STAGES
    # a tile's first k is copied before its queries, and out is released after they arrive: one buffer more
    gl.static_assert(STAGES > OUT_STAGES)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    dq = q
    if not WIDE:
        dq = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], dq_desc.layout)
    tiles = Tiles(
        q,
        gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], dout_desc.layout),
        k,
        gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        k._reinterpret(dtype, [STAGES * PARTS, 1, 1, ROWS, HEAD_DIM], out_desc.layout),
        dq,
        make_ring(Q_STAGES, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        make_ring(V_STAGES, CONSUMERS),
        order, Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK),
        make_dropout(
            seed_ptr, keep_limit, keep_line, keep_scale,
            make_words(DROPOUT, V_STAGES, PAIRS_OF_EIGHT, BLOCK_N), DROPOUT
        ),
        n_head, by_n_head,
        lse_ptr, dlse_ptr, minus_lse_ptr, minus_delta_ptr, padded,
        scale_log2, softmax_scale, BLOCK_N, HEAD_DIM, REST, CONSUMERS, HAS_DLSE, OUT_STAGES,
    )  # fmt: skip
    # the number of key tiles taken, see key_tiles.KeyTiles
    if gl.program_id(0) == 0:
        gl.store(counter_ptr, 0)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (tiles, dq_desc, gl.constexpr(0))),
                (consume, (tiles, dq_desc, gl.constexpr(1))),
                (produce, (tiles, q_desc, dout_desc, out_desc, k_desc, v_desc, group)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, dq_desc, gl.constexpr(0))),
                (consume, (tiles, dq_desc, gl.constexpr(1))),
                (consume, (tiles, dq_desc, gl.constexpr(2))),
                (produce, (tiles, q_desc, dout_desc, out_desc, k_desc, v_desc, group)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
