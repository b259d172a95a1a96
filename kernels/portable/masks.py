"""Which keys a query sees, as intervals: [first, end) of columns for a row, and of rows for a column.

MASK is one of
    "full"       every key
    "causal"     keys up to the query's own position; the last query stands at the last key
    "window"     of these, the last `window`
    "intervals"  bounds from memory, see kernels/intervals.py
No bound ever decreases from one line to the next, so the first and the last line of a tile bound all of it.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of_queries(rows, seq_q, seq_k, window, bounds_ptr, MASK: tl.constexpr):
    """[first, end) of the keys that each query sees; rows may be one number. bounds_ptr: (2, Tq)."""
    rows = tl.minimum(rows, seq_q - 1)
    if MASK == "intervals":
        first = tl.load(bounds_ptr + rows)
        end = tl.load(bounds_ptr + seq_q + rows)
    else:
        first = rows * 0
        end = first + seq_k
        if MASK != "full":
            end = tl.maximum(rows + (seq_k - seq_q) + 1, 0)
        if MASK == "window":
            first = tl.maximum(end - window, 0)
    return first, end


@triton.jit
def queries_of_keys(columns, seq_q, seq_k, window, bounds_ptr, MASK: tl.constexpr):
    """[first, end) of the queries that see each key; columns may be one number. bounds_ptr: (2, Tk)."""
    columns = tl.minimum(columns, seq_k - 1)
    if MASK == "intervals":
        first = tl.load(bounds_ptr + columns)
        end = tl.load(bounds_ptr + seq_k + columns)
    else:
        first = columns * 0
        end = first + seq_q
        if MASK != "full":
            diagonal = columns - (seq_k - seq_q)
            first = tl.maximum(diagonal, 0)
        if MASK == "window":
            end = tl.maximum(tl.minimum(diagonal + window, seq_q), 0)
    return first, end


@triton.jit
def split_range(first_of_first, end_of_first, first_of_last, end_of_last, BLOCK: tl.constexpr):
    """Where a loop over blocks starts, where its wholly visible blocks start and end, and where it ends."""
    start = first_of_first // BLOCK * BLOCK
    full_start = tl.cdiv(first_of_last, BLOCK) * BLOCK
    full_end = end_of_first // BLOCK * BLOCK
    # no wholly visible block: all of them are left to the loop that follows
    any_full = full_end > full_start
    full_start = tl.where(any_full, full_start, start)
    full_end = tl.where(any_full, full_end, start)
    return start, full_start, full_end, end_of_last
