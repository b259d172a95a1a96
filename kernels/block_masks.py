"""Patterns of block-sparse attention; `&` and `|` combine them, BlockMask.stack gives each head its own.

    mask = window(65536, 1024) | sinks(65536, 64)
    out = flash_attention(q, k, v, block_mask=mask)

In the pictures a character is a block: # full, + partial, . not computed. Every pattern also takes
block_size=128 (or 64) and device="cpu"; from_blocks, from_dense and from_intervals build any other mask.
"""

import ast
from contextlib import suppress
from inspect import getfullargspec

import torch
from torch import Tensor

from kernels.block_constructors import (
    check_integers,
    check_sizes,
    from_blocks,
    from_dense,
    from_intervals,
    listed_blocks,
    places,
)
from kernels.block_mask import BlockMask, check_count, n_blocks, without_lists
from kernels.checks import check_flags, check_is_tensor, check_order
from kernels.intervals import document_bounds

__all__ = [
    "bigbird",
    "butterfly",
    "causal",
    "documents",
    "fixed",
    "from_blocks",
    "from_dense",
    "from_intervals",
    "parse",
    "power_of_two_strided",
    "sinks",
    "strided",
    "top_k",
    "window",
]

# the seeds of PyTorch's generators
SEEDS = -(2**63), 2**64 - 1
# random blocks drawn per row if a sequence has fewer blocks: 2^31 draws would not fit in memory
MOST_DRAWS = 1024


