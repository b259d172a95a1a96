"""dk and dv: one program owns BLOCK_N keys and walks the queries of one head that see them.

With KEYS_FIRST a tile of scores is keys by queries, so that p and ds are the left operands of the next
products, straight from the registers they are computed in. Otherwise it is queries by keys, as in the other
kernels, and p and ds pass through shared memory. Dropout needs the latter: its mask's bits are laid out so.
"""

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
from kernels.portable.masks import NOT_SPECIALIZED, keys_of_queries, line_numbers, queries_of_keys
from kernels.portable.tile_io import anew, load_tile, store_tile


@triton.jit
def of_queries(x, KEYS_FIRST: tl.constexpr):
    """x, one number per query, with the axis of queries where the tile has it."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def add_product(total, tile, x, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """total plus the product of the tile, as keys by queries, with x, which has one row per query."""
    return tl.dot(tile if KEYS_FIRST else tl.trans(tile), x, total, input_precision=PRECISION)


@triton.jit
def add_queries(
    dk, dv, k, v,
    q_source, dout_source, lse_ptr, delta_ptr, row_of_head,
    span, entries_ptr, bits_ptr, first_query, end_query, seq_q, seq_k, window, bounds_ptr, key_bounds_ptr,
    stride_qt, stride_qd,
    stride_dot, stride_dod,
    scale_log2, seed, limit, keep_scale, batch, head, first_column,
    CUT: tl.constexpr, MASK: tl.constexpr, BLOCK_SIZE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, KEYS_FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the queries of the span to dk and dv: with CUT those in blocks that a mask or Tq cuts."""
    # the same sums, in the order that for each mask compiles without spills and is fastest:
    # docs/kernels.md
    HAS_ENDS: tl.constexpr = BLOCK_SIZE == 0 and BLOCK_D <= 64 and (MASK == "window" or MASK == "intervals")
    # dropout's words and two wide accumulators fill the registers: recompute the rest in each iteration
    TIGHT: tl.constexpr = DROPOUT and BLOCK_D == 128
    DELTA_LATE: tl.constexpr = TIGHT or BLOCK_D > 128
    DOUT_FIRST: tl.constexpr = KEYS_FIRST and (BLOCK_SIZE != 0 or HAS_ENDS)
    DV_FIRST: tl.constexpr = DOUT_FIRST or TIGHT
    # cut tiles are few: pipelining them would hide little, and would spill registers beside the pipeline of
    # the full tiles; not so with a window and HAS_ENDS
    IS_SHORT: tl.constexpr = CUT and (TIGHT or (KEYS_FIRST and not (HAS_ENDS and MASK == "window")))
    for i in tl.range(0, n_tiles(span, CUT, BLOCK_SIZE, BLOCK_M), num_stages=1 if IS_SHORT else None):
        m, bits = tile_at(i, span, entries_ptr, CUT, BLOCK_SIZE, BLOCK_M)
        rows = line_numbers(m, BLOCK_M) if KEYS_FIRST and BLOCK_SIZE != 0 else m + tl.arange(0, BLOCK_M)
        q = load_tile(
            q_source, batch, head, m, seq_q, stride_qt, stride_qd, TMA, HEAD_DIM, BLOCK_M, BLOCK_D, CUT
        )
        if DOUT_FIRST:
            dout = load_tile(
                dout_source, batch, head, m, seq_q, stride_dot, stride_dod, TMA, HEAD_DIM, BLOCK_M,
                BLOCK_D, CUT,
            )  # fmt: skip
        lse = tl.load(lse_ptr + (row_of_head + rows))
        if not DELTA_LATE:
            # before the scores, because dp starts from it and Triton does not load it an iteration ahead
            delta = tl.load(delta_ptr + (row_of_head + rows))
        if KEYS_FIRST:
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(scores * scale_log2 - of_queries(lse, KEYS_FIRST))
        if CUT:
            # compared by bounds of the tile's rows, because a thread holds few rows
            if KEYS_FIRST:
                if BLOCK_D > 64:
                    # computed again, because the registers cannot hold them; for narrower heads they can, and
                    # that is faster
                    columns = first_column + tl.arange(0, BLOCK_N)
                    first_query, end_query = queries_of_keys(columns, seq_q, seq_k, window, bounds_ptr, MASK)
                number = line_numbers(m, BLOCK_M)[None, :]
                visible = (number >= first_query[:, None]) & (number < end_query[:, None])
            else:
                columns = line_numbers(anew(first_column, m), BLOCK_N)[None, :]
                first_key, end_key = keys_of_queries(rows, seq_q, seq_k, window, key_bounds_ptr, MASK)
                visible = (columns >= first_key[:, None]) & (columns < end_key[:, None])
            if BLOCK_SIZE != 0:
                column = anew(first_column, m)
                if KEYS_FIRST:
                    visible &= visible_bits(bits_ptr, bits, column, m, BLOCK_SIZE, BLOCK_N, BLOCK_M)
                else:
                    visible &= visible_bits(bits_ptr, bits, m, column, BLOCK_SIZE, BLOCK_M, BLOCK_N)
            if IS_SHORT:
                # masking scores needs fewer registers than masking p, but is slower in a pipeline
                scores = tl.where(visible, scores, float("-inf"))
                p = tl.exp2(scores * scale_log2 - of_queries(lse, KEYS_FIRST))
            else:
                p = tl.where(visible, p, 0.0)
        if not DOUT_FIRST:
            dout = load_tile(
                dout_source, batch, head, m, seq_q, stride_dot, stride_dod, TMA, HEAD_DIM, BLOCK_M,
                BLOCK_D, CUT,
            )  # fmt: skip
        kept = p
        if DELTA_LATE:
            delta = tl.load(delta_ptr + (row_of_head + rows))
        if TIGHT:
            keep = keep_tile(
                anew(seed, m), limit, anew(batch, m), anew(head, m), m, anew(first_column, m),
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            # from here on the sign of a probability says whether dropout keeps it
            p = tl.where(keep, p, -p)
            kept = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if DV_FIRST:
            dv = add_product(dv, kept.to(dout.dtype), dout, KEYS_FIRST, PRECISION)
        if KEYS_FIRST:
            begin = tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M])
            dp = tl.dot(v, tl.trans(dout), begin, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        elif TIGHT:
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            dp = tl.where(p > 0.0, dp * keep_scale - delta[:, None], -delta[:, None])
            p = tl.abs(p)
        elif DROPOUT:
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            # beside the accumulators of wide heads there is no room to keep the words of the columns
            column = anew(first_column, m) if BLOCK_D > 128 else first_column
            keep = keep_tile(seed, limit, batch, head, m, column, BLOCK_M, BLOCK_N)
            kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0) - delta[:, None]
        else:
            begin = tl.broadcast_to(-delta[:, None], [BLOCK_M, BLOCK_N])
            dp = tl.dot(dout, tl.trans(v), begin, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if not DV_FIRST:
            dv = add_product(dv, kept.to(dout.dtype), dout, KEYS_FIRST, PRECISION)
        dk = add_product(dk, (p * dp).to(q.dtype), q, KEYS_FIRST, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dkdv_kernel(
    q_source, k_source, v_source, dout_source, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr, key_bounds_ptr,
    seed_ptr,
    spans_ptr, entries_ptr, bits_ptr,
    stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    stride_dob, stride_dot, stride_doh, stride_dod,
    stride_dkb, stride_dkt, stride_dkh,
    stride_sb, stride_sh,
    seq_q, seq_k, seq_padded, n_head, group_size, window, softmax_scale, scale_log2, limit, keep_scale,
    MASK: tl.constexpr, BLOCK_SIZE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, KEYS_FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles_of_head = tiles_of(seq_k, BLOCK_SIZE, BLOCK_N)
    program = tl.program_id(0) % tiles_of_head
    head_of_batch = tl.program_id(0) // tiles_of_head
    batch, head = (head_of_batch // n_head).to(tl.int64), (head_of_batch % n_head).to(tl.int64)
    kv_head = head // group_size
    if not TMA:
        q_source += batch * stride_qb + head * stride_qh
        dout_source += batch * stride_dob + head * stride_doh
        k_source += batch * stride_kb + kv_head * stride_kh
        v_source += batch * stride_vb + kv_head * stride_vh
    # longest first: under a causal mask the first keys are seen by the most queries
    first_column = program * BLOCK_N
    if BLOCK_SIZE != 0:
        spans_ptr += batch * stride_sb + head * stride_sh
        first_column = first_of_program(spans_ptr, program, BLOCK_SIZE, BLOCK_N)
    if MASK == "intervals":
        bounds_ptr += batch * 2 * seq_k
        key_bounds_ptr += batch * 2 * seq_q
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    columns = first_column + tl.arange(0, BLOCK_N)
    first_query, end_query = queries_of_keys(columns, seq_q, seq_k, window, bounds_ptr, MASK)
    first_a, end_a = queries_of_keys(first_column, seq_q, seq_k, window, bounds_ptr, MASK)
    first_b, end_b = queries_of_keys(first_column + BLOCK_N - 1, seq_q, seq_k, window, bounds_ptr, MASK)
    listed = load_list(spans_ptr, first_column, BLOCK_SIZE)
    span = find_span(first_a, end_a, first_b, end_b, listed, entries_ptr, MASK, BLOCK_SIZE, BLOCK_M)

    k = load_tile(
        k_source, batch, kv_head, first_column, seq_k, stride_kt, stride_kd, TMA, HEAD_DIM, BLOCK_N,
        BLOCK_D, True,
    )  # fmt: skip
    v = load_tile(
        v_source, batch, kv_head, first_column, seq_k, stride_vt, stride_vd, TMA, HEAD_DIM, BLOCK_N,
        BLOCK_D, True,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    row_of_head = head_of_batch.to(tl.int64) * seq_padded
    if DROPOUT and BLOCK_D > 64:
        # carry one 32-bit offset through the loop instead of two pointers; backward.py refuses larger ones
        row_of_head = row_of_head.to(tl.int32)
    else:
        lse_ptr, delta_ptr, row_of_head = lse_ptr + row_of_head, delta_ptr + row_of_head, 0
    for CUT in tl.static_range(2):
        dk, dv = add_queries(
            dk, dv, k, v,
            q_source, dout_source,
            lse_ptr, delta_ptr, row_of_head,
            span, entries_ptr, bits_ptr,
            first_query, end_query, seq_q, seq_k, window, bounds_ptr, key_bounds_ptr,
            stride_qt, stride_qd,
            stride_dot, stride_dod,
            scale_log2, seed, limit, keep_scale, batch, head,
            first_column, CUT, MASK, BLOCK_SIZE, DROPOUT, PRECISION, TMA, KEYS_FIRST,
            HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    dk_ptr += batch * stride_dkb + head * stride_dkh
    dv_ptr += batch * stride_dkb + head * stride_dkh
    store_tile(dk_ptr, dk * softmax_scale, first_column, seq_k, stride_dkt, 1, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv_ptr, dv * keep_scale, first_column, seq_k, stride_dkt, 1, HEAD_DIM, BLOCK_N, BLOCK_D)
