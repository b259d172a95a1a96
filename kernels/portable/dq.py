"""dq: one program owns BLOCK_M queries of one head and walks the keys that they see."""

import triton
import triton.language as tl

from kernels.portable.block_lists import (
    find_span,
    first_of_program,
    load_list,
    n_tiles,
    tile_at,
    tiles_of,
    visible_bits,
)
from kernels.portable.dropout import keep_tile
from kernels.portable.masks import NOT_SPECIALIZED, keys_of_queries, line_numbers
from kernels.portable.tile_io import in_registers, load_tile, store_tile


@triton.jit
def add_keys(
    dq, q, dout, lse, delta,
    k_source, v_source,
    span, entries_ptr, bits_ptr, first_key, end_key, seq_k,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    scale_log2, seed, limit, keep_scale, batch, head, kv_head, first_row,
    CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the keys of the span to dq: with CUT those of blocks that a mask or the last key cuts."""
    for i in tl.range(0, n_tiles(span, CUT, BLOCK_SIZE, BLOCK_N)):
        n, bits = tile_at(i, span, entries_ptr, CUT, BLOCK_SIZE, BLOCK_N)
        k = load_tile(
            k_source, batch, kv_head, n, seq_k, stride_kt, stride_kd, TMA, HEAD_DIM, BLOCK_N, BLOCK_D, CUT
        )
        v = load_tile(
            v_source, batch, kv_head, n, seq_k, stride_vt, stride_vd, TMA, HEAD_DIM, BLOCK_N, BLOCK_D, CUT
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if CUT:
            columns = line_numbers(n, BLOCK_N)[None, :]
            visible = (columns >= first_key[:, None]) & (columns < end_key[:, None])
            if BLOCK_SIZE != 0:
                visible &= visible_bits(bits_ptr, bits, first_row, n, BLOCK_SIZE, BLOCK_M, BLOCK_N)
            p = tl.where(visible, p, 0.0)
        if DROPOUT:
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            keep = keep_tile(seed, limit, batch, head, first_row, n, BLOCK_M, BLOCK_N)
            if BLOCK_D > 64 or BLOCK_SIZE != 0:
                dp = tl.where(keep, dp * keep_scale, 0.0) - delta[:, None]
            else:
                # one instruction less, but faster only where the products are small
                dp = tl.where(keep, dp * keep_scale - delta[:, None], -delta[:, None])
        else:
            begin = tl.broadcast_to(-delta[:, None], [BLOCK_M, BLOCK_N])
            dp = tl.dot(dout, tl.trans(v), begin, input_precision=PRECISION)
        ds = p * dp
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
    return dq


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dq_kernel(
    q_source, k_source, v_source, dout_source, lse_ptr, delta_ptr, dq_ptr, bounds_ptr, seed_ptr,
    spans_ptr, entries_ptr, bits_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    stride_dob, stride_dot, stride_doh, stride_dod,
    stride_dqb, stride_dqt, stride_dqh,
    stride_sb, stride_sh,
    seq_q, seq_k, seq_padded, n_head, group_size, window, softmax_scale, scale_log2, limit, keep_scale,
    MASK: tl.constexpr, BLOCK_SIZE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HELD: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles_of_head = tiles_of(seq_q, BLOCK_SIZE, BLOCK_M)
    program = tl.program_id(0) % tiles_of_head
    head_of_batch = tl.program_id(0) // tiles_of_head
    batch, head = (head_of_batch // n_head).to(tl.int64), (head_of_batch % n_head).to(tl.int64)
    kv_head = head // group_size
    if not TMA:
        q_source += batch * stride_qb + head * stride_qh
        dout_source += batch * stride_dob + head * stride_doh
        k_source += batch * stride_kb + kv_head * stride_kh
        v_source += batch * stride_vb + kv_head * stride_vh
    dq_ptr += batch * stride_dqb + head * stride_dqh
    first_row = (tiles_of_head - 1 - program) * BLOCK_M
    if BLOCK_SIZE != 0:
        spans_ptr += batch * stride_sb + head * stride_sh
        first_row = first_of_program(spans_ptr, program, BLOCK_SIZE, BLOCK_M)
    if MASK == "intervals":
        bounds_ptr += batch * 2 * seq_q
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    rows = first_row + tl.arange(0, BLOCK_M)
    first_key, end_key = keys_of_queries(rows, seq_q, seq_k, window, bounds_ptr, MASK)
    first_a, end_a = keys_of_queries(first_row, seq_q, seq_k, window, bounds_ptr, MASK)
    first_b, end_b = keys_of_queries(first_row + BLOCK_M - 1, seq_q, seq_k, window, bounds_ptr, MASK)
    listed = load_list(spans_ptr, first_row, BLOCK_SIZE)
    row_of_head = head_of_batch.to(tl.int64) * seq_padded
    lse = tl.load(lse_ptr + row_of_head + rows)
    delta = tl.load(delta_ptr + row_of_head + rows)
    # after the loads above, which arrive while the program waits for q and dout
    q = load_tile(
        q_source, batch, head, first_row, seq_q, stride_qt, stride_qd, TMA, HEAD_DIM, BLOCK_M, BLOCK_D, True
    )
    dout = load_tile(
        dout_source, batch, head, first_row, seq_q, stride_dot, stride_dod, TMA, HEAD_DIM, BLOCK_M,
        BLOCK_D, True,
    )  # fmt: skip
    if HELD:
        q, dout = in_registers(q, first_row, seq_q, BLOCK_M), in_registers(dout, first_row, seq_q, BLOCK_M)
    span = find_span(first_a, end_a, first_b, end_b, listed, entries_ptr, MASK, BLOCK_SIZE, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for CUT in tl.static_range(2):
        dq = add_keys(
            dq, q, dout, lse, delta,
            k_source, v_source,
            span, entries_ptr, bits_ptr,
            first_key, end_key, seq_k,
            stride_kt, stride_kd,
            stride_vt, stride_vd,
            scale_log2, seed, limit, keep_scale, batch, head, kv_head, first_row,
            CUT, BLOCK_SIZE, DROPOUT, PRECISION, TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    store_tile(dq_ptr, dq * softmax_scale, first_row, seq_q, stride_dqt, 1, HEAD_DIM, BLOCK_M, BLOCK_D)