def causal(seq_len: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """Every key up to the query itself.

    +.......
    #+......
    ##+.....
    ###+....
    """
    check_sizes(block_size, seq_len=seq_len)
    i = torch.arange(seq_len, device=device)
    return from_intervals(torch.zeros_like(i), i + 1, seq_len, block_size=block_size, causal=True)


def window(seq_len: int, n: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """The last n keys, including the query's own, exact to the token; n = two blocks:

    +.......
    #+......
    +#+.....
    .+#+....
    """
    check_sizes(block_size, seq_len=seq_len, n=n)
    i = torch.arange(seq_len, dtype=torch.int32, device=device)
    return from_intervals((i + 1 - n).clamp(min=0), i + 1, seq_len, block_size=block_size, causal=True)


def sinks(seq_len: int, n: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """The first n keys, where attention goes that has nowhere else to go (Xiao et al., arXiv:2309.17453).

    +.......
    +.......
    +.......
    +.......
    """
    check_sizes(block_size, seq_len=seq_len, n=n)
    i = torch.arange(seq_len, dtype=torch.int32, device=device)
    return from_intervals(
        torch.zeros_like(i), (i + 1).clamp(max=n), seq_len, block_size=block_size, causal=True
    )


def strided(seq_len: int, n_blocks_apart: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """Every n-th block back, counted from the query's own (Child et al., arXiv:1904.10509); n = 2:

    +.......
    .+......
    #.+.....
    .#.+....
    """
    check_sizes(block_size, seq_len=seq_len, n_blocks_apart=n_blocks_apart)
    n = n_blocks(seq_len, block_size)
    return _causal_steps(seq_len, torch.arange(0, n, n_blocks_apart, device=device), block_size)


def power_of_two_strided(seq_len: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """The blocks 0, 1, 2, 4, 8 ... back: the butterfly made causal, which reaches everything in log2 layers.

    +.......
    #+......
    ##+.....
    .##+....
    #.##+...
    .#.##+..
    """
    check_sizes(block_size, seq_len=seq_len)
    n = n_blocks(seq_len, block_size)
    steps = torch.tensor([0, *(2**k for k in range(int(n).bit_length()))], device=device)
    return _causal_steps(seq_len, steps, block_size)


def butterfly(seq_len: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """Block i and every i XOR 2^k, for full attention, as in FlashAttention (Pixelfly, arXiv:2112.00029).

    Under a causal mask it is disconnected: use power_of_two_strided there.

    ###.#...
    ##.#.#..
    #.##..#.
    .###...#
    #...###.
    .#..##.#
    ..#.#.##
    ...#.###
    """
    check_sizes(block_size, seq_len=seq_len)
    n = n_blocks(seq_len, block_size)
    i = torch.arange(n, device=device)
    flips = torch.tensor([0, *(2**k for k in range(int(n - 1).bit_length()))], device=device)
    row, column = i.repeat_interleave(len(flips)), (i[:, None] ^ flips).flatten()
    return from_blocks(row[column < n], column[column < n], seq_len, block_size=block_size)


def fixed(seq_len: int, n_group: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """Groups of n_group blocks: a query sees its own group and the last block of each earlier one; n = 2:

    +.......
    #+......
    .#+.....
    .##+....
    .#.#+...
    .#.##+..
    """
    check_sizes(block_size, seq_len=seq_len, n_group=n_group)
    i = torch.arange(n_blocks(seq_len, block_size), device=device)
    row, place = places(i // n_group + i % n_group + 1)
    # first the last block of each earlier group, then the query's own group
    n_before = row // n_group
    column = torch.where(place < n_before, (place + 1) * n_group - 1, n_before * n_group + place - n_before)
    return _causal_blocks(seq_len, row, column, block_size)


def bigbird(
    seq_len: int,
    n_window: int,
    n_global: int,
    n_random: int,
    *,
    seed: int = 0,
    block_size: int = 128,
    device="cpu",
) -> BlockMask:
    """The last n_window blocks, the first n_global, and n_random earlier ones (BigBird, arXiv:2007.14062).

    The random ones are drawn with repetition, from `seed`; a shorter sequence has the same draws as the
    beginning of a longer one, unless n_random exceeds both its blocks and MOST_DRAWS. With 2, 1 and 1:

    +.......
    #+......
    ##+.....
    #.#+....
    ##.#+...
    #..##+..
    #.#..#+.
    """
    check_sizes(block_size, seq_len=seq_len, n_window=n_window)
    check_count("n_global", n_global, least=0)
    check_count("n_random", n_random, least=0)
    check_count("seed", seed, *SEEDS)
    n = n_blocks(seq_len, block_size)
    # a row has no more blocks than these
    n_window, n_global = min(n_window, n), min(n_global, n)
    n_random = min(n_random, max(n, MOST_DRAWS))
    row = torch.arange(n, device=device)[:, None]
    generator = torch.Generator().manual_seed(int(seed))
    # float32 whatever the default dtype: 16 bits would be too coarse, and 64 would draw other blocks
    draw = torch.rand(n, n_random, generator=generator, dtype=torch.float32, device="cpu").to(device)
    columns = [
        row - torch.arange(n_window, device=device),
        torch.arange(n_global, device=device).expand(n, -1),
        (draw * row).long(),
    ]
    column = torch.cat(columns, 1)
    inside = (column >= 0) & (column <= row)
    return _causal_blocks(seq_len, row.expand_as(column)[inside], column[inside], block_size)


def documents(document_ids: Tensor, *, block_size: int = 128) -> BlockMask:
    """A token sees its whole document, before and after it. For documents of 1.5, 1.5 and 1 blocks:

    #+..
    +++.
    .+#.
    ...#

    document_ids: (B, T) int32 or int64, non-decreasing; a negative id is padding, which sees nothing and
    nothing sees.
    """
    check_integers("(B, T)", (2,), document_ids=document_ids)
    check_order(document_ids)
    seq_len = document_ids.shape[1]
    key_bounds, _ = document_bounds(document_ids, seq_len, causal=False, window=None)
    return from_intervals(*key_bounds.unbind(1), seq_len, block_size=block_size)


def top_k(q: Tensor, k: Tensor, n: int, *, causal: bool = True, block_size: int = 128) -> BlockMask:
    """For each block of queries the n blocks of keys whose mean scores highest with the mean query; n = 2:

    +...
    #+..
    #.+.
    .#.+

    q: (B, T, H, D), k: (B, T, Hkv, D). With causal, the query's own block is always one of the n, and only
    earlier ones compete. No gradient flows through the choice. Source: MoBA, arXiv:2502.13189.
    Raises ValueError for other shapes, and for scores that are nan or infinite, which have no order.
    """
    for name, x in (("q", q), ("k", k)):
        check_is_tensor(name, x)
    check_flags(causal=causal)
    # of a tensor or a number, which passed
    causal = bool(causal)
    if q.device != k.device:
        raise ValueError(f"q and k must be on one device, got {q.device} and {k.device}: move one")
    others = (*q.shape[:2], *k.shape[2:3], *q.shape[3:])
    # nothing is divisible by 0 heads, which check_sizes refuses by name
    if q.dim() != 4 or k.shape != others or q.shape[2] % max(1, k.shape[2]):
        raise ValueError(
            "q and k must be (B, T, H, D) and (B, T, Hkv, D), Hkv dividing H, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    batch, seq_len, n_head, _ = q.shape
    check_sizes(block_size, batch=batch, seq_len=seq_len, n_head=n_head, n_kv_head=k.shape[2], n=n)
    mean_q, mean_k = (_block_means(x.detach(), int(block_size)) for x in (q, k))
    mean_k = mean_k.repeat_interleave(n_head // k.shape[2], dim=1)
    # not in 16 bits, which would choose other blocks
    with torch.autocast(q.device.type, enabled=False):
        scores = mean_q @ mean_k.mT  # (B, H, n_blocks, n_blocks)
    n_bad = int((~scores.isfinite()).sum())
    if n_bad:
        raise ValueError(
            f"q and k must give finite scores, got {n_bad} of {scores.numel()} that are nan or infinite: "
            "look for nan, inf or overflow in them"
        )
    if causal:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    best = scores.topk(min(n, scores.shape[-1]))
    head, row, rank = (best.values > -torch.inf).flatten(0, 1).nonzero(as_tuple=True)
    column = best.indices.flatten(0, 1)[head, row, rank]
    return listed_blocks(seq_len, seq_len, block_size, batch, n_head, head, row, column, causal)


PATTERNS = {
    f.__name__: f for f in (causal, window, sinks, strided, power_of_two_strided, butterfly, fixed, bigbird)
}


def parse(text: str, seq_len: int, *, block_size: int = 128, device="cpu") -> BlockMask:
    """The mask of an expression like "window(1024) | strided(8)": patterns of integers, & and |."""

    def value(node: ast.AST) -> BlockMask:
        match node:
            case ast.BinOp(left, ast.BitOr(), right):
                return value(left) | value(right)
            case ast.BinOp(left, ast.BitAnd(), right):
                return value(left) & value(right)
            case ast.Call(ast.Name(name), arguments, []) if name in PATTERNS:
                numbers = [_integer(x) for x in arguments]
                if None in numbers:
                    given = ", ".join(ast.get_source_segment(text, x) for x in arguments)
                    raise ValueError(f"{name} in {text!r} takes integers, got {given}")
                n_taken = len(getfullargspec(PATTERNS[name]).args) - 1  # beside seq_len
                if len(numbers) != n_taken:
                    integers = "1 integer" if n_taken == 1 else f"{n_taken or 'no'} integers"
                    raise ValueError(f"{name} in {text!r} takes {integers}, got {len(numbers)}")
                return PATTERNS[name](seq_len, *numbers, block_size=block_size, device=device)
        raise ValueError(
            f"{ast.unparse(node)!r} in {text!r} is no pattern: combine {', '.join(PATTERNS)} of integers "
            "by & and |"
        )

    if not isinstance(text, str):
        raise ValueError(f"a pattern must be a text, got {type(text).__name__} {text!r}")
    text = text.strip()
    try:
        with without_lists():
            mask = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError) as error:
        raise ValueError(f"pattern {text!r}: {error}") from error
    mask.make_lists()
    return mask


def _integer(node: ast.AST) -> int | None:
    """The integer that a node of the expression stands for, or None."""
    with suppress(ValueError, TypeError):
        number = ast.literal_eval(node)
        if type(number) is int:
            return number
    return None


def _causal_steps(seq_len: int, steps: Tensor, block_size: int) -> BlockMask:
    """Each block of queries with the blocks that many steps back; steps: (n,), ascending from 0."""
    i = torch.arange(n_blocks(seq_len, block_size), device=steps.device)
    row, place = places(torch.searchsorted(steps, i, right=True))
    return _causal_blocks(seq_len, row, row - steps.int()[place], block_size)


def _causal_blocks(seq_len: int, row: Tensor, column: Tensor, block_size: int) -> BlockMask:
    """The blocks (row[x], column[x]), none after its queries; those on the diagonal are cut at it."""
    head = row.new_zeros(1)
    return listed_blocks(seq_len, seq_len, block_size, 1, 1, head, row, column, True)


def _block_means(x: Tensor, block_size: int) -> Tensor:
    """(B, T, H, D) as (B, H, n_blocks, D) float32."""
    n = n_blocks(x.shape[1], block_size)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, n * block_size - x.shape[1]))
    sums = padded.unflatten(1, (n, block_size)).sum(2)
    counts = (x.shape[1] - torch.arange(n, device=x.device) * block_size).clamp(max=block_size)
    return (sums / counts.view(-1, 1, 1)).transpose(1, 2)
