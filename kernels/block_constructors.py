"""Block masks from coordinates, from intervals, and from a dense mask; patterns are in block_masks.py."""

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bit_tiles import FULL, distinct, full_tile, interval_tiles, pack
from kernels.block_mask import BLOCK_SIZES, BlockMask, check_count, key_dtype, n_blocks
from kernels.checks import check_is_tensor


def from_blocks(
    row: Tensor, column: Tensor, seq_q: int, seq_k: int | None = None, *, block_size: int = 128
) -> BlockMask:
    """The blocks (row[x], column[x]), each full. row, column: (n,) int32 or int64; seq_k: as seq_q."""
    seq_k = seq_q if seq_k is None else seq_k
    check_sizes(block_size, seq_q=seq_q, seq_k=seq_k)
    check_integers("(n,)", (1,), row=row, column=column)
    row, column = row.long(), column.long()
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
    """Query i sees the keys in [first[i], end[i]).

    first, end: (Tq,) or (B, Tq), int32 or int64, never decreasing. causal: declares that no query sees a
    later key; ValueError if one does.
    """
    check_is_tensor("first", first)
    n_batch, seq_q = first.shape[:-1].numel(), first.shape[-1] if first.dim() else 0
    check_sizes(block_size, n_batch=n_batch, seq_q=seq_q, seq_k=seq_k)
    block_size = int(block_size)
    check_integers("(Tq,) or (B, Tq)", (1, 2), first=first, end=end)
    for name, bound in (("first", first), ("end", end)):
        decreases = bound.diff() < 0
        if bool(decreases.any()):
            *batch, query = decreases.nonzero()[0].tolist()
            before, after = bound[(*batch, slice(query, query + 2))].tolist()
            raise ValueError(
                f"{name} must not decrease from one query to the next, got {after} after {before} at query "
                f"{query + 1}: use from_dense or |"
            )
        lowest, highest = int(bound.min()), int(bound.max())
        if not 0 <= lowest <= highest <= seq_k:
            raise ValueError(f"{name} must be from 0 to seq_k, {seq_k}, got {lowest} to {highest}: clamp it")
    first, end = (x.reshape(n_batch, seq_q) for x in (first, end.maximum(first)))
    if causal:
        check_causal(first, end, seq_k)
    n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
    place = torch.arange(n_rows * block_size, device=first.device).clamp(max=seq_q - 1)
    first, end = (x[:, place].view(-1, block_size) for x in (first, end))  # (B n_rows, block_size)
    start = first[:, 0].long() // block_size
    count = ((end[:, -1].long() + block_size - 1) // block_size - start).clamp(min=0)
    row, step = places(count)
    column = start[row] + step

    partial = (column * block_size < first[row, -1]) | ((column + 1) * block_size > end[row, 0])
    origin = (column[partial] * block_size)[:, None].to(first.dtype)
    edges = torch.cat([(x[row[partial]] - origin).clamp_(0, block_size).int() for x in (first, end)], 1)
    which, same = distinct(edges)
    bits = torch.cat([full_tile(block_size, edges.device), interval_tiles(*edges[which].chunk(2, 1))])
    tiles = torch.full_like(column, FULL).masked_scatter(partial, 1 + same)
    return BlockMask.build(
        seq_q, seq_k, block_size, n_batch, 1, row.long() * n_columns + column, tiles, bits, causal
    )


def from_dense(mask: Tensor, *, block_size: int = 128) -> BlockMask:
    """The same mask as a (Tq, Tk), or (B or 1, H or 1, Tq, Tk), bool tensor, which must fit in memory.

    For example, a text whose first one and a half blocks see each other, and whose rest is causal:

    #+..
    #+..
    ##+.
    ###+
    """
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a query sees a key, got {mask.dtype}")
    if mask.dim() not in (2, 4):
        raise ValueError(f"mask must be (Tq, Tk) or (B, H, Tq, Tk), got {tuple(mask.shape)}")
    mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    n_batch, n_head, seq_q, seq_k = mask.shape
    check_sizes(block_size, n_batch=n_batch, n_head=n_head, seq_q=seq_q, seq_k=seq_k)
    block_size = int(block_size)
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
    """Full blocks; with causal (Tq = Tk, none beyond the diagonal) those on the diagonal are cut at it."""
    assert not causal or bool((column <= row).all())
    n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
    dtype = key_dtype(n_batch * n_head * n_rows * n_columns)
    keys = ((head.to(dtype) * n_rows + row.to(dtype)) * n_columns + column.to(dtype)).unique()
    diagonal = torch.ones(1, block_size, block_size, dtype=torch.bool, device=row.device).tril()
    bits = torch.cat([full_tile(block_size, row.device), pack(diagonal)])
    on_diagonal = keys // n_columns % n_rows == keys % n_columns
    tiles = (on_diagonal & causal).int()
    return BlockMask.build(seq_q, seq_k, block_size, n_batch, n_head, keys, tiles, bits, causal)


def check_causal(first: Tensor, end: Tensor, seq_k: int) -> None:
    """Raises ValueError if intervals (B, Tq) let a query see ahead; the last query is at the last key."""
    own = torch.arange(seq_k - first.shape[1], seq_k, dtype=end.dtype, device=first.device)
    ahead = ((end > own + 1) & (end > first)).nonzero()
    if len(ahead):
        batch, query = ahead[0].tolist()
        raise ValueError(
            f"end must be at most {max(int(own[query]) + 1, 0)} at query {query} of a causal mask, got "
            f"{int(end[batch, query])}: clamp it, or leave causal out"
        )


def places(count: Tensor) -> tuple[Tensor, Tensor]:
    """For rows with count (n,) blocks: each block's row, and its place among the row's blocks, int32."""
    n_before = (count.cumsum(0) - count).int()
    row = torch.arange(len(count), dtype=torch.int32, device=count.device).repeat_interleave(count)
    return row, torch.arange(len(row), dtype=torch.int32, device=count.device) - n_before[row]


def check_sizes(block_size: int, **sizes: int) -> None:
    """Raises ValueError unless block_size is one of BLOCK_SIZES, and each of sizes a `check_count`."""
    # 64.0 would pass for 64, but is no size of a tensor
    if not isinstance(block_size, Integral) or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    for name, size in sizes.items():
        check_count(name, size)


def check_integers(form: str, n_dims: tuple[int, ...], **tensors: Tensor) -> None:
    """Raises ValueError unless all are int32 or int64 of one shape, with as many dimensions as `form`."""
    for name, x in tensors.items():
        check_is_tensor(name, x)
    if len({x.shape for x in tensors.values()}) > 1 or any(
        x.dim() not in n_dims or x.dtype not in (torch.int32, torch.int64) for x in tensors.values()
    ):
        got = " and ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors.values())
        raise ValueError(f"{' and '.join(tensors)} must be int32 or int64 {form}, got {got}")
