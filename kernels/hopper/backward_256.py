"""dk and dv of heads of 136 to 256 on sm_90, in Gluon: a warpgroup for each of the two.

dk or dv of 64 keys take 128 registers of a thread. So a tile has 64 keys, and each of its two warpgroups
holds one gradient of all of them. The one of dv computes S and P, and hands P over in shared memory; the one
of dk computes dP, and dS = P * (dP - delta). Both walk the queries 64 at a time, with scores held
transposed, so P and dS are left operands without leaving the registers. While one computes P or dS, the
other's products fill the tensor cores; nothing is issued ahead, because a step's queries would then be
needed while those of the step before it are still in use, and shared memory holds no third block of them.
There is one buffer of k and one of v, each refilled for the next tile after its last scores. dq.py computes
dq: its float32 sums would take more of shared memory's time than two products more.

Source: FlashAttention-2 (arXiv:2307.08691).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from kernels.hopper.block_lists import BlockLists
from kernels.hopper.dropout import (
    ROWS_OF_EIGHT,
    Dropout,
    gradient_of_marked,
    halves,
    make_dropout,
    make_words,
    mark,
)
from kernels.hopper.key_tiles import (
    NOT_SPECIALIZED,
    ROWS,
    KeyTiles,
    begin_dp,
    begin_to_drop,
    columns,
    copy_queries,
    draw,
    key_limits,
    make_key_tiles,
    minus_deltas,
    probabilities,
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
    thread_barrier,
    unpack_pairs,
    widen_pairs,
)
from kernels.hopper.schedule import Mask
from kernels.hopper.wide_heads import (
    LEFT_LAYOUT,
    copies_of,
    copy_in,
    copy_out_channels,
    for_channels,
    over_channels,
    zeros_of_channels,
)

HEAD_DIM = gl.constexpr(256)
# channels of dk and dv that leave at a time
PART = gl.constexpr(64)
# layout of a 64 x 64 product
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    k: gl.shared_memory_descriptor  # (1, 1, 1, ROWS, D)
    v: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor  # (2, 1) int32, the tile's number in order, beside its k and its v
    q: gl.shared_memory_descriptor  # (STAGES, 1, 1, ROWS, D)
    dout: gl.shared_memory_descriptor
    minus_lse: gl.shared_memory_descriptor  # (STAGES, ROWS)
    minus_delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor  # (P_STAGES, 4, 512) int32, see in_order_of_threads
    out: gl.shared_memory_descriptor  # (2, 1, 1, ROWS, PART)
    k_ring: Ring
    v_ring: Ring
    q_ring: Ring
    p_ring: Ring
    work: KeyTiles
    dropout: Dropout
    REST: gl.constexpr  # channels behind the first 128 that count


@gluon.jit
def produce(tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, counter_ptr):
    """Takes tiles and fills the rings: a tile's k, then the queries that see it, head by head.

    v follows the first of them: it is free a little later than k.
    """
    n = 0
    t = 0
    i = gl.program_id(0)
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, _, _, end = tiles.work.locate(i)
        copy_keys(tiles, k_desc, tiles.k, tiles.k_ring, 0, batch, kv_head, key, i, t)
        head = kv_head * tiles.work.group
        line = tiles.work.first_line(batch, kv_head, 0)
        place = begin
        for j in range((end - begin) * tiles.work.group):
            copy_queries(
                tiles, q_desc, dout_desc, minus_lse_desc, minus_delta_desc, batch, head, line, place, n,
                tiles.REST
            )  # fmt: skip
            if j == 0:
                copy_keys(tiles, v_desc, tiles.v, tiles.v_ring, 1, batch, kv_head, key, i, t)
            n += 1
            place += 1
            if place == end:
                place = begin
                head += 1
                line += tiles.work.padded
        t += 1
        i = tiles.work.take_behind_the_first(counter_ptr)
    # a number past the last tile ends both warpgroups
    _, full = tiles.k_ring.fill(t)
    announce(tiles.numbers.index(0), i)
    mbarrier.arrive(full, count=1)
    _, full = tiles.v_ring.fill(t)
    announce(tiles.numbers.index(1), i)
    mbarrier.arrive(full, count=1)


@gluon.jit
def copy_keys(tiles, desc, buffer, ring, NUMBER: gl.constexpr, batch, kv_head, key, i, t):
    """Fills use t of the ring of k or of v with the keys of the i-th tile in order, and announces i."""
    _, full = ring.fill(t)
    announce(tiles.numbers.index(NUMBER), i)
    mbarrier.expect(full, copies_of(tiles.REST) * desc.block_type.nbytes)
    copy_in(desc, batch, kv_head, key, full, buffer.index(0), tiles.REST)


@gluon.jit
def in_order_of_threads(pairs):
    """Pairs of P (ROWS, ROWS // 2), reordered so that each thread holds four adjacent ones."""
    x = gl.reshape(pairs, [4, 2, 8, 4, 2, 4])  # rows: warp, half, eighth; pairs: two eights, eight, pair
    return gl.reshape(gl.permute(x, (3, 0, 2, 5, 4, 1)), [4, 512])


@gluon.jit
def take_p(tiles, n, dp):
    """Pairs of P of step n, (ROWS, ROWS // 2), for scores in the layout of dP."""
    like, _ = halves(dp)
    LAYOUT: gl.constexpr = in_order_of_threads(like).type.layout
    pairs = tiles.p.index(tiles.p_ring.take(n)).load(LAYOUT)
    tiles.p_ring.release(n)
    pairs = gl.permute(gl.reshape(pairs, [4, 4, 8, 4, 2, 2]), (1, 5, 2, 0, 4, 3))
    return gl.convert_layout(gl.reshape(pairs, like.shape), like.type.layout)


@gluon.jit
def consume_values(tiles, dv_desc, scale_log2):
    """P of every step, handed over to consume_keys, and dv of every tile of this thread block."""
    dtype: gl.constexpr = tiles.q.dtype
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    k = tiles.k.index(0).reshape([ROWS, HEAD_DIM])
    tiles.k_ring.take(t)
    i = announced(tiles.numbers.index(0))
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, whole_begin, whole_end, end = tiles.work.locate(i)
        like = gl.full([ROWS, ROWS], 0.0, gl.float32, S_LAYOUT)
        limits = key_limits(tiles.work.mask, batch, key, tiles.work.padded, like)
        dropping = begin_to_drop(tiles, like, key)
        dv = zeros_of_channels(ROWS, tiles.REST)
        place = begin
        last = n + (end - begin) * tiles.work.group - 1
        for j in range(n, last + 1):
            stage = tiles.q_ring.take(j)
            q = tiles.q.index(stage).reshape([ROWS, HEAD_DIM])
            s = columns(tiles.minus_lse.index(stage), S_LAYOUT)
            s = over_channels(k, q, s, tiles.REST)  # (keys, queries)
            words = draw(tiles, like, dropping, j)
            s = warpgroup_mma_wait(0, deps=[s])
            # all scores of this tile are there
            if j == last:
                tiles.k_ring.release(t)
            masked = (place < whole_begin) | (place >= whole_end)
            p = pack_pairs(probabilities(tiles.work, s, place, masked, limits, scale_log2), dtype)
            if tiles.dropout.IS_ON:
                p = mark(p, tiles.dropout.masks(s, words, TRANSPOSED=True))
            buffer, full = tiles.p_ring.fill(j)
            # opaque: otherwise each thread's place in it is computed at kernel start, and spilled
            tiles.p.index(opaque(buffer)).store(in_order_of_threads(p))
            kept = not_negative(p, dtype) if tiles.dropout.IS_ON else p
            dout = tiles.dout.index(stage).reshape([ROWS, HEAD_DIM])
            dv = for_channels(unpack_pairs(kept, dtype, LEFT_LAYOUT), dout, dv)  # (keys, D)
            thread_barrier()
            mbarrier.arrive(full, count=1)
            dv = warpgroup_mma_wait(0, deps=[dv[0], dv[1]])
            tiles.q_ring.release(j)
            place += 1
            if place == end:
                place = begin
        n = last + 1
        if tiles.dropout.IS_ON:
            dv = dv[0] * tiles.dropout.keep_scale, dv[1] * tiles.dropout.keep_scale
        copy_out_channels(dv_desc, batch, kv_head, key, dv, tiles.out.index(0))
        t += 1
        tiles.k_ring.take(t)
        i = announced(tiles.numbers.index(0))
    tma.store_wait(0)


@gluon.jit
def consume_keys(tiles, dk_desc, softmax_scale):
    """dk of every tile of this thread block."""
    dtype: gl.constexpr = tiles.q.dtype
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    v = tiles.v.index(0).reshape([ROWS, HEAD_DIM])
    tiles.v_ring.take(t)
    i = announced(tiles.numbers.index(1))
    while i < tiles.work.order.total():
        batch, kv_head, key, begin, _, _, end = tiles.work.locate(i)
        dk = zeros_of_channels(ROWS, tiles.REST)
        last = n + (end - begin) * tiles.work.group - 1
        for j in range(n, last + 1):
            stage = tiles.q_ring.take(j)
            dout = tiles.dout.index(stage).reshape([ROWS, HEAD_DIM])
            dp = begin_dp(tiles, stage, S_LAYOUT)
            # (keys, queries)
            dp = over_channels(v, dout, dp, tiles.REST, use_acc=not tiles.dropout.IS_ON)
            dp = warpgroup_mma_wait(0, deps=[dp])
            if j == last:
                tiles.v_ring.release(t)
            p = take_p(tiles, j, dp)
            q = tiles.q.index(stage).reshape([ROWS, HEAD_DIM])
            if tiles.dropout.IS_ON:
                # all gradients are multiplied by keep_scale at the end, so delta has been divided by it
                ds = gradient_of_marked(p, dp, minus_deltas(tiles, stage, dp), dtype)
                ds = unpack_pairs(ds, dtype, LEFT_LAYOUT)
            else:
                ds = gl.convert_layout((widen_pairs(p, dtype, S_LAYOUT) * dp).to(dtype), LEFT_LAYOUT)
            dk = for_channels(ds, q, dk)  # (keys, D)
            dk = warpgroup_mma_wait(0, deps=[dk[0], dk[1]])
            tiles.q_ring.release(j)
        n = last + 1
        dk = dk[0] * softmax_scale, dk[1] * softmax_scale
        copy_out_channels(dk_desc, batch, kv_head, key, dk, tiles.out.index(1))
        t += 1
        tiles.v_ring.take(t)
        i = announced(tiles.numbers.index(1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_256_kernel(
    q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, dk_desc, dv_desc,
    bounds_ptr, spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head,
    seed_ptr, keep_limit, keep_line, keep_scale, counter_ptr,
    group, seq_q, seq_k, window, padded, n_heads, n_tiles, n_kv_head, section,
    by_section_tiles, by_section, by_last_section, by_n_kv_head, scale_log2, softmax_scale,
    MASK: gl.constexpr, DROPOUT: gl.constexpr, REST: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    lists = BlockLists(spans_ptr, entries_ptr, bits_ptr, stride_list_batch, stride_list_head)
    work = make_key_tiles(
        Mask(seq_q, seq_k, window, bounds_ptr, lists, MASK), group, padded, n_heads, n_tiles, n_kv_head,
        section, by_section_tiles, by_section, by_last_section, by_n_kv_head, ROWS
    )  # fmt: skip
    words = make_words(DROPOUT, STAGES, ROWS_OF_EIGHT, ROWS)
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, HEAD_DIM], v_desc.layout),
        make_numbers(2),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, HEAD_DIM], dout_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], minus_delta_desc.layout),
        gl.allocate_shared_memory(gl.int32, [P_STAGES, 4, 512], P_LAYOUT),
        gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, PART], dk_desc.layout),
        make_ring(1, 1),
        make_ring(1, 1),
        make_ring(STAGES, 2),
        make_ring(P_STAGES, 1),
        work,
        make_dropout(seed_ptr, keep_limit, keep_line, keep_scale, words, DROPOUT),
        REST,
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume_values, (tiles, dv_desc, scale_log2)),
            (consume_keys, (tiles, dk_desc, softmax_scale)),
            (
                produce,
                (tiles, q_desc, dout_desc, k_desc, v_desc, minus_lse_desc, minus_delta_desc, counter_ptr),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
