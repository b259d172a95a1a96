"""BlockMask: which blocks of the (Tq, Tk) scores are computed, as lists, never as an array of Tq x Tk.

A mask cuts the scores into squares of `block_size` queries and keys. It stores the squares in which anything
is visible: a full one sees everything, a partial one has a tile of bits that says which query sees which
key. Equal tiles are stored once, so a window over a million tokens keeps a handful of them. Patterns are in
block_masks.py; they combine by `&` and `|`, exactly, to the token.

The kernels read lists, sorted by rows (for each block of queries the blocks of keys: forward, dq) and by
columns (dk, dv). The lists are run-time tensors: another mask, length or batch compiles nothing.
"""

import os
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import cycle, islice
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from kernels.bit_tiles import FULL, distinct, pack, transpose, unpack

BLOCK_SIZES = (64, 128)
LARGEST = torch.iinfo(torch.int32).max
# how many blocks `_lists` sorts at a time
SORTED_AT_ONCE = 2**18
_makes_lists = ContextVar("_makes_lists", default=True)


@contextmanager
def without_lists():
    """Context for masks that are made only to be combined: without lists, which are most of their memory."""
    token = _makes_lists.set(False)
    try:
        yield
    finally:
        _makes_lists.reset(token)


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The blocks that each line of blocks meets; a line is a block of queries, or of keys.

    spans: (B or 1, H or 1, n_lines, 8) int32. spans[..., x, :4]: where the full blocks of line x start among
    the entries, where its partial ones start, where these end, and x. spans[..., r, 4:]: the same for the
    line with the r-th longest list, which is the order to work in. entries: (n, 2) int32, the block of the
    other side and its tile.
    """

    spans: Tensor
    entries: Tensor


class BlockMask:
    """Query i of batch b and head h sees key j if the mask has a block there whose tile has their bit set.

    seq_q, seq_k: Tq, Tk. n_batch, n_head: 1 where one mask serves all. keys: (n,) `key_dtype`, the stored
    blocks, sorted: ((b n_head + h) n_rows + row) n_columns + column. tiles: (n,) int32, their tiles. bits:
    (n_tiles, block_size, block_size / 32) int32, tile 0 all ones; bit c % 32 of word c // 32 of row r: query
    r of the block sees key c. causal: no query sees a later key, if the last query is at the last key;
    from_intervals checks this and from_dense determines it, while here and in `build` it is trusted.
    """

    def __init__(
        self,
        seq_q: int,
        seq_k: int,
        block_size: int,
        n_batch: int,
        n_head: int,
        keys: Tensor,
        tiles: Tensor,
        bits: Tensor,
        causal: bool,
    ):
        self.seq_q, self.seq_k, self.block_size = int(seq_q), int(seq_k), int(block_size)
        self.n_batch, self.n_head, self.causal = int(n_batch), int(n_head), causal
        self.n_rows, self.n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
        keys = keys.to(key_dtype(self.n_batch * self.n_head * self.n_rows * self.n_columns))
        self.keys, self.tiles, self.bits = keys, tiles.int(), bits
        if _makes_lists.get():
            self.make_lists()

    def make_lists(self) -> None:
        """Sets what the kernels read: rows, columns and transposed_bits."""
        # arrays of a number per block are large: without a name, each is freed when the next one is made
        self.rows = self._lists(self.keys // self.n_columns, self.keys % self.n_columns, self.n_rows)
        self.columns = self._lists(
            self.keys // (self.n_rows * self.n_columns) * self.n_columns + self.keys % self.n_columns,
            self.keys // self.n_columns % self.n_rows,
            self.n_columns,
        )
        self.transposed_bits = transpose(self.bits)

    @classmethod
    def build(
        cls,
        seq_q: int,
        seq_k: int,
        block_size: int,
        n_batch: int,
        n_head: int,
        keys: Tensor,
        tiles: Tensor,
        bits: Tensor,
        causal: bool,
    ) -> "BlockMask":
        """A mask from distinct blocks in any order, int32 or int64, which it cuts at Tq and Tk."""
        seq_q, seq_k, block_size, n_batch, n_head = map(int, (seq_q, seq_k, block_size, n_batch, n_head))
        n_rows, n_columns = n_blocks(seq_q, block_size), n_blocks(seq_k, block_size)
        keys, tiles = keys.to(key_dtype(n_batch * n_head * n_rows * n_columns)), tiles.int()
        in_cut_row = keys // n_columns % n_rows == seq_q // block_size
        in_cut_column = keys % n_columns == seq_k // block_size
        cut = (in_cut_row | in_cut_column).nonzero().flatten()
        if len(cut):
            rest_q = seq_q - keys[cut] // n_columns % n_rows * block_size
            rest_k = seq_k - keys[cut] % n_columns * block_size
            lane = torch.arange(block_size, device=keys.device)
            inside = (lane[:, None] < rest_q[:, None, None]) & (lane < rest_k[:, None, None])
            bits, n_tiles = torch.cat([bits, bits[tiles[cut]] & pack(inside)]), len(bits)
            new = torch.arange(n_tiles, len(bits), dtype=tiles.dtype, device=keys.device)
            tiles = tiles.index_copy(0, cut, new)
        # checked for tiles, not for blocks, which may be hundreds of times as many
        is_used = tiles.bincount(minlength=len(bits)) > 0
        is_empty = (bits == 0).flatten(1).all(1)
        if bool((is_used & is_empty).any()):
            visible = ~is_empty[tiles]
            keys, tiles = keys[visible], tiles[visible]
            del visible
        if bool((keys.diff() < 0).any()):
            keys, order = keys.sort()
            tiles = tiles[order]
            del order
        is_partial = (bits != -1).flatten(1).any(1) & ~is_empty
        used = (is_used & is_partial).nonzero().flatten()
        first, same = distinct(bits[used].flatten(1))
        renumbered = torch.full((len(bits),), FULL, dtype=tiles.dtype, device=tiles.device)
        renumbered[used] = (1 + same).to(tiles.dtype)
        bits = torch.cat([bits.new_full((1, *bits.shape[1:]), -1), bits[used[first]]])
        tiles = renumbered.index_select(0, tiles)
        return cls(seq_q, seq_k, block_size, n_batch, n_head, keys, tiles, bits, causal)

    @classmethod
    def stack(cls, masks: "Sequence[BlockMask]") -> "BlockMask":
        """The mask whose head h is masks[h], each a mask of one head."""
        if not isinstance(masks, Sequence) or not all(isinstance(mask, BlockMask) for mask in masks):
            raise ValueError(f"stack takes a list of block masks, one for each head, got {masks!r}")
        if not masks:
            raise ValueError("stack needs a mask for each head, got none")
        for mask in masks:
            masks[0].check_combines(mask)
            if mask.n_head != 1 or mask.n_batch != masks[0].n_batch:
                raise ValueError(
                    f"stack takes masks of one head and {masks[0].n_batch} batches, got {mask.n_head} heads "
                    f"and {mask.n_batch} batches"
                )
        keys, tiles, n_tiles = [], [], 0
        for index, mask in enumerate(masks):
            batch, row, column = mask.coordinates()
            keys.append(((batch * len(masks) + index) * mask.n_rows + row) * mask.n_columns + column)
            tiles.append(mask.tiles + n_tiles)
            n_tiles += len(mask.bits)
        return cls.build(
            masks[0].seq_q, masks[0].seq_k, masks[0].block_size, masks[0].n_batch, len(masks),
            torch.cat(keys), torch.cat(tiles), torch.cat([mask.bits for mask in masks]),
            all(mask.causal for mask in masks),
        )  # fmt: skip

    def expand(self, n_batch: int, n_head: int) -> "BlockMask":
        """The mask repeated for n_batch batches and n_head heads, where it had one for all."""
        if (n_batch, n_head) == (self.n_batch, self.n_head):
            return self
        check_count("n_batch", n_batch)
        check_count("n_head", n_head)
        self.check_serves(n_batch, n_head)
        batch = torch.arange(n_batch, device=self.keys.device) % self.n_batch
        source = batch[:, None] * self.n_head + torch.arange(n_head, device=self.keys.device) % self.n_head
        head, block = (source.view(-1, 1) == self.coordinates()[0]).nonzero(as_tuple=True)
        n_pairs = self.n_rows * self.n_columns
        keys = head * n_pairs + self.keys[block] % n_pairs
        return self._like(n_batch, n_head, keys, self.tiles[block], self.bits, self.causal)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        if not isinstance(other, BlockMask):
            return NotImplemented
        mine, others = self._aligned(other)
        keys = mine.keys[others._find(mine.keys) < len(others.bits)]
        return mine._combine(others, keys, torch.bitwise_and, mine.causal or others.causal)

    def __or__(self, other: "BlockMask") -> "BlockMask":
        if not isinstance(other, BlockMask):
            return NotImplemented
        mine, others = self._aligned(other)
        keys = torch.cat([mine.keys, others.keys]).unique()
        return mine._combine(others, keys, torch.bitwise_or, mine.causal and others.causal)

    @property
    def device(self) -> torch.device:
        return self.bits.device

    def tensors(self) -> list[Tensor]:
        """What the kernels read: spans and entries of rows and of columns, tiles, and tiles transposed."""
        lists = [self.rows.spans, self.rows.entries, self.columns.spans, self.columns.entries]
        return [*lists, self.bits, self.transposed_bits]

    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        """b n_head + h, the row and the column of every stored block."""
        row = self.keys.long() // self.n_columns
        return row // self.n_rows, row % self.n_rows, self.keys.long() % self.n_columns

    def to_dense(self) -> Tensor:
        """(B or 1, H or 1, Tq, Tk) bool, for tests, the reference and short sequences."""
        head, row, column = self.coordinates()
        shape = (self.n_batch * self.n_head, self.n_rows, self.n_columns, self.block_size, self.block_size)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.keys.device)
        dense[head, row, column] = unpack(self.bits)[self.tiles]
        dense = dense.transpose(2, 3).reshape(
            self.n_batch, self.n_head, self.n_rows * self.block_size, self.n_columns * self.block_size
        )
        return dense[:, :, : self.seq_q, : self.seq_k]

    def rows_to_dense(self, rows: Tensor) -> Tensor:
        """What the queries at rows (n,) see: (B or 1, H or 1, n, Tk) bool."""
        heads = torch.arange(self.n_batch * self.n_head, device=rows.device)[:, None, None]
        line = heads * self.n_rows + (rows // self.block_size)[:, None]
        tiles = self._find(line * self.n_columns + torch.arange(self.n_columns, device=rows.device))
        nothing = self.bits.new_zeros(1, *self.bits.shape[1:])
        words = torch.cat([self.bits, nothing])[tiles, (rows % self.block_size)[:, None]]
        dense = unpack(words).flatten(-2)[..., : self.seq_k]
        return dense.view(self.n_batch, self.n_head, len(rows), self.seq_k)

    def __repr__(self) -> str:
        sizes = f"{self.seq_q} queries, {self.seq_k} keys, n_batch={self.n_batch}, n_head={self.n_head}"
        of_all = self.n_batch * self.n_head * self.n_rows * self.n_columns
        blocks = f"{len(self.keys)} of {of_all} blocks of {self.block_size}"
        return f"BlockMask({sizes}, {blocks}, causal={self.causal}, {self.keys.device})"

    def density(self) -> float:
        """The share of all blocks that are kept; for a causal mask, of the blocks up to the diagonal."""
        n_all = self.n_rows * self.n_columns
        if self.causal:
            last = torch.arange(1, self.n_rows + 1, device="cpu") * self.block_size + self.seq_k - self.seq_q
            n_all = int(
                ((last.clamp(max=self.seq_k) + self.block_size - 1) // self.block_size).clamp(min=0).sum()
            )
        return len(self.keys) / (self.n_batch * self.n_head * n_all)

    def reach(self, n_layers: int) -> float:
        """The share of block pairs that information can cross in n_layers; see `reach`."""
        check_count("n_layers", n_layers)
        return _reach([self], n_layers)

    def plot(self, path: str | Path) -> None:
        """Draws the stored blocks of the first batch and head, full ones dark; at most 512 x 512 pixels.

        path: a name with the ending of a picture; a folder of it that is missing is made.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), layout="constrained")
        # matplotlib would add an ending to a name without one, and might replace a file of that name
        endings = [f".{ending}" for ending in figure.canvas.get_supported_filetypes()]
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"path must name a picture, got {path!r}: give a str or a Path")
        if Path(path).is_dir():
            raise ValueError(f"path must name a picture, got the folder {str(path)!r}: add a name to it")
        if Path(path).suffix.lower() not in endings:
            raise ValueError(f"path must end in one of {', '.join(endings)}, got {str(path)!r}: add one")
        head, row, column = (x.cpu() for x in self.coordinates())
        weight = torch.where(self.tiles.cpu() == FULL, 1.0, 0.5)[head == 0]
        n_rows, n_columns = min(self.n_rows, 512), min(self.n_columns, 512)
        place = (
            row[head == 0] * n_rows // self.n_rows * n_columns
            + column[head == 0] * n_columns // self.n_columns
        )
        picture = weight.new_zeros(n_rows * n_columns).scatter_reduce(0, place, weight, "amax").numpy()
        axis = figure.subplots()
        axis.imshow(picture.reshape(n_rows, n_columns), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axis.set_xlabel(f"blocks of {self.block_size} keys")
        axis.set_ylabel(f"blocks of {self.block_size} queries")
        axis.set_title(f"{self.seq_q} x {self.seq_k}, density {self.density():.1%}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)

    def check_combines(self, other: "BlockMask") -> None:
        for name in ("seq_q", "seq_k", "block_size", "device"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"block masks that combine must have one {name}, got {getattr(self, name)} and "
                    f"{getattr(other, name)}: build both for the same"
                )

    def check_serves(self, n_batch: int, n_head: int) -> None:
        """Raises ValueError unless the mask has as many batches and heads, or one for all."""
        for name, have, want in (("n_batch", self.n_batch, n_batch), ("n_head", self.n_head, n_head)):
            if have not in (1, want):
                raise ValueError(f"{name} of a block mask must be 1 or {want}, got {have}: one serves all")

    def _aligned(self, other: "BlockMask") -> tuple["BlockMask", "BlockMask"]:
        """Both masks, expanded to the same batches and heads."""
        self.check_combines(other)
        shape = max(self.n_batch, other.n_batch), max(self.n_head, other.n_head)
        return self.expand(*shape), other.expand(*shape)

    def _combine(self, other: "BlockMask", keys: Tensor, operation, causal: bool) -> "BlockMask":
        """The blocks at keys, combined by an operation on bits; where a mask has no block, its bits are 0."""
        mine, others = self._find(keys), other._find(keys)
        n_pairs = (len(self.bits) + 1) * (len(other.bits) + 1)
        pairs = mine.to(key_dtype(n_pairs)).mul_(len(other.bits) + 1).add_(others)
        del mine, others
        pairs, tiles = numbered(pairs, n_pairs)
        nothing = self.bits.new_zeros(1, *self.bits.shape[1:])
        a = torch.cat([self.bits, nothing])[pairs // (len(other.bits) + 1)]
        b = torch.cat([other.bits, nothing])[pairs % (len(other.bits) + 1)]
        return self._like(self.n_batch, self.n_head, keys, tiles, operation(a, b), causal)

    def _find(self, keys: Tensor) -> Tensor:
        """The tile of the block at each of keys, or the number of tiles where there is no block."""
        keys = keys.to(self.keys.dtype)
        place = torch.searchsorted(self.keys, keys, out_int32=True)
        # beyond the last key nothing is found
        found = torch.cat([self.keys, self.keys.new_full((1,), -1)])[place] == keys
        tiles = torch.cat([self.tiles, self.tiles.new_full((1,), len(self.bits))])[place]
        return tiles.masked_fill_(~found, len(self.bits))

    def _like(self, n_batch: int, n_head: int, *blocks) -> "BlockMask":
        return BlockMask.build(self.seq_q, self.seq_k, self.block_size, n_batch, n_head, *blocks)

    def _lists(self, line: Tensor, block: Tensor, n_lines: int) -> BlockLists:
        """The stored blocks by line. line: (n,), numbered over all heads; block: (n,), on the other side."""
        partial = self.tiles != FULL
        n_all = self.n_batch * self.n_head * n_lines
        counts, n_partial = (torch.bincount(x, minlength=n_all) for x in (line, line[partial]))
        end = counts.cumsum(0)
        longest = counts.view(-1, n_lines).argsort(dim=1, descending=True, stable=True)
        number = torch.arange(n_lines, device=end.device).expand_as(longest).flatten()
        spans = torch.stack([end - counts, end - n_partial, end, number], 1).int().view(-1, n_lines, 4)
        spans = torch.cat([spans, spans.take_along_dim(longest[..., None], 1)], 2)
        n_others = self.n_rows * self.n_columns // n_lines
        place = line.mul(2).add_(partial).mul_(n_others).add_(block)
        del line, block, partial
        entries = torch.empty(len(place), 2, dtype=torch.int32, device=place.device)
        # some lines at a time: sorting takes five times the memory of what is sorted
        n_lines_at_once = -(-n_all // (len(place) // SORTED_AT_ONCE + 1))
        n_done = 0
        for first in range(0, n_all, n_lines_at_once):
            stop = min(first + n_lines_at_once, n_all)
            own = slice(None)
            if n_lines_at_once < n_all:
                own = (place >= 2 * n_others * first) & (place < 2 * n_others * stop)
            part, order = place[own].sort()
            of_part = entries[n_done : n_done + len(part)]
            of_part[:, 0] = part.remainder_(n_others)
            of_part[:, 1] = self.tiles[own][order]
            n_done += len(part)
        return BlockLists(spans.view(self.n_batch, self.n_head, n_lines, 8), entries)


def reach(masks: Sequence[BlockMask]) -> float:
    """The share of block pairs that information can cross through layers with these masks, in order.

    Among all pairs or, for causal masks, those up to the diagonal. Any head may carry information, and every
    layer passes on what it has. Warns below 100%. Takes n_rows x n_columns numbers, and a product of two such
    matrices for each layer until all is reached, or no more by equal layers: on a CPU, minutes for a million
    tokens.
    """
    if not isinstance(masks, Sequence):
        got = "a single one" if isinstance(masks, BlockMask) else type(masks).__name__
        raise ValueError(f"reach takes the mask of each layer, got {got}: write reach([mask])")
    if not masks:
        raise ValueError("reach needs at least one layer, got none")
    for mask in masks:
        if not isinstance(mask, BlockMask):
            raise ValueError(f"masks must be BlockMasks, got {type(mask).__name__}: leave out dense layers")
    return _reach(masks, len(masks))


def _reach(masks: Sequence[BlockMask], n_layers: int) -> float:
    """`reach` through n_layers, which have these masks in turn."""
    first = masks[0]
    if first.seq_q != first.seq_k:
        raise ValueError(f"reach needs as many queries as keys, got {first.seq_q} and {first.seq_k}")
    n_batch = max(mask.n_batch for mask in masks)
    for mask in masks:
        first.check_combines(mask)
        # the number of heads may differ: any of them may carry information
        mask.check_serves(n_batch, mask.n_head)
    # float32 whatever the default dtype, as `seen` is below
    own = torch.eye(first.n_rows, dtype=torch.float32, device=first.keys.device)
    seen = own.expand(first.n_batch, -1, -1)
    pairs = torch.ones_like(seen[0])
    if all(mask.causal for mask in masks):
        pairs = pairs.tril()
    n_pairs = pairs.sum(dtype=torch.float64)
    share = 0.0
    for mask in islice(cycle(masks), n_layers):
        head, row, column = mask.coordinates()
        crossed = own.repeat(mask.n_batch, 1, 1)
        crossed[head // mask.n_head, row, column] = 1.0
        seen = (crossed @ seen > 0).float()
        before, share = share, (seen.sum(dtype=torch.float64) / (len(seen) * n_pairs)).item()
        # where one mask has added nothing, it adds nothing again
        if share == 1.0 or (len(masks) == 1 and share == before):
            break
    if share < 1.0:
        warnings.warn(
            f"{share:.1%} of block pairs are reached in {n_layers} layers: some tokens never hear of "
            "others; add window(n), or more layers, or a dense one",
            stacklevel=3,
        )
    return share


def check_count(name: str, count: int, least: int = 1, most: int = LARGEST) -> None:
    """Raises ValueError unless a count, or a length in tokens, is an int from least to most."""
    # True would be a count of one
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise ValueError(f"{name} must be an integer, got {type(count).__name__} {count}: int() makes one")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    if count > most:
        raise ValueError(f"{name} must be at most {most}, got {count}")


def numbered(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The distinct values of x (m,), each from 0 to n - 1, in order; and each x's place among them, int32.

    If n is small it uses a table: sorting takes longer, and several times the memory of x.
    """
    if n > len(x):
        values, place = x.unique(return_inverse=True)
        return values, place.int()
    is_used = x.bincount(minlength=n) > 0
    place = (is_used.cumsum(0) - 1).int()
    return is_used.nonzero().flatten(), place.index_select(0, x)


def n_blocks(seq_len: int, block_size: int) -> int:
    # NumPy's integers may be too narrow for the products of such numbers
    return -(-int(seq_len) // int(block_size))


def key_dtype(n: int) -> torch.dtype:
    """int32 if it holds numbers up to 2 n, by which `_lists` sorts n blocks; otherwise int64."""
    return torch.int32 if 2 * n <= torch.iinfo(torch.int32).max else torch.int64
