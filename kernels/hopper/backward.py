"""dq, dk and dv on sm_90, in Gluon: P = exp(S - lse), dS = P * (dP - delta).

A block owns BLOCK_N keys of one head, 64 for each of two warpgroups, whose dk and dv stay in registers; it
walks the queries that see them, in every head of the group. Scores are held transposed, (keys, queries), so
that P and dS are the left operands of dv += P^T dout and dk += dS^T q without leaving the registers. dS goes
through shared memory for dq = dS k, of which each warpgroup makes a 64 x 64 part and adds it to a float32 sum
by bulk reduction. The two score products begin from -lse / scale and -delta, so that no subtraction is left.
Heads of 64 leave registers for a better division of labour: see backward_64.py.
Without SUMS_DQ both leave dq to dq.py, which sums it in one order; nothing then uses ds and dq in shared
memory, and the compiler leaves them out.

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
from kernels.hopper.primitives import (
    Ring,
    fragments,
    make_ring,
    named_barrier_sync,
    record,
    reduce_add_to_global,
    thread_barrier,
)
from kernels.hopper.queries import (
    BLOCK_N,
    CONSUMERS,
    ROWS,
    key_limits,
    probabilities,
    query_block,
    scores,
    visit,
)
from kernels.hopper.schedule import Mask

BOTH_BARRIER = gl.constexpr(9)


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    k: gl.shared_memory_descriptor  # (1, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # (STAGES, 1, 1, ROWS, D)
    dout: gl.shared_memory_descriptor
    minus_lse: gl.shared_memory_descriptor  # (STAGES, ROWS)
    minus_delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # (2, BLOCK_N, ROWS)
    dq: gl.shared_memory_descriptor  # (CONSUMERS, ROWS, ROWS)
    kv_ring: Ring
    q_ring: Ring
    mask: Mask
    group: gl.tensor
    padded: gl.tensor  # rows of one head in lse, delta and dq
    HEAD_DIM: gl.constexpr
    SUMS_DQ: gl.constexpr

    @gluon.jit
    def locate(self):
        """Batch, head of k and v, first key and the ranges of places of this program."""
        batch = gl.program_id(2)
        kv_head = gl.program_id(1)
        key, begin, whole_begin, whole_end, end = visit(self.mask, batch, kv_head, gl.program_id(0))
        return batch, kv_head, key, begin, whole_begin, whole_end, end

    @gluon.jit
    def first_line(self):
        """Where this program's first query head begins in lse, delta and dq."""
        return (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * self.group * self.padded


@gluon.jit
def produce(tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc):
    """Fills the rings: k and v of a tile, then the queries that see it, head after head of the group."""
    batch, kv_head, key, begin, _, _, end = tiles.locate()
    stage, full = tiles.kv_ring.fill(0)
    mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key, 0], full, tiles.k.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key, 0], full, tiles.v.index(0))
    n = 0
    for g in range(tiles.group):
        head = kv_head * tiles.group + g
        line = tiles.first_line() + g * tiles.padded
        for place in range(begin, end):
            row = query_block(tiles.mask, place) * ROWS
            stage, full = tiles.q_ring.fill(n)
            mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + minus_lse_desc.block_type.nbytes))
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], full, tiles.q.index(stage))
            tma.async_copy_global_to_shared(minus_lse_desc, [line + row], full, tiles.minus_lse.index(stage))
            tma.async_copy_global_to_shared(dout_desc, [batch, head, row, 0], full, tiles.dout.index(stage))
            tma.async_copy_global_to_shared(
                minus_delta_desc, [line + row], full, tiles.minus_delta.index(stage)
            )
            n += 1


@gluon.jit
def step(
    tiles, dq_desc, dk, dv, k, v, k_of_dq, n, row_before, place, masked, first, end, scale_log2,
    INDEX: gl.constexpr
):  # fmt: skip
    """One block of queries. The dq of the one before, of which row_before is the first line, is added here,

    because its stores arrive late while products read shared memory.
    """
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dtype: gl.constexpr = tiles.q.dtype
    s, dp, q, dout = scores(tiles, k, v, n)
    # a constant and a number: joined, both branches would be compiled
    if tiles.SUMS_DQ:  # noqa: SIM102
        if n > 0:
            add_dq(tiles, dq_desc, row_before, INDEX)
    p = probabilities(tiles.mask, s, place, masked, first, end, scale_log2)
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), A_LAYOUT), dout, dv, is_async=True)  # (ROWS, D)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * dp).to(dtype)
    if tiles.SUMS_DQ:
        dq = issue_dq(tiles, k_of_dq, ds, n, INDEX)
    dk = warpgroup_mma(gl.convert_layout(ds, A_LAYOUT), q, dk, is_async=True)  # (ROWS, D)
    if tiles.SUMS_DQ:
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        # the reduction of the step before must have left the buffer
        tma.store_wait(0)
        thread_barrier()
        tiles.dq.index(INDEX).store(fragments(dq))
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    tiles.q_ring.release(n)
    return dk, dv


