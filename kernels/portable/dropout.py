"""The dropout mask of kernels/dropout.py inside the kernels: which probabilities of a tile are kept."""

import triton
import triton.language as tl

from kernels import dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)
FACTOR, KEY = tl.constexpr(dropout.FACTOR), tl.constexpr(dropout.KEY)
WORD = tl.constexpr(dropout.WORD)
SPREAD_X, SPREAD_Y = tl.constexpr(dropout.SPREAD_X), tl.constexpr(dropout.SPREAD_Y)
SPREAD_PAIR = tl.constexpr(dropout.SPREAD_PAIR)


@triton.jit
def spread(seed, row, head, batch, FACTORS: tl.constexpr):
    """Hashes all that a row's word depends on into one uint32; seed: int64, the others broadcast."""
    whole = seed.to(tl.uint64, bitcast=True)
    low, high = whole.to(tl.uint32), (whole >> 32).to(tl.uint32)
    of_tile = tl.cast(head, tl.uint32) * FACTORS[1] + tl.cast(batch, tl.uint32) * FACTORS[2]
    return (of_tile + low * FACTORS[3] + high * FACTORS[4]) + row * FACTORS[0]


@triton.jit
def row_word(seed, row, head, batch):
    x = spread(seed, row, head, batch, SPREAD_X)
    y = spread(seed, row, head, batch, SPREAD_Y)
    for i in tl.static_range(1, ROUNDS + 1):
        x, y = one_round(x, y ^ ((KEY * i) & WORD))
    return x | 1


@triton.jit
def pair_word(pair):
    word = pair * 2 + 1
    for i in tl.static_range(2):
        word *= SPREAD_PAIR[i]
        word ^= (word >> 16) & 0xFFFE
    return word


@triton.jit
def one_round(x, y):
    high, low = multiply(x, FACTOR)
    return high ^ y, low


@triton.jit
def multiply(x, factor):
    """High and low word of the product of two words."""
    # as one 64-bit product: a single instruction
    product = x.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def keep_tile(
    seed, limit, batch, head, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """True where a probability is kept. limit: float32, compared with halves of words read as bfloat16."""
    rows = (first_row // 2 + tl.arange(0, BLOCK_M // 2)[:, None]).to(tl.uint32)
    pairs = (first_column // 4 + tl.arange(0, BLOCK_N // 4)[None, :]).to(tl.uint32)
    high, low = multiply(row_word(seed, rows, head, batch), pair_word(pairs))
    x, y = one_round(high, low)
    words = tl.reshape(tl.join(x, y), (BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2))
    # row = 16 * dim 0 + 8 * dim 1 + dim 2, column = 16 * dim 3 + 8 * dim 4 + 2 * dim 5 + dim 6: dims 1, 4
    # and 6 lie in one thread's registers, as they do in the result of a matrix product
    words = tl.permute(words, (0, 4, 1, 2, 3))[:, :, :, :, None, :, None]
    of_eighth = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2, 1, 1))
    of_column = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 2))
    exchanged = ((words >> 8) & 0x00FF00FF) | ((words & 0x00FF00FF) << 8)
    halves = tl.where(of_eighth == 0, words, exchanged) >> (16 * of_column).to(tl.uint32)
    # cast, because Triton would take a subnormal number for a float64
    kept = ~((halves << 16).to(tl.float32, bitcast=True) >= tl.cast(limit, tl.float32))
    return tl.reshape(kept, (BLOCK_M, BLOCK_N))
