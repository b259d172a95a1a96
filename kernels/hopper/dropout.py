"""The dropout mask of kernels/dropout.py in the Hopper kernels: masks for pairs of a tile's probabilities.

A thread of a product holds all eight probabilities that a call of the cipher serves. Where scores are held
transposed, an instruction transposes what was drawn as if they were not.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels import dropout
from kernels.hopper.primitives import index_of, opaque, pack_pairs, record


@gluon.constexpr_function
def signed(word):
    """A word of 32 bits as the int32 of the same bits."""
    return word - 2**32 if word >= 2**31 else word


ROUNDS = gl.constexpr(dropout.ROUNDS)
FACTOR = gl.constexpr(signed(dropout.FACTOR))
KEYS = gl.constexpr(tuple(signed(dropout.KEY * i & dropout.WORD) for i in range(1, dropout.ROUNDS + 1)))
SPREAD_X = gl.constexpr(tuple(signed(factor) for factor in dropout.SPREAD_X))
SPREAD_Y = gl.constexpr(tuple(signed(factor) for factor in dropout.SPREAD_Y))
SIGNS = gl.constexpr(signed(0x80008000))


@record
class Dropout:
    """What a kernel is given of it. keep_scale: what a kept probability is multiplied by."""

    seed_ptr: gl.tensor  # (1,) int64
    limit: gl.tensor  # int32, twice the bfloat16 from which on a half means "drop"
    keep_scale: gl.tensor
    IS_ON: gl.constexpr

    @gluon.jit
    def begin(self, like, batch, head, row, column, TRANSPOSED: gl.constexpr = False):
        """What calls of the cipher begin with, for scores that lie as `like`: two words for each of its rows.

        Scores of queries from `row` by keys from `column`, or transposed.
        """
        LAYOUT: gl.constexpr = calls_layout(parts(like).type.layout)
        sixteenth = index_of(parts(like).shape[0], 0, 4, LAYOUT)
        row = row // 2 + index_of(8, 1, 4, LAYOUT)
        pair = column // 4 + index_of(4, 3, 4, LAYOUT)
        if TRANSPOSED:
            pair += sixteenth * 4
        else:
            row += sixteenth * 8
        seed = gl.load(self.seed_ptr)
        low, high = seed.to(gl.int32), (seed >> 32).to(gl.int32)
        x = low * SPREAD_X[4] + high * SPREAD_X[5] + batch * SPREAD_X[3] + head * SPREAD_X[2]
        y = low * SPREAD_Y[4] + high * SPREAD_Y[5] + batch * SPREAD_Y[3] + head * SPREAD_Y[2]
        return x + row * SPREAD_X[0] + pair * SPREAD_X[1], y + row * SPREAD_Y[0] + pair * SPREAD_Y[1]

    @gluon.jit
    def of_next_head(self, dropping):
        """What `begin` would give for the head behind."""
        if self.IS_ON:
            dropping = dropping[0] + SPREAD_X[2], dropping[1] + SPREAD_Y[2]
        return dropping

    @gluon.jit
    def draw(self, like, dropping, on, TRANSPOSED: gl.constexpr = False):
        """What `masks` takes for scores that lie as `like`: two words for each eight of them.

        on: how many columns of theirs (keys, or queries if they are transposed) behind what `begin` was told.
        """
        LAYOUT: gl.constexpr = parts(like).type.layout
        CALLS: gl.constexpr = calls_layout(LAYOUT)
        OF_SIXTEEN: gl.constexpr = 8 if TRANSPOSED else 4
        FACTOR_X: gl.constexpr = SPREAD_X[0 if TRANSPOSED else 1]
        FACTOR_Y: gl.constexpr = SPREAD_Y[0 if TRANSPOSED else 1]
        # opaque: else products of it are carried from step to step, each in a register
        on = opaque(on // 16 * OF_SIXTEEN)
        sixteenth = index_of(parts(like).shape[3], 2, 4, CALLS) * OF_SIXTEEN
        x = dropping[0] + on * FACTOR_X + sixteenth * FACTOR_X
        y = dropping[1] + on * FACTOR_Y + sixteenth * FACTOR_Y
        return cipher(x, y)

    @gluon.jit
    def masks(self, like, drawn, TRANSPOSED: gl.constexpr = False):
        """Masks (M, N // 2) int32 for scores (M, N) that lie as `like`: ones or zeros in the half of each."""
        LAYOUT: gl.constexpr = parts(like).type.layout
        x, y = drawn
        x, y = gl.expand_dims(gl.expand_dims(x, 1), 4), gl.expand_dims(gl.expand_dims(y, 1), 4)
        QUERY_EIGHTH: gl.constexpr = 4 if TRANSPOSED else 1
        words = gl.where(index_of(2, QUERY_EIGHTH, 6, LAYOUT) == 0, x, y).to(gl.uint32, bitcast=True)
        shift = (index_of(2, 5 - QUERY_EIGHTH, 6, LAYOUT) * 8).to(gl.uint32)
        words = ((words >> shift) | (words << ((32 - shift) & 31))).to(gl.int32, bitcast=True)
        limits = gl.full(words.shape, 0, gl.int32, words.type.layout) + self.limit
        ASM: gl.constexpr = masks_asm(TRANSPOSED)
        masks = gl.inline_asm_elementwise(
            ASM, "=r,r,r", [words, limits], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
        low, _ = halves(like)
        return gl.convert_layout(gl.reshape(masks, low.shape), low.type.layout)


@gluon.constexpr_function
def masks_asm(transposed):
    if transposed:
        return (
            "{.reg .b32 word; movmatrix.sync.aligned.m8n8.trans.b16 word, $1; "
            "set.ltu.u32.bf16x2 $0, word, $2;}"
        )
    return "set.ltu.u32.bf16x2 $0, $1, $2;"


@gluon.jit
def weights(tiles, p, masks):
    """Pairs of P (M, N // 2), 0 where dropout has it."""
    pairs = pack_pairs(p, tiles.q.dtype)
    if tiles.dropout.IS_ON:
        pairs &= masks
    return pairs


@gluon.jit
def mark(pairs, masks):
    """Pairs of P, negative where dropout has it: so a sign says what becomes of dP, and no register."""
    return pairs | (~masks & SIGNS)


@gluon.constexpr_function
def gradient_asm(of_marked, dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    if not of_marked:
        take_p = "setp.eq.bf16x2 low|high, $1, zero; mov.f32 p, $6; mov.f32 q, $7; "
    elif dtype == gl.bfloat16:
        take_p = (
            "setp.lt.bf16x2 low|high, $1, zero; shl.b32 p, $1, 16; abs.f32 p, p; and.b32 q, $1, 0x7fff0000; "
        )
    else:
        take_p = (
            "setp.lt.f16x2 low|high, $1, zero; and.b32 sizes, $1, 0x7fff7fff; mov.b32 {a, b}, sizes; "
            "cvt.f32.f16 p, a; cvt.f32.f16 q, b; "
        )
    # by predicates: choosing a factor would take as many instructions, of half the speed
    return (
        "{.reg .pred low, high; .reg .b16 a, b; .reg .b32 zero, sizes; .reg .f32 p, q, x, y; "
        + "mov.b32 zero, 0; " + take_p + "mul.f32 x, p, $4; mul.f32 y, q, $5; "
        + "@!low fma.rn.f32 x, p, $2, x; @!high fma.rn.f32 y, q, $3, y; cvt.rn." + kind + ".f32 $0, y, x;}"
    )  # fmt: skip


@gluon.jit
def gradient(p, dp, minus_delta, masks, dtype: gl.constexpr):
    """Pairs of dS = P (dP - delta), rounded, or of -P delta where masks have it dropped."""
    ASM: gl.constexpr = gradient_asm(False, dtype)
    p_low, p_high = halves(p)
    dp_low, dp_high = halves(dp)
    delta_low, delta_high = halves(minus_delta)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,f,f,f,f,f,f", [masks, dp_low, dp_high, delta_low, delta_high, p_low, p_high],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def gradient_of_marked(pairs, dp, minus_delta, dtype: gl.constexpr):
    """The same, of P in 16 bits and by its signs, which `mark` gave: pair by pair it takes few registers."""
    ASM: gl.constexpr = gradient_asm(True, dtype)
    dp_low, dp_high = halves(dp)
    delta_low, delta_high = halves(minus_delta)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,f,f,f,f", [pairs, dp_low, dp_high, delta_low, delta_high],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def halves(x):
    """The even and the odd columns of x."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def parts(x):
    """Pairs of columns of x, taken apart. Row: 16, 8, 1; pair: 8, 4, 1."""
    low, _ = halves(x)
    return gl.reshape(low, [x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 4])


@gluon.constexpr_function
def calls_layout(layout):
    """Of the calls for what `parts` gave: one for both eighths of a sixteenth of rows, and of columns."""
    return gl.SliceLayout(1, gl.SliceLayout(4, layout))


@gluon.jit
def multiply(x, FACTOR: gl.constexpr):
    """High and low word of the product of words."""
    factor = gl.full(x.shape, FACTOR, gl.int32, x.type.layout)
    return gl.inline_asm_elementwise(
        "{.reg .u64 t; mul.wide.u32 t, $2, $3; mov.b64 {$1, $0}, t;}", "=r,=r,r,r", [x, factor],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cipher(x, y):
    """As kernels/dropout.py's, of its sums."""
    for i in gl.static_range(ROUNDS):
        high, low = multiply(x, FACTOR)
        x, y = high ^ y ^ KEYS[i], low
    return x, y
