"""Which keys a query sees, as intervals: [first, end) of columns for a row, and of rows for a column.

MASK is one of
    "full"       every key
    "causal"     keys up to the query's own position; the last query is at the last key
    "window"     of these, the last `window`
    "intervals"  bounds from memory, see kernels/intervals.py
A line is a row or a column. No bound decreases from one line to the next, so the first and the last line of a
tile bound all of it.
"""

import triton
import triton.language as tl

# arguments that change with length or mask: Triton would compile one kernel for multiples of 16 and another
# for all other values
NOT_SPECIALIZED = ["stride_sb", "stride_sh", "seq_q", "seq_k", "seq_padded", "window", "limit"]


@triton.jit
def line_numbers(first, LINES: tl.constexpr):
    """first + tl.arange(0, LINES), for the columns of a product: one number per thread plus constants.

    With tl.arange the compiler would compute all of them before a loop, and hold each in a register.
    """
    own = first + 2 * tl.arange(0, 4)[None, :, None]
    constant = 8 * tl.arange(0, LINES // 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    return tl.reshape(own + constant, (LINES,))


@triton.jit
def keys_of_queries(rows, seq_q, seq_k, window, bounds_ptr, MASK: tl.constexpr):
    """[first, end) of the keys that each query sees; rows may be one number. bounds_ptr: (2, Tq)."""
    rows = tl.minimum(rows, seq_q - 1)
    if MASK == "intervals":
        first = tl.load(bounds_ptr + rows)
        end = tl.load(bounds_ptr + (seq_q + rows))
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
        end = tl.load(bounds_ptr + (seq_k + columns))
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
def split_blocks(first_of_first, end_of_first, first_of_last, end_of_last, BLOCK: tl.constexpr):
    """The blocks that a tile meets, [start, end), and the wholly visible ones, [full_start, full_end)."""
    start, end = first_of_first // BLOCK, tl.cdiv(end_of_last, BLOCK)
    full_start = tl.minimum(tl.cdiv(first_of_last, BLOCK), end)
    full_end = tl.maximum(end_of_first // BLOCK, full_start)
    return start, full_start, full_end, end


@triton.jit
def n_blocks(start, full_start, full_end, end, CUT: tl.constexpr):
    """How many blocks the mask cuts, before and after the wholly visible ones; or how many it does not."""
    n_full = full_end - full_start
    return end - start - n_full if CUT else n_full


@triton.jit
def block_at(i, start, full_start, full_end, CUT: tl.constexpr):
    """The i-th of the blocks that `n_blocks` counts."""
    if CUT:
        block = start + i
        block += tl.where(block >= full_start, full_end - full_start, 0)
    else:
        block = full_start + i
    return block
