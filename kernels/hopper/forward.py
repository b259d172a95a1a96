"""out = softmax(q k^T * scale) v and its log-sum-exp on sm_90, in Gluon.

A block is persistent: one warp fills rings of q, k and v tiles by bulk copies, and CONSUMERS warpgroups own
64 query rows each. The rings run on from one tile to the next, and so does the arithmetic: step j of a tile
issues S_j = q k_j^T and then o += P_{j-1} v_{j-1}, and computes the softmax of S_j while the second product
runs. Step 0 ends the tile before: its last product runs beside the first softmax of this tile. Keys are
visited from the last to the first, masked blocks apart from whole ones.

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

from kernels.hopper.primitives import (
    Ring,
    make_ring,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    pack_pairs,
    record,
    thread_barrier,
    unpack_pairs,
)
from kernels.hopper.schedule import Mask, TileOrder, blocks_between, quotient

# rows of one warpgroup's products
ROWS = gl.constexpr(64)
# a finite maximum for rows that have seen nothing: exp2(-inf - finite) is 0, where -inf - (-inf) would be nan
LOWEST = gl.constexpr(-1.0e30)
LN2 = gl.constexpr(0.6931471805599453)
TURN_BARRIER = gl.constexpr(9)


@record
class Tiles:
    """Shared memory and the work list, as every partition sees them."""

    q: gl.shared_memory_descriptor  # (Q_STAGES * CONSUMERS, 1, 1, ROWS, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, BLOCK_N, D)
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, D)
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    order: TileOrder
    mask: Mask
    n_head: gl.tensor
    by_n_head: gl.tensor
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def locate(self, turn):
        """Batch, head, first row and the ranges of key blocks of this block's `turn`-th tile."""
        BLOCK_M: gl.constexpr = self.CONSUMERS * ROWS
        head, tile = self.order.deal(turn)
        batch = quotient(head, self.by_n_head)
        row = tile * BLOCK_M
        first_of_first, end_of_first = self.mask.keys_of(batch, row)
        first_of_last, end_of_last = self.mask.keys_of(batch, row + BLOCK_M - 1)
        begin, whole_begin, whole_end, end = blocks_between(
            first_of_first, end_of_first, first_of_last, end_of_last, self.BLOCK_N
        )
        return batch, head - batch * self.n_head, row, begin, whole_begin, whole_end, end


@gluon.jit
def produce(tiles, q_desc, k_desc, v_desc, group):
    """Fills the rings: Q of a tile, then K of step j with V of step j - 1, as the consumers take them."""
    n_q = 0
    n = 0
    batch_before = 0
    head_before = 0
    block_before = 0
    for turn in range(tiles.order.turns()):
        batch, head, row, begin, _, _, end = tiles.locate(turn)
        kv_head = head // group
        stage, full = tiles.q_ring.fill(n_q)
        mbarrier.expect(full, tiles.CONSUMERS * q_desc.block_type.nbytes)
        for c in gl.static_range(tiles.CONSUMERS):
            buffer = tiles.q.index(stage * tiles.CONSUMERS + c)
            tma.async_copy_global_to_shared(q_desc, [batch, head, row + c * ROWS, 0], full, buffer)
        n_q += 1  # noqa: SIM113
        for j in range(end - begin):
            block = (end - 1 - j) * tiles.BLOCK_N
            stage, full = tiles.k_ring.fill(n)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, block, 0], full, tiles.k.index(stage))
            stage, full = tiles.v_ring.fill(n)
            # nothing was before the first step: its V is any block, and the result is dropped
            mbarrier.expect(full, v_desc.block_type.nbytes)
            before = [batch_before, head_before, block_before, 0]
            tma.async_copy_global_to_shared(v_desc, before, full, tiles.v.index(stage))
            batch_before = batch
            head_before = kv_head
            block_before = block
            n += 1
    stage, full = tiles.v_ring.fill(n)
    mbarrier.expect(full, v_desc.block_type.nbytes)
    before = [batch_before, head_before, block_before, 0]
    tma.async_copy_global_to_shared(v_desc, before, full, tiles.v.index(stage))


