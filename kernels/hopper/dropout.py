"""The dropout mask of kernels/dropout.py in the Hopper kernels: halves of words for pairs of probabilities.

A thread of a product holds all eight probabilities that a draw serves. A warpgroup keeps the words of its own
rows (or pairs of columns) throughout a tile. Those of a block that streams past are computed by the warp that
copies the block, and stored beside it. Where scores are held transposed, words are drawn as if they were not,
and an instruction transposes them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels import dropout
from kernels.hopper.primitives import (
    announce,
    announced,
    index_of,
    make_numbers,
    opaque,
    pack_pairs,
    record,
    thread_barrier,
)


@gluon.constexpr_function
def signed(word):
    """A word of 32 bits as the int32 of the same bits."""
    return word - 2**32 if word >= 2**31 else word


ROUNDS = gl.constexpr(dropout.ROUNDS)
FACTOR = gl.constexpr(signed(dropout.FACTOR))
KEYS = gl.constexpr(tuple(signed(dropout.KEY * i & dropout.WORD) for i in range(1, dropout.ROUNDS + 1)))
SPREAD_X = gl.constexpr(tuple(signed(factor) for factor in dropout.SPREAD_X))
SPREAD_Y = gl.constexpr(tuple(signed(factor) for factor in dropout.SPREAD_Y))
SPREAD_PAIR = gl.constexpr(tuple(signed(factor) for factor in dropout.SPREAD_PAIR))
SIGNS = gl.constexpr(signed(0x80008000))
# rows in eight rows, and pairs in eight columns
ROWS_OF_EIGHT = gl.constexpr(8)
PAIRS_OF_EIGHT = gl.constexpr(4)


@record
class Dropout:
    """The dropout arguments of a kernel. keep_scale: what a kept probability is multiplied by."""

    seed: gl.shared_memory_descriptor  # (2, 1) int32, the seed's terms in the sums that start a row's word
    limit: gl.tensor  # int32, two copies of the bfloat16 from which on a half means "drop"
    line: gl.tensor  # int32, the two numbers of kernels/dropout.py's line_bits
    keep_scale: gl.tensor
    words: gl.shared_memory_descriptor  # (buffers, rows or pairs of eight, sixteenths) int32, see make_words
    IS_ON: gl.constexpr

    @gluon.jit
    def row_word(self, batch, head, row, WARPS: gl.constexpr):
        """The word of a row, numbered among those that share a draw with the row eight further on."""
        # read from shared memory for each tile: it would take two registers throughout
        x, y = announced(self.seed.index(0), WARPS), announced(self.seed.index(1), WARPS)
        x += head * SPREAD_X[1] + batch * SPREAD_X[2] + row * SPREAD_X[0]
        y += head * SPREAD_Y[1] + batch * SPREAD_Y[2] + row * SPREAD_Y[0]
        for i in gl.static_range(ROUNDS):
            x, y = one_round(x, y ^ KEYS[i])
        return x | 1

    @gluon.jit
    def leave_rows(self, buffer, batch, head, row):
        """Stores the words of a block of queries from `row` on, before its barrier is armed."""
        line, sixteenth = places_in(self.words)
        words = self.row_word(batch, head, row // 2 + sixteenth * ROWS_OF_EIGHT + line, 1)
        self.words.index(buffer).store(words)
        thread_barrier()

    @gluon.jit
    def leave_pairs(self, buffer, column):
        """The same for the keys from `column` on."""
        line, sixteenth = places_in(self.words)
        words = pair_word(column // 4 + sixteenth * PAIRS_OF_EIGHT + line)
        # opaque: otherwise part of the address is computed at kernel start, and spilled
        self.words.index(opaque(buffer)).store(words)
        thread_barrier()

    @gluon.jit
    def rows_of(self, like, batch, head, row):
        """The words of queries from `row` on, for scores in the layout of `like`."""
        LAYOUT: gl.constexpr = draws_layout(parts(like).type.layout)
        sixteenth = index_of(parts(like).shape[0], 0, 4, LAYOUT)
        row = row // 2 + sixteenth * ROWS_OF_EIGHT + index_of(ROWS_OF_EIGHT, 1, 4, LAYOUT)
        return self.row_word(batch, head, row, 4)

    @gluon.jit
    def pairs_of(self, like, column):
        """The words of keys from `column` on, for transposed scores in the layout of `like`."""
        LAYOUT: gl.constexpr = draws_layout(parts(like).type.layout)
        sixteenth = index_of(parts(like).shape[0], 0, 4, LAYOUT)
        return pair_word(column // 4 + sixteenth * PAIRS_OF_EIGHT + index_of(PAIRS_OF_EIGHT, 3, 4, LAYOUT))

    @gluon.jit
    def read(self, like, buffer, TRANSPOSED: gl.constexpr = False):
        """The words stored beside a block, for scores in the layout of `like`."""
        LAYOUT: gl.constexpr = draws_layout(parts(like).type.layout)
        words = self.words.index(buffer)
        if TRANSPOSED:
            words = words.load(gl.SliceLayout(0, gl.SliceLayout(3, LAYOUT)))
            words = gl.expand_dims(gl.expand_dims(words, 0), 3)
        else:
            words = words.permute((1, 0)).load(gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
            words = gl.expand_dims(gl.expand_dims(words, 0), 1)
        return words

    @gluon.jit
    def halves_for(self, like, drawn, TRANSPOSED: gl.constexpr = False):
        """(M, N // 2) int32: the halves of words for pairs of scores (M, N) in the layout of `like`."""
        LAYOUT: gl.constexpr = parts(like).type.layout
        x, y = drawn
        if TRANSPOSED:
            x, y = transpose(x), transpose(y)
        x, y = gl.expand_dims(gl.expand_dims(x, 1), 4), gl.expand_dims(gl.expand_dims(y, 1), 4)
        QUERY_EIGHTH: gl.constexpr = 4 if TRANSPOSED else 1
        words = gl.where(index_of(2, QUERY_EIGHTH, 6, LAYOUT) == 0, x, y)
        words = gl.where(index_of(2, 5 - QUERY_EIGHTH, 6, LAYOUT) == 0, words, exchange_bytes(words))
        low, _ = halves(like)
        return gl.convert_layout(gl.reshape(words, low.shape), low.type.layout)

    @gluon.jit
    def masks(self, like, drawn, TRANSPOSED: gl.constexpr = False):
        """All bits set where a half means "keep", none where it means "drop"."""
        words = self.halves_for(like, drawn, TRANSPOSED)
        limits = gl.full(words.shape, 0, gl.int32, words.type.layout) + self.limit
        return gl.inline_asm_elementwise(
            "set.ltu.u32.bf16x2 $0, $1, $2;", "=r,r,r", [words, limits], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def make_dropout(seed_ptr, limit, line, keep_scale, words, IS_ON: gl.constexpr):
    """The Dropout of a kernel's arguments; seed_ptr: (1,) int64."""
    seed = make_numbers(2 if IS_ON else 1)
    if IS_ON:
        whole = gl.load(seed_ptr)
        low, high = whole.to(gl.int32), (whole >> 32).to(gl.int32)
        announce(seed.index(0), low * SPREAD_X[3] + high * SPREAD_X[4], 4)
        announce(seed.index(1), low * SPREAD_Y[3] + high * SPREAD_Y[4], 4)
    return Dropout(seed, limit, line, keep_scale, words, IS_ON)


@gluon.jit
def make_words(IS_ON: gl.constexpr, BUFFERS: gl.constexpr, OF_EIGHT: gl.constexpr, N: gl.constexpr):
    """Shared memory for the words of BUFFERS blocks of N queries or keys, OF_EIGHT for each sixteen."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SHAPE: gl.constexpr = [BUFFERS, OF_EIGHT, N // 16] if IS_ON else [1, 1, 1]
    return gl.allocate_shared_memory(gl.int32, SHAPE, LAYOUT)


@gluon.jit
def places_in(words):
    """The line in its eight, and the sixteenth, of each word of a buffer, one word per thread of a warp."""
    OF_EIGHT: gl.constexpr = words.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [OF_EIGHT, 32 // OF_EIGHT], [1, 1], [1, 0])
    line = gl.arange(0, OF_EIGHT, layout=gl.SliceLayout(1, LAYOUT))
    sixteenth = gl.arange(0, words.shape[2], layout=gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(line, 1), gl.expand_dims(sixteenth, 0)


@gluon.jit
def pair_word(pair):
    word = 2 * pair + 1
    for i in gl.static_range(2):
        word *= SPREAD_PAIR[i]
        word ^= (word >> 16) & 0xFFFE
    return word


@gluon.jit
def draw(row_words, pair_words):
    """Two words for every eight scores."""
    row_words, pair_words = gl.broadcast(row_words, pair_words)
    high, low = multiply(row_words, pair_words)
    return one_round(high, low)


@gluon.jit
def transpose(words):
    """Words of 8 x 8 halves, transposed."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def exchange_bytes(words):
    """The words with the two bytes of each half exchanged."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x2301;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def is_lowered(tiles):
    """Whether P is scaled by 2**-7, to lie below kernels/dropout.py's line wherever P is kept."""
    return tiles.dropout.IS_ON and tiles.q.dtype == gl.bfloat16


@gluon.jit
def weights(tiles, p, row_words, pair_words):
    """Pairs of P (M, N // 2), 0 where dropped; see is_lowered."""
    pairs = pack_pairs(p, tiles.q.dtype)
    if tiles.dropout.IS_ON:
        drawn = draw(row_words, pair_words)
    if is_lowered(tiles):
        nothing = gl.full(pairs.shape, 0, gl.int32, pairs.type.layout)
        pairs = gl.inline_asm_elementwise(
            "{.reg .b16 a, b; .reg .b32 line, slope, start; mov.b32 {a, b}, $3; mov.b32 slope, {a, a}; "
            "mov.b32 start, {b, b}; fma.rn.relu.bf16x2 line, $2, slope, start; min.bf16x2 $0, $1, line;}",
            "=r,r,r,r", [pairs, tiles.dropout.halves_for(p, drawn), nothing + tiles.dropout.line],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif tiles.dropout.IS_ON:
        pairs &= tiles.dropout.masks(p, drawn)
    return pairs


@gluon.jit
def mark(pairs, masks):
    """Pairs of P, negative where dropped: the sign says what becomes of dP, and takes no register."""
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
    # predicates: selecting a factor would take as many instructions, at half the rate
    return (
        "{.reg .pred low, high; .reg .b16 a, b; .reg .b32 zero, sizes; .reg .f32 p, q, x, y; "
        + "mov.b32 zero, 0; " + take_p + "mul.f32 x, p, $4; mul.f32 y, q, $5; "
        + "@!low fma.rn.f32 x, p, $2, x; @!high fma.rn.f32 y, q, $3, y; cvt.rn." + kind + ".f32 $0, y, x;}"
    )  # fmt: skip


@gluon.jit
def gradient(p, dp, minus_delta, masks, dtype: gl.constexpr):
    """Pairs of dS, rounded: P (dP - delta), or -P delta where masks drop P."""
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
    """The same, from the 16-bit P whose signs `mark` set: pair by pair, it takes few registers."""
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
    """One value for each pair of columns of x, rows split by 16, 8 and 1, pairs by 8, 4 and 1."""
    low, _ = halves(x)
    return gl.reshape(low, [x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 4])


@gluon.constexpr_function
def draws_layout(layout):
    """The layout of draws for `parts`: one draw for both eights of sixteen rows, and of sixteen columns."""
    return gl.SliceLayout(1, gl.SliceLayout(4, layout))


@gluon.jit
def multiply(x, factor):
    """The high and the low word of the product of two words."""
    return gl.inline_asm_elementwise(
        "{.reg .u64 t; mul.wide.u32 t, $2, $3; mov.b64 {$1, $0}, t;}", "=r,=r,r,r", [x, factor],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def one_round(x, y):
    """One round of Philox2x32, see kernels/dropout.py."""
    high, low = multiply(x, gl.full(x.shape, FACTOR, gl.int32, x.type.layout))
    return high ^ y, low