@gluon.jit
def issue_dq(tiles, k_of_dq, ds, n, INDEX: gl.constexpr):
    """dq of half of the columns, on its way, once both warpgroups have left their dS."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    buffer = tiles.ds.index(n & 1)
    buffer.slice(INDEX * ROWS, ROWS, 0).store(ds)
    fence_async_shared()
    # both halves of ds are needed below; this also ends every use of the other buffer
    named_barrier_sync(n, BOTH_BARRIER, 256)
    zeros = gl.full([ROWS, ROWS], 0.0, gl.float32, S_LAYOUT)
    return warpgroup_mma(k_of_dq, buffer, zeros, use_acc=False, is_async=True)  # (half of D, queries)


@gluon.jit
def add_dq(tiles, dq_desc, row, INDEX: gl.constexpr):
    """Adds the stored half of dq to its sum, of which row is the first line."""
    fence_async_shared()
    thread_barrier()
    reduce_add_to_global(dq_desc, [row * (tiles.HEAD_DIM // ROWS) + INDEX * ROWS, 0], tiles.dq.index(INDEX))


@gluon.jit
def consume(tiles, dq_desc, dk_desc, dv_desc, scale_log2, softmax_scale, INDEX: gl.constexpr):
    """dk and dv of 64 keys of every tile of this block, and its part of dq."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.HEAD_DIM, 16])
    n = gl.to_tensor(0)
    batch, kv_head, key, begin, whole_begin, whole_end, end = tiles.locate()
    key += INDEX * ROWS
    keys = key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    query_first, query_end = key_limits(tiles.mask, batch, keys, tiles.padded)
    line = tiles.first_line()

    tiles.kv_ring.take(0)
    k_part = tiles.k.index(0).slice(INDEX * ROWS, ROWS, 2)
    v_part = tiles.v.index(0).slice(INDEX * ROWS, ROWS, 2)
    k_all = tiles.k.index(0).reshape([BLOCK_N, tiles.HEAD_DIM])
    k = k_all.slice(INDEX * ROWS, ROWS, 0)
    v = tiles.v.index(0).reshape([BLOCK_N, tiles.HEAD_DIM]).slice(INDEX * ROWS, ROWS, 0)
    k_of_dq = k_all.slice(INDEX * ROWS, ROWS, 1).permute((1, 0))
    dk = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, D_LAYOUT)
    dv = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, D_LAYOUT)
    place = begin
    row = line
    for n in range((end - begin) * tiles.group):
        masked = (place < whole_begin) | (place >= whole_end)
        dk, dv = step(
            tiles, dq_desc, dk, dv, k, v, k_of_dq, n, row, place, masked, query_first, query_end, scale_log2,
            INDEX
        )  # fmt: skip
        row = line + query_block(tiles.mask, place) * ROWS
        place += 1
        if place == end:
            place = begin
            line += tiles.padded

    if tiles.SUMS_DQ:  # noqa: SIM102
        if begin < end:
            add_dq(tiles, dq_desc, row, INDEX)
    # k and v have been read by both warpgroups: their place holds the results
    named_barrier_sync(place, BOTH_BARRIER, 256)
    v.store(dv.to(tiles.q.dtype))
    k.store((dk * softmax_scale).to(tiles.q.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, key, 0], v_part)
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, key, 0], k_part)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["stride_list_batch", "stride_list_head", "group", "seq_q", "seq_k", "window", "padded"]
)
def backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    bounds_ptr, spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head,
    group, seq_q, seq_k, window, padded, scale_log2, softmax_scale,
    MASK: gl.constexpr,
    HEAD_DIM: gl.constexpr, SUMS_DQ: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_delta_desc.layout),
        gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROWS], DS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, ROWS], dq_desc.layout),
        make_ring(1, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK),
        group,
        padded,
        HEAD_DIM,
        SUMS_DQ,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (tiles, dq_desc, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(0))),
            (consume, (tiles, dq_desc, dk_desc, dv_desc, scale_log2, softmax_scale, gl.constexpr(1))),
            (produce, (tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
