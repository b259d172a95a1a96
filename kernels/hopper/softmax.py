"""What a warpgroup does with a block of scores between two products: mask, maximum, exponentials, sums."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.primitives import larger_pairs, opaque, pack_pairs

# a finite maximum for rows that have seen nothing: exp2(-inf - finite) is 0, where -inf - (-inf) would be nan
LOWEST = gl.constexpr(-1.0e30)


# multiples of the golden ratio fill [0, 1) evenly, whichever rows are looked at
GOLDEN_RATIO = gl.constexpr(0.6180339887498949)
# what the largest probability of each row is rounded to
PEAK = gl.constexpr(0.75)
# the power of two by which dropout lowers probabilities further, see dropout.is_lowered
LOWERED_BY = gl.constexpr(7.0)


@gluon.jit
def peak_of(rows, dtype: gl.constexpr):
    """(ROWS,): each row's largest probability, close to PEAK; portable/forward.py says why."""
    unit: gl.constexpr = 2.0**-8 if dtype == gl.bfloat16 else 2.0**-11
    multiple = rows * GOLDEN_RATIO
    return (multiple - gl.floor(multiple) - 0.5) * (0.9 * unit) + PEAK


@gluon.jit
def shift_of(rows, dtype: gl.constexpr, LOWERED: gl.constexpr):
    """(ROWS,): how much each row's maximum is raised."""
    shift = -gl.log2(peak_of(rows, dtype))
    return shift + LOWERED_BY if LOWERED else shift


@gluon.jit
def rounded_sum(l_i, rows, dtype: gl.constexpr):
    """(ROWS,): l, with its peak as rounded where l is below two peaks: there one key outweighs all others."""
    peak = peak_of(rows, dtype)
    return gl.where(l_i < 1.9 * peak, l_i - (peak - PEAK), l_i)


@gluon.jit
def hide(x, first, end, block, hidden, KIND: gl.constexpr):
    """x (ROWS, N) of key block `block`, but `hidden` outside each row's interval [first, end) of keys."""
    columns = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout)), 0)
    # a thread holds two of every eight columns: the compiler knows the multiple of eight, so only the rest
    # takes registers; a plain comparison would keep every column number of the thread in one
    eight = columns & -8
    rest = columns & 7
    visible = eight < gl.expand_dims(opaque(end - block * x.shape[1]), 1) - rest
    if KIND == "window" or KIND == "intervals":
        visible = visible & (eight >= gl.expand_dims(opaque(first - block * x.shape[1]), 1) - rest)
    return gl.where(visible, x, hidden)


@gluon.jit
def row_maximum(s):
    """(ROWS,): the maximum of each row, of pairs first: one chain over all columns would stall on itself."""
    low, high = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    return gl.convert_layout(gl.max(gl.maximum(low, high), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def partial_sum(p):
    """(ROWS, 4): four sums for each row, each of the columns that one thread holds."""
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    return gl.sum(gl.reshape(low + high, [p.shape[0], p.shape[1] // 8, 4]), 1)


@gluon.jit
def raise_maximum(s, m_i, scale_log2, shift):
    """Online softmax in base 2: the maximum with this block, and the factor for what was summed before."""
    m_new = gl.maximum(m_i, row_maximum(s) * scale_log2 + shift)
    return m_new, gl.exp2(m_i - m_new)


@gluon.jit
def probabilities(s, m_i, scale_log2):
    """P and its sums, whichever blocks m_i is the maximum of, if the row has seen a key in them.

    The sums, (ROWS, 4), are added up only in `store`, because that takes an exchange between threads. P above
    1 is no problem for a bfloat16, which has the range of a float32. But it is rounded, where a peak is not:
    as_rounded. And where a row's sum becomes too large, its tile is computed anew: overflow.py.
    """
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m_i, 1))
    return p, partial_sum(p)


@gluon.constexpr_function
def holds_block_sums(tiles):
    """Whether a thread holds the largest sum of a block, too: it has the registers where a tile owns most."""
    return tiles.HEAD_DIM > 64 or (tiles.CONSUMERS == 2 and tiles.BLOCK_N == 128)


@gluon.jit
def with_largest(tiles, largest, p, sums):
    """largest, with the P and sums of another block.

    It is of each thread, (ROWS, 4): the largest P as rounded to bfloat16, a pair of even and odd columns, and
    the largest sum of a block, see holds_block_sums.
    """
    pairs = pack_pairs(p, gl.bfloat16)
    pairs = gl.reshape(pairs, [pairs.shape[0], pairs.shape[1] // 4, 4])
    pairs = gl.convert_layout(gl.reduce(pairs, 1, larger_pairs), sums.type.layout)
    block_sum = largest[1]
    if holds_block_sums(tiles):
        block_sum = gl.maximum(block_sum, sums)
    return larger_pairs(largest[0], pairs), block_sum


@gluon.jit
def as_rounded(tiles, l_i, largest):
    """The sums l (ROWS, 4) with the largest P of each thread as rounded for its product, where it matters.

    If one P outweighs all others of its block, that block's sum is the same number before it was rounded; so
    is l, if it outweighs those of all blocks. rounded_sum sees to the peaks of blocks that raise the maximum.
    """
    block_sum = l_i
    if holds_block_sums(tiles):
        block_sum = largest[1]
    low = (largest[0] << 16).to(gl.float32, bitcast=True)
    high = (largest[0] & -65536).to(gl.float32, bitcast=True)
    difference = gl.maximum(low, high) - block_sum
    rounds = gl.maximum(difference, -difference) <= block_sum * (1.02 * 2.0**-8)
    return gl.where(rounds, l_i + difference, l_i)


@gluon.jit
def rescale(x, factor):
    """x (ROWS, N), each row times its factor (ROWS,)."""
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)
