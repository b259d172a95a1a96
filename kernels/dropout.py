"""The dropout mask of the kernels, bit for bit, as a PyTorch function.

Whether probability (batch b, head h, row i, column j) is kept depends on these four numbers and the seed
alone: not on tile shapes, GPU, or pass. One draw serves eight probabilities, two rows by two pairs of
columns, which the matrix units leave in the registers of one thread: no word moves between threads.

    row, pair = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
    words = draw(row_word(seed, row, h, b), pair_word(pair))                              # two of 32 bits
    half  = words[i // 8 % 2] >> 16 * (j % 2) & 0xFFFF, its bytes exchanged if j // 8 % 2
    kept  = not bfloat16(half) >= limit                                                   # so NaN is kept

A half is compared as a bfloat16: that order of 16-bit numbers is as good as any, and one instruction compares
two of them. Dropout rates are multiples of 2**-16 from 2 * 2**-16 on. Kept probabilities are divided by the
rate at which they are kept, so means are exact. Two probabilities share each half, and one of them reads its
bytes exchanged, so that every bit is in the leading byte of a decision. The two are correlated by less than
0.4%, because one decision depends on the other only if the leading byte equals the limit's, once in 256.

The expensive part is computed once per row. A row's word is Philox2x32 with constant keys, whose counters are
sums of the row's number, head, batch and seed, each times a constant without a pattern. A pair's word is the
same for all rows and seeds: an odd number, different for each pair. A draw is the 64-bit product of the two,
and one more round of Philox on its upper half. Without that round decisions are correlated; with it no test
of tests/test_attention_dropout.py can tell them from independent ones. Words of rows have 31 random bits, so
of 2**31 pairs of rows, one on average has the same mask twice.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import struct

import torch
from torch import Tensor

ROUNDS = 4
FACTOR, KEY = 0xD256D193, 0x9E3779B9
# multipliers of row, head, batch, low and high word of the seed: the first 32 fractional bits of the square
# roots of the first ten primes, made odd
SPREAD_X = (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B, 0x510E527F)
SPREAD_Y = (0x9B05688D, 0x1F83D9AB, 0x5BE0CD19, 0xCBBB9D5D, 0x629A292B)
# multipliers for the words of pairs
SPREAD_PAIR = (0x9E3779B1, 0x85EBCA77)
WORD = 0xFFFFFFFF

# how many of the 2**16 halves are NaN
NANS = 254
# at most all halves but infinity and the largest number; at least NaN and minus infinity
MOST_KEPT, FEWEST_KEPT = 2**16 - 2, NANS + 1
MOST_DROPPED = 1.0 - FEWEST_KEPT / 2**16
# how many halves are kept if the limit is 0: NaN, and all negative numbers but -0
NEGATIVE = NANS + 0x7F80


def kept_halves(dropout_p: float) -> int:
    """How many of 2**16 halves mean "keep"; dropout_p: at most MOST_DROPPED, see checks.check_dropout."""
    kept = min(round((1.0 - dropout_p) * 2**16), MOST_KEPT)
    # -0 and 0 are equal: either both are kept, or neither
    return kept + (kept == NEGATIVE + 1)


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied by."""
    return 2**16 / kept_halves(dropout_p)


def limit_bits(dropout_p: float) -> int:
    """The bits of the bfloat16 at which "drop" begins."""
    more = kept_halves(dropout_p) - NEGATIVE
    return more - 1 if more > 0 else 0x8000 - more


def limit_number(dropout_p: float) -> float:
    """The number at which "drop" begins."""
    return struct.unpack("f", struct.pack("I", limit_bits(dropout_p) << 16))[0]


def line_exponent(dropout_p: float) -> int:
    """The exponent of the steepest slope with a finite start, see line_bits."""
    return min(127, 253 - (limit_bits(dropout_p) >> 7 & 0xFF))


def line_bits(dropout_p: float) -> tuple[int, int]:
    """The bits of two bfloat16, slope and start: half * slope + start is at least 2**-6 where half is kept.

    Otherwise it is not positive, or NaN for a half that is NaN. So its maximum with 0, and the minimum of
    that with a probability below 2**-6, drop or keep the probability, by faster instructions than comparing.
    """
    k = line_exponent(dropout_p)
    slope, start = (
        struct.unpack("I", struct.pack("f", number))[0] >> 16
        for number in (-(2.0**k), limit_number(dropout_p) * 2.0**k)
    )
    return slope, start


def least_line(dropout_p: float) -> float:
    """The least that half * slope + start of line_bits is where a half is kept."""
    exponent = limit_bits(dropout_p) >> 7 & 0xFF
    return 2.0 ** (max(exponent - 135, -133) + line_exponent(dropout_p))


def row_word(seed: int, row: Tensor, head: Tensor, batch: Tensor) -> Tensor:
    """An odd word of 32 bits for each (row, head, batch); int64 tensors that broadcast."""
    numbers = (row, head, batch, seed & WORD, seed >> 32 & WORD)
    x, y = (
        sum(multiply_words(number, factor)[1] for number, factor in zip(numbers, factors, strict=True)) & WORD
        for factors in (SPREAD_X, SPREAD_Y)
    )
    for i in range(1, ROUNDS + 1):
        x, y = one_round(x, y ^ (KEY * i & WORD))
    return x | 1


def pair_word(pair: Tensor) -> Tensor:
    """An odd word of 32 bits for each pair; int64."""
    word = 2 * pair + 1
    for factor in SPREAD_PAIR:
        word = multiply_words(word, factor)[1]
        # this keeps it odd, and different for each pair
        word = word ^ (word >> 16 & 0xFFFE)
    return word


def draw(row_word: Tensor, pair_word: Tensor) -> tuple[Tensor, Tensor]:
    """Two words of 32 random bits for each row and pair."""
    return one_round(*multiply_words(row_word, pair_word))


def one_round(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One round of Philox2x32."""
    high, low = multiply_words(x, FACTOR)
    return high ^ y, low


def multiply_words(x: Tensor | int, factor: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """High and low word of x * factor, both of 32 bits."""
    # in two halves: the whole product needs 64 unsigned bits
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    carry = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (carry >> 32)) & WORD, carry & WORD


def dropout_keep_mask(
    seed: int | Tensor, dropout_p: float, batch: int, n_head: int, seq_q: int, seq_k: int, device=None
) -> Tensor:
    """True where a probability is kept: (B, H, Tq, Tk) bool, for tests and the reference."""
    i = torch.arange(seq_q, device=device)[:, None]
    j = torch.arange(seq_k, device=device)[None, :]
    head = torch.arange(n_head, device=device).view(-1, 1, 1)
    of_batch = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    rows = row_word(int(seed), i // 16 * 8 + i % 8, head, of_batch)
    words = draw(rows, pair_word(j // 16 * 4 + j % 8 // 2))
    half = torch.where(i // 8 % 2 == 0, *words) >> 16 * (j % 2) & 0xFFFF
    half = torch.where(j // 8 % 2 == 0, half, half >> 8 | (half & 0xFF) << 8)
    # compared as the float32 of the same number
    numbers = (half << 16).to(torch.uint32).view(torch.float32)
    # not in the default dtype: in float16 most limits would be infinite
    return ~(numbers >= torch.tensor(limit_number(dropout_p), dtype=torch.float32, device=numbers.device))
