"""The dropout mask of kernels/dropout.py inside the kernels: which probabilities of a tile are kept."""

import triton
import triton.language as tl

from kernels import dropout

PHILOX_ROUNDS = tl.constexpr(dropout.PHILOX_ROUNDS)


@triton.jit
def keep_tile(
    seed, threshold, batch, head, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """True where a probability is kept. threshold: int32, 2**31 below the word that is compared.

    BLOCK_N: a multiple of 32, or 16, of which each call serves eight alone.
    """
    # counters are words of 32 bits
    batch, head = tl.cast(batch, tl.int32), tl.cast(head, tl.int32)
    rows = first_row // 2 + tl.arange(0, BLOCK_M // 2)[:, None]
    N_CALLS: tl.constexpr = max(BLOCK_N // 8, 4)
    columns = first_column // 32 * 4 + tl.arange(0, N_CALLS)[None, :]
    w0, w1, w2, w3 = tl.philox(seed, columns + rows * 0, rows, head, batch, PHILOX_ROUNDS)
    EIGHTS: tl.constexpr = min(BLOCK_N // 8, 4)
    if EIGHTS == 4:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK_M / 2, BLOCK_N / 8, 2, 2)
    else:
        is_second = first_column % 32 != 0
        words = tl.join(tl.where(is_second, w2, w0), tl.where(is_second, w3, w1))  # (BLOCK_M / 2, 4, 2)

    # row = 16 * dim 0 + 8 * dim 1 + dim 2, column = 32 * dim 3 + 8 * dim 4 + 2 * dim 5 + dim 6:
    # dims 1, 4 and 6 lie in one thread's registers, as they do in the result of a matrix product
    words = tl.reshape(words, (BLOCK_M // 16, 1, 8, N_CALLS // 4, 4, EIGHTS, 1))
    words = tl.permute(words, (0, 1, 2, 3, 5, 4, 6))
    of_row = tl.reshape(tl.arange(0, 2), (1, 2, 1, 1, 1, 1, 1))
    of_column = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 2))
    shift = (16 * of_row + 8 * of_column).to(tl.uint32)
    rotated = (words >> shift) | (words << ((32 - shift) & 31))
    limit = threshold.to(tl.uint32, bitcast=True) + 2147483648
    return tl.reshape(rotated, (BLOCK_M, BLOCK_N)) < limit.to(tl.uint32)
