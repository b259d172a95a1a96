"""What runs before and after the backward kernels, in plain Triton: lse and delta, then rounding dq."""

import triton
import triton.language as tl


@triton.jit
def in_memory(inside, columns, HEAD_DIM: tl.constexpr):
    """Which elements of a tile its tensor has: the rows inside, and HEAD_DIM columns of narrow heads."""
    held = inside[:, None]
    if columns.shape[0] > HEAD_DIM:
        held = held & (columns < HEAD_DIM)[None, :]
    return held


@triton.jit(do_not_specialize=["n_sums", "n_sections"])
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, minus_lse_ptr, minus_delta_ptr, dq_sum_ptr, counts_ptr,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    n_head, seq_q, padded, n_sums, n_sections, softmax_scale, keep_share,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, COUNTS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """One block of rows: -lse / softmax_scale, dlse - rowsum(out * dout), and zeros for sums.Sums.

    The second is multiplied by keep_share, the share that dropout keeps, as all gradients are divided by it
    later. A row that does not exist, or sees nothing, gets -inf, and so probability 0. n_sums: heads whose
    sums of dq, of WIDTH channels, exist at the start; counts_ptr: (n_sections, COUNTS), no more sections than
    heads.
    """
    head = tl.program_id(1)
    if tl.program_id(0) == 0:
        counts = COUNTS * head + tl.arange(0, COUNTS)
        tl.store(counts_ptr + counts, tl.zeros_like(counts), mask=counts < COUNTS * n_sections)
    b = (head // n_head).to(tl.int64)
    h = (head % n_head).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    inside = rows < seq_q
    held = in_memory(inside, columns, HEAD_DIM)
    out = tl.load(
        out_ptr + b * stride_ob + h * stride_oh + rows[:, None].to(tl.int64) * stride_ot + columns[None, :],
        mask=held,
        other=0.0,
    )  # (BLOCK_M, WIDTH)
    dout = tl.load(
        dout_ptr + b * stride_db + h * stride_dh + rows[:, None].to(tl.int64) * stride_dt + columns[None, :],
        mask=held,
        other=0.0,
    )  # (BLOCK_M, WIDTH)
    minus_delta = -tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    line = head.to(tl.int64) * seq_q + rows
    if HAS_DLSE:
        minus_delta += tl.load(dlse_ptr + line, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + line, mask=inside, other=float("-inf"))
    minus_lse = tl.where(lse == float("-inf"), float("-inf"), -lse / softmax_scale)
    padded_line = head.to(tl.int64) * padded + rows
    tl.store(minus_lse_ptr + padded_line, minus_lse)
    tl.store(minus_delta_ptr + padded_line, minus_delta * keep_share)
    if head < n_sums:
        zeros = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        tl.store(dq_sum_ptr + padded_line[:, None] * WIDTH + columns[None, :], zeros)


@triton.jit(do_not_specialize=["first_head", "first_sum"])
def round_kernel(
    dq_sum_ptr, dq_ptr, stride_b, stride_t, stride_h, n_head, first_head, first_sum, seq_q, padded,
    softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rounds one block of rows of dq (B, Tq, H, D): heads from first_head on, sums from first_sum on.

    A sum consists of transposed blocks, 64 channels x 64 queries, each in the order of primitives.fragments.
    """
    head = first_head + tl.program_id(1)
    b = (head // n_head).to(tl.int64)
    h = (head % n_head).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    first = ((first_sum + tl.program_id(1)).to(tl.int64) * padded + tl.program_id(0) * BLOCK_M) * WIDTH
    dq = tl.load(dq_sum_ptr + first + tl.arange(0, BLOCK_M * WIDTH)) * softmax_scale
    # block of queries, block of D, eight, warp, eighth, pair, half, one
    dq = tl.reshape(dq.to(dq_ptr.dtype.element_ty), (BLOCK_M // 64, WIDTH // 64, 8, 4, 8, 4, 2, 2))
    # queries: block, eight, pair, one; D: block, warp, half, eighth
    dq = tl.reshape(tl.permute(dq, (0, 2, 5, 7, 1, 3, 6, 4)), (BLOCK_M, WIDTH))
    dq_ptrs = dq_ptr + b * stride_b + h * stride_h + rows[:, None].to(tl.int64) * stride_t + columns[None, :]
    tl.store(dq_ptrs, dq, mask=in_memory(rows < seq_q, columns, HEAD_DIM))