@gluon.jit
def take_turn(token, INDEX: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        named_barrier_sync(token, TURN_BARRIER + INDEX, 256)


@gluon.jit
def pass_turn(token, INDEX: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        named_barrier_arrive(token, TURN_BARRIER + (INDEX + 1) % CONSUMERS, 256)


@gluon.jit
def hide(tiles, s, first, end, block):
    """-inf outside of each row's interval of keys."""
    columns = gl.expand_dims(gl.arange(0, tiles.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout)), 0)
    # a thread holds two columns in eight: the multiple of eight is known to the compiler, and only the rest
    # takes registers, where a plain comparison would keep every column of the thread in one
    eight = columns & -8
    rest = columns & 7
    visible = eight < gl.expand_dims(opaque(end - block * tiles.BLOCK_N), 1) - rest
    if tiles.mask.KIND == "window" or tiles.mask.KIND == "intervals":
        visible = visible & (eight >= gl.expand_dims(opaque(first - block * tiles.BLOCK_N), 1) - rest)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def row_maximum(s):
    """(ROWS,): the maximum of each row, of pairs first: one chain of all columns would wait for itself."""
    low, high = gl.split(gl.reshape(s, [ROWS, s.shape[1] // 2, 2]))
    return gl.convert_layout(gl.max(gl.maximum(low, high), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def partial_sum(p):
    """(ROWS, 4): four sums for each row, each of the columns that one thread holds."""
    low, high = gl.split(gl.reshape(p, [ROWS, p.shape[1] // 2, 2]))
    return gl.sum(gl.reshape(low + high, [ROWS, p.shape[1] // 8, 4]), 1)


@gluon.jit
def softmax(s, m_i, l_i, scale_log2):
    """One online step in base 2: probabilities, factor for what was summed before, new maximum and sums.

    l_i: (ROWS, 4), of which only `store` makes one sum, because that takes an exchange between threads.
    """
    m_new = gl.maximum(m_i, row_maximum(s) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(m_i - m_new)
    alpha_l = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout)), 1)
    return p, alpha, m_new, l_i * alpha_l + partial_sum(p)


@gluon.jit
def products(tiles, q, p, o, n, INDEX: gl.constexpr, PINGPONG: gl.constexpr):
    """Issues S = Q K_n^T and O += P V_n, and waits for the first."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    zeros = gl.full([ROWS, tiles.BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    k = tiles.k.index(tiles.k_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    take_turn(n, INDEX, tiles.CONSUMERS, PINGPONG)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (ROWS, BLOCK_N)
    v = tiles.v.index(tiles.v_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    o = warpgroup_mma(unpack_pairs(p, tiles.q.dtype, P_LAYOUT), v, o, is_async=True)  # (ROWS, D)
    pass_turn(n, INDEX, tiles.CONSUMERS, PINGPONG)
    s = warpgroup_mma_wait(1, deps=[s])
    tiles.k_ring.release(n)
    return s, o


@gluon.jit
def step(
    tiles, q, p, o, m_i, l_i, n, first, end, block, scale_log2,
    MASKED: gl.constexpr, INDEX: gl.constexpr, PINGPONG: gl.constexpr
):  # fmt: skip
    """One block of keys after the first."""
    s, o = products(tiles, q, p, o, n, INDEX, PINGPONG)
    if MASKED:
        s = hide(tiles, s, first, end, block)
    p_new, alpha, m_i, l_i = softmax(s, m_i, l_i, scale_log2)
    o = warpgroup_mma_wait(0, deps=[o])
    tiles.v_ring.release(n)
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout)), 1)
    p = pack_pairs(p_new, tiles.q.dtype)
    return p, o, m_i, l_i


@gluon.jit
def store(tiles, out_desc, lse_ptr, o, m_i, l_i, head, row, INDEX: gl.constexpr):
    """Writes a finished tile: o / l and the natural log-sum-exp; a row that saw nothing gives 0 and -inf.

    head counts over all batches.
    """
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    empty = l_i == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / l_i)
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout)), 1)
    buffer = tiles.out.index(INDEX)
    # the copy of the tile before must have left the buffer
    tma.store_wait(0)
    thread_barrier()
    buffer.reshape([ROWS, tiles.HEAD_DIM]).store(o.to(tiles.q.dtype))
    fence_async_shared()
    thread_barrier()
    batch = quotient(head, tiles.by_n_head)
    tma.async_copy_shared_to_global(out_desc, [batch, head - batch * tiles.n_head, row, 0], buffer)

    lse = gl.where(empty, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
    rows = row + gl.arange(0, ROWS, layout=l_i.type.layout)
    gl.store(lse_ptr + head.to(gl.int64) * tiles.mask.seq_q + rows, lse, mask=rows < tiles.mask.seq_q)


@gluon.jit
def consume(tiles, out_desc, lse_ptr, scale_log2, INDEX: gl.constexpr, PINGPONG: gl.constexpr):
    """Attention of 64 rows of every tile of this block."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.HEAD_DIM, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    p = pack_pairs(gl.full([ROWS, tiles.BLOCK_N], 0.0, gl.float32, S_LAYOUT), tiles.q.dtype)
    o = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    m_i = gl.full([ROWS], LOWEST, gl.float32, ROW_LAYOUT)
    l_i = partial_sum(gl.full([ROWS, tiles.BLOCK_N], 0.0, gl.float32, S_LAYOUT))
    n_q = 0
    n = gl.to_tensor(0)
    head_before = 0
    row_before = 0
    if INDEX == tiles.CONSUMERS - 1:
        pass_turn(n, INDEX, tiles.CONSUMERS, PINGPONG)
    for turn in range(tiles.order.turns()):
        batch, head, row, begin, whole_begin, whole_end, end = tiles.locate(turn)
        row += INDEX * ROWS
        rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        key_first, key_end = tiles.mask.keys_of(batch, rows)
        q_stage = tiles.q_ring.take(n_q)
        q = tiles.q.index(q_stage * tiles.CONSUMERS + INDEX).reshape([ROWS, tiles.HEAD_DIM])

        # before the first tile p is zero, and what is added to o is never stored
        s, o = products(tiles, q, p, o, n, INDEX, PINGPONG)
        masked = whole_end < end
        if tiles.mask.KIND == "window" or tiles.mask.KIND == "intervals":
            # the last block may be whole at its end, and cut at its beginning
            masked = masked | (whole_begin == end)
        if masked:
            s = hide(tiles, s, key_first, key_end, end - 1)
        m_new = gl.maximum(row_maximum(s) * scale_log2, LOWEST)
        p_new = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
        l_new = partial_sum(p_new)
        o = warpgroup_mma_wait(0, deps=[o])
        tiles.v_ring.release(n)
        p = pack_pairs(p_new, tiles.q.dtype)
        if n > 0:
            store(tiles, out_desc, lse_ptr, o, m_i, l_i, head_before, row_before, INDEX)
        o = gl.full([ROWS, tiles.HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        m_i = m_new
        l_i = l_new

        whole = gl.maximum(end - whole_end, 1)
        after_whole = gl.maximum(end - whole_begin, whole)
        if tiles.mask.KIND != "full":
            for j in range(1, whole):
                p, o, m_i, l_i = step(
                    tiles, q, p, o, m_i, l_i, n + j, key_first, key_end, end - 1 - j, scale_log2,
                    True, INDEX, PINGPONG
                )  # fmt: skip
        for j in range(whole, after_whole):
            p, o, m_i, l_i = step(
                tiles, q, p, o, m_i, l_i, n + j, key_first, key_end, end - 1 - j, scale_log2,
                False, INDEX, PINGPONG
            )  # fmt: skip
        if tiles.mask.KIND == "window" or tiles.mask.KIND == "intervals":
            for j in range(after_whole, end - begin):
                p, o, m_i, l_i = step(
                    tiles, q, p, o, m_i, l_i, n + j, key_first, key_end, end - 1 - j, scale_log2,
                    True, INDEX, PINGPONG
                )  # fmt: skip
        tiles.q_ring.release(n_q)
        n_q += 1  # noqa: SIM113
        n += end - begin
        head_before = batch * tiles.n_head + head
        row_before = row

    v = tiles.v.index(tiles.v_ring.take(n)).reshape([tiles.BLOCK_N, tiles.HEAD_DIM])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    o = warpgroup_mma(unpack_pairs(p, tiles.q.dtype, P_LAYOUT), v, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    store(tiles, out_desc, lse_ptr, o, m_i, l_i, head_before, row_before, INDEX)
    tma.store_wait(0)
    if PINGPONG and INDEX == 0:
        take_turn(n, INDEX, tiles.CONSUMERS, PINGPONG)


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
    ]
)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, bounds_ptr,
    n_batch, n_head, group, seq_q, seq_k, window, section,
    by_section_tiles, by_section, by_last_section, by_n_head, scale_log2,
    MASK: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], out_desc.layout),
        make_ring(Q_STAGES, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        make_ring(STAGES, CONSUMERS),
        TileOrder(
            n_batch * n_head,
            gl.cdiv(seq_q, CONSUMERS * ROWS),
            section,
            by_section_tiles,
            by_section,
            by_last_section,
            MASK != "full",
        ),
        Mask(seq_q, seq_k, window, bounds_ptr, MASK),
        n_head,
        by_n_head,
        BLOCK_N,
        HEAD_DIM,
        CONSUMERS,
    )
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (tiles, out_desc, lse_ptr, scale_log2, gl.constexpr(0), PINGPONG)),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, gl.constexpr(1), PINGPONG)),
                (produce, (tiles, q_desc, k_desc, v_desc, group)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, out_desc, lse_ptr, scale_log2, gl.constexpr(0), PINGPONG)),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, gl.constexpr(1), PINGPONG)),
                (consume, (tiles, out_desc, lse_ptr, scale_log2, gl.constexpr(2), PINGPONG)),
                (produce, (tiles, q_desc, k_desc, v_desc, group)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
