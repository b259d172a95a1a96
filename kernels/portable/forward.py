"""Forward pass: out = softmax(q k^T * softmax_scale) v and lse, in one sweep over the keys.

One program owns BLOCK_M queries of one head and walks the keys they see, BLOCK_N at a time: blocks that the
mask cuts, then wholly visible ones, then cut ones again, all by the same loop body. It keeps, for each query,
the reference m of the exponent, the sum l of the probabilities and the unnormalised output, all in float32:

    s = q k^T * softmax_scale * log2(e)    m' = max(m, max_j s_j + shift)    p = 2^(s - m')
    l = l 2^(m - m') + sum_j p_j           acc = acc 2^(m - m') + p v
    out = acc / l                          lse = (m + log2 l) ln 2

`shift` differs from row to row, and cancels in exact arithmetic. In 16 bits it keeps the largest p of a row
from being exactly 1. Otherwise, where several keys tie for the maximum, p v would be a plain sum of rounded
values, whose own rounding is biased the same way in every such row (Qiu and Yao, arXiv:2510.04212, who shift
the maximum of tied rows alone). With the shift the largest p is slightly above or below 3/4, and is rounded
to 3/4 for p v. Where one key outweighs all others, this error would scale the whole row: there l is corrected
by the same amount.

Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.layouts import bulk_readable
from kernels.portable.block_lists import (
    find_span,
    first_of_program,
    load_list,
    n_programs,
    n_tiles,
    tile_at,
    tiles_of,
    visible_bits,
)
from kernels.portable.dropout import keep_tile
from kernels.portable.masks import NOT_SPECIALIZED, keys_of_queries
from kernels.portable.tile_io import (
    head_descriptor,
    in_reach,
    in_registers,
    load_tile,
    store_tile,
)
from kernels.problem import Problem, dot_precision, list_strides
from kernels.tiles import choose_tile, padded_head_dim

LN2 = tl.constexpr(0.6931471805599453)
# a finite maximum for rows that have seen nothing: exp2(-inf - finite) is 0, where -inf - (-inf) would be nan
LOWEST = tl.constexpr(-3.0e38)
# the fractional parts of its multiples fill [0, 1) evenly, whichever rows are looked at
GOLDEN_RATIO = tl.constexpr(0.6180339887498949)
# what the largest probability of each row is rounded to in 16 bits
PEAK = tl.constexpr(0.75)


@triton.jit
def peak_of(rows, dtype: tl.constexpr):
    """(BLOCK_M,): the largest probability of each row, within 0.45 units in the last place of PEAK."""
    unit: tl.constexpr = 2.0**-8 if dtype == tl.bfloat16 else 2.0**-11
    multiple = rows * GOLDEN_RATIO
    return (multiple - tl.floor(multiple) - 0.5) * (0.9 * unit) + PEAK


@triton.jit
def attend_blocks(
    acc, l_i, m_i, q,
    k_source, v_source,
    span, entries_ptr, bits_ptr, shift, first_key, end_key, seq_k,
    stride_kt, stride_kd,
    stride_vt, stride_vd,
    scale_log2, seed, limit, batch, head, kv_head, first_row,
    CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attends to the keys of the span: with CUT those of blocks that a mask or the last key cuts."""
    for i in tl.range(0, n_tiles(span, CUT, BLOCK_SIZE, BLOCK_N)):
        n, bits = tile_at(i, span, entries_ptr, CUT, BLOCK_SIZE, BLOCK_N)
        k = load_tile(
            k_source, batch, kv_head, n, seq_k, stride_kt, stride_kd, TMA, HEAD_DIM, BLOCK_N, BLOCK_D, CUT
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if CUT:
            columns = n + tl.arange(0, BLOCK_N)[None, :]
            visible = (columns >= first_key[:, None]) & (columns < end_key[:, None])
            if BLOCK_SIZE != 0:
                visible &= visible_bits(bits_ptr, bits, first_row, n, BLOCK_SIZE, BLOCK_M, BLOCK_N)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_log2 + shift)
        p = tl.exp2(scores * scale_log2 - m_new[:, None])  # (BLOCK_M, BLOCK_N)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        if DROPOUT:
            keep = keep_tile(seed, limit, batch, head, first_row, n, BLOCK_M, BLOCK_N)
            p = tl.where(keep, p, 0.0)
        acc = acc * alpha[:, None]
        v = load_tile(
            v_source, batch, kv_head, n, seq_k, stride_vt, stride_vd, TMA, HEAD_DIM, BLOCK_N, BLOCK_D, CUT
        )
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q_source, k_source, v_source, out_ptr, lse_ptr, bounds_ptr, seed_ptr, spans_ptr, entries_ptr, bits_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    stride_ob, stride_ot, stride_oh,
    stride_sb, stride_sh,
    seq_q, seq_k, n_head, group_size, window, scale_log2, limit, keep_scale,
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
        k_source += batch * stride_kb + kv_head * stride_kh
        v_source += batch * stride_vb + kv_head * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    # longest first fills the GPU best: under a causal mask the last queries see the most keys
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
    # after the loads above, which arrive while the program waits for q
    q = load_tile(
        q_source, batch, head, first_row, seq_q, stride_qt, stride_qd, TMA, HEAD_DIM, BLOCK_M, BLOCK_D, True
    )
    if HELD:
        q = in_registers(q, first_row, seq_q, BLOCK_M)
    span = find_span(first_a, end_a, first_b, end_b, listed, entries_ptr, MASK, BLOCK_SIZE, BLOCK_N)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if q.dtype != tl.float32:
        shift = -tl.log2(peak_of(rows, q.dtype))
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for CUT in tl.static_range(2):
        acc, l_i, m_i = attend_blocks(
            acc, l_i, m_i, q,
            k_source, v_source,
            span, entries_ptr, bits_ptr,
            shift, first_key, end_key, seq_k,
            stride_kt, stride_kd,
            stride_vt, stride_vd,
            scale_log2, seed, limit, batch, head, kv_head, first_row, CUT,
            BLOCK_SIZE, DROPOUT, PRECISION, TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    # a row that sees nothing: out 0 and lse -inf
    sees_nothing = l_i == 0.0
    l_safe = tl.where(sees_nothing, 1.0, l_i)
    total = l_safe
    if q.dtype != tl.float32:
        # a sum below two peaks: one key outweighs all others
        peak = peak_of(rows, q.dtype)
        total = tl.where(l_safe < 1.9 * peak, l_safe - (peak - PEAK), l_safe)
    acc = acc * (keep_scale / total)[:, None]
    store_tile(out_ptr, acc, first_row, seq_q, stride_ot, 1, HEAD_DIM, BLOCK_M, BLOCK_D)
    lse = tl.where(sees_nothing, float("-inf"), (m_i + tl.log2(l_safe)) * LN2)
    tl.store(lse_ptr + head_of_batch.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


def attention_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Tq, H, D) in q's dtype and lse (B, H, Tq) float32, natural log."""
    q, k, v = map(in_reach, (q, k, v))
    batch, seq_q, n_head, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_head, seq_q, dtype=torch.float32, device=q.device)
    tile = choose_tile("forward", head_dim, q.dtype, q.device, problem.tile_variant, problem.block_size)
    sources = q, k, v
    if tile.tma:
        q, k, v = map(bulk_readable, (q, k, v))
        rows, block_d = (tile.block_m, tile.block_n, tile.block_n), padded_head_dim(head_dim)
        sources = (head_descriptor(x, n, block_d) for x, n in zip((q, k, v), rows, strict=True))
    launch(
        forward_kernel,
        (n_programs(seq_q, problem.block_size, tile.block_m) * batch * n_head,),
        *sources, out, lse, problem.key_bounds, problem.dropout_seed, *problem.row_lists,
        *q.stride(), *k.stride(), *v.stride(), *out.stride()[:3], *list_strides(problem.row_lists),
        seq_q, k.shape[1], n_head, n_head // k.shape[2], problem.window or 0,
        problem.softmax_scale * math.log2(math.e), problem.dropout_limit, problem.keep_scale,
        MASK=problem.mask, BLOCK_SIZE=problem.block_size, DROPOUT=problem.dropout_p > 0.0,
        PRECISION=dot_precision(q), TMA=tile.tma, HELD=tile.held,
        HEAD_DIM=head_dim, BLOCK_D=padded_head_dim(head_dim), **tile.options(),
    )  # fmt: skip
    return out, lse
