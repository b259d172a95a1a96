"""What a warpgroup does with a block of scores between two products: mask, maximum, exponentials, sums."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.primitives import opaque

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
    add_excess. And where a row's sum becomes too large, its tile is computed anew: overflow.py.
    """
    p = gl.exp2(s * scale_log2 - gl.expand_dims(m_i, 1))
    return p, partial_sum(p)


@gluon.constexpr_function
def least_excess(lowered):
    """The sums of a block that count, beside peaks of 3/4."""
    return 512.0 * 2.0**-LOWERED_BY.value if lowered else 512.0


@gluon.constexpr_function
def compare(l_i, sums, least, more=""):
    """Whether sums exceed `least` and four times those before; l: with them."""
    return f"fma.rn.f32 x, {l_i}, -0.8, {sums}; setp.gt{more}.f32 outweighs, x, {0.2 * least}"


@gluon.constexpr_function
def outweighing_asm(least):
    """Two rows of a thread: l and sums; the same result for both."""
    text = "{.reg .pred outweighs; .reg .f32 x; " + compare("$2", "$4", least) + "; "
    text += compare("$3", "$5", least, ".or") + ", outweighs; "
    text += "vote.sync.any.pred outweighs, outweighs, 0xffffffff; "
    # the assembler keeps the predicate
    return text + "selp.b32 $0, 1, 0, outweighs; mov.b32 $1, $0; }"


@gluon.jit
def outweighing(l_i, sums, LOWERED: gl.constexpr):
    """(ROWS, 4) int32: 1 where a thread of the warp holds sums of a block that outweigh those before, else 0.

    l: with `sums`. Few blocks have such sums, and none that raised the maximum.
    """
    ASM: gl.constexpr = outweighing_asm(least_excess(LOWERED))
    return gl.inline_asm_elementwise(ASM, "=r,=r,f,f,f,f", [l_i, sums], dtype=gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def excess_asm(n_pairs, least, drops):
    """Two rows of a thread: their excess, l, sums and what outweighing says, then their pairs of P.

    A product with quarters adds up the pairs of a row's four threads, in few instructions.
    """
    text = "{.reg .pred outweighs; .reg .f32 x, y, a, b, c, d; .reg .b32 quarters, lane, some; "
    # a branch of whole warps: around one of single threads the compiler spills
    text += "setp.ne.b32 outweighs, $8, 0; @!outweighs bra.uni DONE; "
    text += "mov.b32 quarters, 0x3e803e80; mov.f32 a, 0.0; mov.f32 b, a; mov.f32 c, a; mov.f32 d, a; "
    for i in range(0, n_pairs, 2):
        pairs = ", ".join(f"${10 + 2 * i + j}" for j in range(4))
        text += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {a, b, c, d}, {" + pairs + "}, "
        text += "{quarters, quarters}, {a, b, c, d}; "
    text += "mov.u32 lane, %laneid; and.b32 lane, lane, 28; "
    for row, more in enumerate("ac"):
        l_i, sums = f"${4 + row}", f"${6 + row}"
        text += compare(l_i, sums, least) + "; "
        # all threads of a row count it, if one of them does
        text += "vote.sync.ballot.b32 some, outweighs, 0xffffffff; shr.b32 some, some, lane; "
        text += f"and.b32 some, some, 15; setp.ne.b32 outweighs, some, 0; sub.f32 {more}, {more}, {sums}; "
        if drops:
            text += no_more_than_a_rounding(more, sums)
        text += f"@outweighs add.f32 ${row}, ${row}, {more}; "
    return text + "DONE: }"


@gluon.constexpr_function
def no_more_than_a_rounding(more, sums):
    """Where `more` is further from 0 in its row, a key that outweighs others was dropped."""
    text = f"fma.rn.f32 x, {sums}, 0.00398, {more}; fma.rn.f32 y, {sums}, -0.00398, {more}; "
    for distance in (1, 2):
        for x in "xy":
            text += f"shfl.sync.bfly.b32 b, {x}, {distance}, 31, 0xffffffff; add.f32 {x}, {x}, b; "
    for than, x in (("gt", "x"), ("lt", "y")):
        text += f"setp.{than}.and.f32 outweighs, {x}, 0.0, outweighs; "
    return text


@gluon.jit
def add_excess(excess, pairs, l_i, sums, some, LOWERED: gl.constexpr, DROPS: gl.constexpr):
    """excess (ROWS, 4) and how much more than `sums` the rounded P of a block, (ROWS, N) pairs, come to.

    some: what outweighing(l, sums) gave; most steps branch past the rest. Where other keys weigh more, out is
    rounded as much.
    """
    N_PAIRS: gl.constexpr = pairs.shape[1] // 4
    LAYOUT: gl.constexpr = sums.type.layout
    columns = apart(gl.reshape(pairs, [pairs.shape[0], N_PAIRS, 4]), N_PAIRS, LAYOUT)
    ASM: gl.constexpr = excess_asm(N_PAIRS, least_excess(LOWERED), DROPS)
    CONSTRAINTS: gl.constexpr = "=f,=f,0,1,f,f,f,f,r,r" + ",r,r" * N_PAIRS
    operands = (excess, l_i, sums, some) + columns  # noqa: RUF005 - Gluon has no starred expressions
    # not pure: the compiler would move it behind the wait for the products beside which it should run
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def apart(x, N: gl.constexpr, layout: gl.constexpr):
    """The N tensors (M, K) of x (M, N, K), N a power of two."""
    if N == 1:
        parts = (gl.convert_layout(gl.reshape(x, [x.shape[0], x.shape[2]]), layout),)
    else:
        halves = gl.permute(gl.reshape(x, [x.shape[0], 2, N // 2, x.shape[2]]), (0, 2, 3, 1))
        first, second = gl.split(halves)
        parts = apart(first, N // 2, layout) + apart(second, N // 2, layout)
    return parts


@gluon.jit
def rescale(x, factor):
    """x (ROWS, N), each row times its factor (ROWS,)."""
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)
