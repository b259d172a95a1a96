"""The dropout mask of the kernels, bit for bit, as a PyTorch function.

Whether probability (batch b, head h, row i, column j) is kept depends on these four numbers and the seed
alone: not on tile shapes, GPU, or pass. One call of a cipher serves eight probabilities, two rows by two
pairs of columns, that the matrix units leave in the registers of one thread, so that no word has to travel:

    row, pair = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
    words = cipher(seed, row, pair, h, b)                                                 # two of 32 bits
    half  = rotate_right(words[i // 8 % 2], 8 * (j // 8 % 2) + 16 * (j % 2)) & 0xFFFF
    kept  = not bfloat16(half) >= limit                                                   # so NaN is kept

A word's halves decide about two neighbours, by one instruction that compares pairs of bfloat16: an order of
16 bits as good as any. Rates are whole multiples of 2**-16, at least one, and what is kept is divided by the
rate at which it is kept, so that means are exact. Four probabilities read one word, each from its own byte
on, so every bit is in the leading byte of some decision. Two that share a word are correlated by less than
0.4%, because their decisions meet only where the leading byte falls on that of the limit, once in 256.

The cipher is Philox2x32's, with constant keys: it begins not from counters but from sums of them, each times
numbers without a pattern, which three rounds make independent of each other (two do not, see
tests/test_attention_dropout.py); there are four.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import torch
from torch import Tensor

ROUNDS = 4
FACTOR, KEY = 0xD256D193, 0x9E3779B9
# of row, pair, head, batch, low and high word of the seed: the first 32 bits behind the point of the roots
# of the first twelve primes, made odd
SPREAD_X = (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B, 0x510E527F, 0x9B05688D)
SPREAD_Y = (0x1F83D9AB, 0x5BE0CD19, 0xCBBB9D5D, 0x629A292B, 0x9159015B, 0x152FECD9)
WORD = 0xFFFFFFFF

# of 2**16 halves: all but the largest number; NaN, which nothing shows to be large
MOST_KEPT, FEWEST_KEPT = 2**16 - 1, 254
MOST_DROPPED = 1.0 - FEWEST_KEPT / 2**16
# halves that are kept where the limit is 0: NaN, and all negative numbers but -0
NEGATIVE = FEWEST_KEPT + 0x7F80


def kept_halves(dropout_p: float) -> int:
    """How many of 2**16 halves mean "keep"; dropout_p: at most MOST_DROPPED, see checks.check_dropout."""
    kept = min(round((1.0 - dropout_p) * 2**16), MOST_KEPT)
    # -0 and 0 are equal: both are kept, or neither
    return kept + (kept == NEGATIVE + 1)


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied by."""
    return 2**16 / kept_halves(dropout_p)


def limit_bits(dropout_p: float) -> int:
    """The bits of the bfloat16 at which "drop" begins."""
    more = kept_halves(dropout_p) - NEGATIVE
    return more - 1 if more > 0 else 0x8000 - more


def cipher(
    seed: int, row: Tensor, pair: Tensor, head: Tensor, batch: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor]:
    """Two words of 32 random bits for each (row, pair, head, batch); int64 tensors that broadcast."""
    numbers = (row, pair, head, batch, seed & WORD, seed >> 32 & WORD)
    x, y = (
        sum(multiply_words(number, factor)[1] for number, factor in zip(numbers, factors, strict=True)) & WORD
        for factors in (SPREAD_X, SPREAD_Y)
    )
    key = KEY
    for _ in range(rounds):
        high, low = multiply_words(x, FACTOR)
        x, y = high ^ y ^ key, low
        key = (key + KEY) & WORD
    return x, y


def multiply_words(x: Tensor | int, factor: int) -> tuple[Tensor | int, Tensor | int]:
    """High and low word of x * factor, for x of 32 bits."""
    # in two halves: the whole product needs 64 bits without a sign
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
    x, y = cipher(int(seed), i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, head, of_batch)
    word = torch.where(i // 8 % 2 == 0, x, y)
    shift = 8 * (j // 8 % 2) + 16 * (j % 2)
    half = (word >> shift | word << (32 - shift)) & 0xFFFF
    # as the float32 of the same number
    numbers = (half << 16).to(torch.uint32).view(torch.float32)
    limit = torch.tensor(limit_bits(dropout_p) << 16, dtype=torch.uint32).view(torch.float32)
    return ~(numbers >= limit.to(numbers.device))
