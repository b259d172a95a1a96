"""Block masks from coordinates, from intervals, and from a dense mask; patterns are in block_masks.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bit_tiles import FULL, distinct, full_tile, interval_tiles, pack
from kernels.block_mask import BLOCK_SIZES, BlockMask, n_blocks


def from_blocks(
    row: Tensor, column: Tensor, seq_q: int, seq_k: int | None = None, *, block_size: int = 128
) -> BlockMask:
    """The blocks (row[x], column[x]), each full. row, column: (n,) int64."""
    seq_k = seq_q if seq_k is None else seq_k
    check_block_size(block_size)
    for name, x, seq in (("row", row, seq_q), ("column", column, seq_k)):
        n = n_blocks(seq, block_size)
        if len(x) and not 0 <= int(x.min()) <= int(x.max()) < n:
            raise ValueError(
                f"{name} must be from 0 to {n - 1}, the blocks of {seq} tokens by {block_size}, got "
                f"{int(x.min())} to {int(x.max())}"
            )
    return listed_blocks(seq_q, seq_k, block_size, 1, 1, torch.zeros_like(row), row, column, False)


def from_intervals(
    first: Tensor, end: Tensor, seq_k: int, *, block_size: int = 128, causal: bool = False
) -> BlockMask:
    """Query i sees the keys from first[i] to before end[i]; (Tq,) or (B, Tq); neither ever decreases.

    causal: says that no query sees a key behind it.
    """
    check_block_size(block_size)
    for name, bound in (("first", first), ("end", end)):
        if bool((bound.diff() < 0).any()):
            raise ValueError(f"{name} must not decrease from one query to the next: use from_dense or |")
        lowest, highest = int(bound.min()), int(bound.max())
        if not 0 <= lowest <= highest <= seq_k:
            raise ValueError(f"{name} must be from 0 to seq_k, {seq_k}, got {lowest} to {highest}: clamp it")
    first, end = (x.view(-1, x.shape[-1]) for x in (first, end.maximum(first)))
    n_batch, seq_q = first.shape
    n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
    place = torch.arange(n_rows * block_size, device=first.device).clamp(max=seq_q - 1)
    first, end = (x[:, place].view(-1, block_size) for x in (first, end))  # (B n_rows, block_size)
    start = first[:, 0] // block_size
    count = ((end[:, -1] + block_size - 1) // block_size - start).clamp(min=0)
    row = torch.arange(len(start), device=first.device).repeat_interleave(count)
    step = torch.arange(len(row), device=first.device) - (count.cumsum(0) - count)[row]
    column = start[row] + step

    partial = (column * block_size < first[row, -1]) | ((column + 1) * block_size > end[row, 0])
    origin = (column[partial] * block_size)[:, None]
    edges = torch.cat([(x[row[partial]] - origin).clamp(0, block_size).int() for x in (first, end)], 1)
    which, same = distinct(edges)
    bits = torch.cat([full_tile(block_size, edges.device), interval_tiles(*edges[which].chunk(2, 1))])
    tiles = torch.full_like(column, FULL).masked_scatter(partial, 1 + same)
    return BlockMask.build(
        seq_q, seq_k, block_size, n_batch, 1, row * n_columns + column, tiles, bits, causal
    )


def from_dense(mask: Tensor, *, block_size: int = 128) -> BlockMask:
    """The same mask as a (Tq, Tk), or (B or 1, H or 1, Tq, Tk), bool tensor, which must fit in memory."""
    check_block_size(block_size)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a query sees a key, got {mask.dtype}")
    mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    n_batch, n_head, seq_q, seq_k = mask.shape
    behind = torch.ones(seq_q, seq_k, dtype=torch.bool, device=mask.device).triu(1 + seq_k - seq_q)
    causal = not bool((mask & behind).any())
    n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
    padding = (0, n_columns * block_size - seq_k, 0, n_rows * block_size - seq_q)
    blocks = F.pad(mask, padding).reshape(-1, n_rows, block_size, n_columns, block_size)
    blocks = blocks.transpose(2, 3).flatten(0, 2)
    keys = blocks.flatten(1).any(1).nonzero().flatten()
    bits = torch.cat([full_tile(block_size, mask.device), pack(blocks[keys])])
    tiles = 1 + torch.arange(len(keys), device=mask.device)
    return BlockMask.build(seq_q, seq_k, block_size, n_batch, n_head, keys, tiles, bits, causal)


def listed_blocks(
    seq_q: int, seq_k: int, block_size: int, n_batch: int, n_head: int, head: Tensor, row: Tensor,
    column: Tensor, causal: bool,
) -> BlockMask:  # fmt: skip
    """Full blocks; with causal (and Tq = Tk) those on the diagonal see up to it."""
    check_block_size(block_size)
    n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
    keys = ((head * n_rows + row) * n_columns + column).unique()
    diagonal = torch.ones(1, block_size, block_size, dtype=torch.bool, device=row.device).tril()
    bits = torch.cat([full_tile(block_size, row.device), pack(diagonal)])
    on_diagonal = keys // n_columns % n_rows == keys % n_columns
    tiles = (on_diagonal & causal).long()
    return BlockMask.build(seq_q, seq_k, block_size, n_batch, n_head, keys, tiles, bits, causal)


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
