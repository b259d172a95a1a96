"""The dropout mask of kernels/dropout.py inside the kernels: which probabilities of a tile are kept."""

import triton
import triton.language as tl

from kernels import dropout

PHILOX_ROUNDS = tl.constexpr(dropout.PHILOX_ROUNDS)


@triton.jit
def keep_tile(
    seed, threshold, batch, head, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """True where a probability is kept. threshold: int32, 2**31 below the word that is compared."""
    # counters are words of 32 bits
    batch, head = tl.cast(batch, tl.int32), tl.cast(head, tl.int32)
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    calls = first_column // 16 + tl.arange(0, BLOCK_N // 16)[None, :]
    counter = rows * 0 + calls  # (BLOCK_M, BLOCK_N / 16)
    w0, w1, w2, w3 = tl.philox(seed, counter, rows, head, batch, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK_M, BLOCK_N / 16, 2, 2)
    words = tl.reshape(words, (BLOCK_M, BLOCK_N // 4, 1))
    shift = (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]
    rotated = (words >> shift) | (words << ((32 - shift) & 31))  # (BLOCK_M, BLOCK_N / 4, 4)
    limit = threshold.to(tl.uint32, bitcast=True) + 2147483648
    return tl.reshape(rotated, (BLOCK_M, BLOCK_N)) < limit.to(tl.uint32)
