"""Tiles of bits: which query of a block sees which key, 32 keys in an int32.

A tile is (block_size, block_size / 32) int32; bit c % 32 of word c // 32 of row r: query r sees key c. In a
table of tiles the first one is full.
"""

import torch
from torch import Tensor

WORD_BITS = 32
# index in a table of the tile in which everything is visible
FULL = 0
# rows that `distinct` multiplies at a time
ROWS_AT_ONCE = 4096


def full_tile(block_size: int, device) -> Tensor:
    """A table that holds only the full tile."""
    return torch.full((1, block_size, block_size // WORD_BITS), -1, dtype=torch.int32, device=device)


def interval_tiles(first: Tensor, end: Tensor) -> Tensor:
    """(n, block_size, words): each query sees the keys in [first, end); these are (n, block_size)."""
    start = torch.arange(first.shape[1] // WORD_BITS, device=first.device) * WORD_BITS
    # in each word, all bits below a bound
    below_first, below_end = (
        (1 << (x.long()[..., None] - start).clamp(0, WORD_BITS)) - 1 for x in (first, end)
    )
    return signed(below_end & ~below_first)


def pack(visible: Tensor) -> Tensor:
    """(..., block_size) bool as (..., block_size / 32) int32."""
    words = visible.unflatten(-1, (-1, WORD_BITS)).long() << torch.arange(WORD_BITS, device=visible.device)
    return signed(words.sum(-1))


def unpack(bits: Tensor) -> Tensor:
    """The inverse of `pack`."""
    lanes = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return (bits[..., None] >> lanes & 1).bool().flatten(-2)


def transpose(bits: Tensor) -> Tensor:
    """The same tiles with a row of bits for each key: bit r % 32 of word r // 32 of row c.

    Each square of 32 x 32 bits swaps two of its quarters, then each quarter does the same, and so on: no bit
    is ever unpacked to a byte. Source: Warren, Hacker's Delight, 7-3.
    """
    # tile, word of a row, square below it, row of the square
    words = bits.unflatten(1, (-1, WORD_BITS)).permute(0, 3, 1, 2)
    for size in (16, 8, 4, 2, 1):
        left = sum(1 << c for c in range(WORD_BITS) if c & size == 0)
        top, bottom = words.unflatten(-1, (-1, 2, size)).unbind(-2)
        words = torch.stack(
            [top & left | (bottom & left) << size, top >> size & left | bottom & ~left], -2
        ).flatten(-3)
    return words.transpose(2, 3).flatten(1, 2)


def signed(words: Tensor) -> Tensor:
    """int64 from 0 to 2**32 - 1 as the int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).int()


def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the distinct rows of (n, m), and for each row, which of these it equals."""
    # sorting randomly weighted sums is faster than sorting the rows; rows of equal sums are compared
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(2**62, (rows.shape[1],), generator=generator, device="cpu").to(rows.device)
    # a part at a time: the products take twice the memory of the rows
    sums = [(part * weights).sum(1) for part in rows.split(ROWS_AT_ONCE)]
    sums, which = torch.cat(sums).unique(return_inverse=True)
    every = torch.arange(len(rows), device=rows.device)
    first = every.new_full((len(sums),), len(rows)).scatter_reduce(0, which, every, "amin")
    if not torch.equal(rows[first][which], rows):
        return every, every
    return first, which
