"""Who holds which tokens of a sequence that several processes share, and who needs them: the zigzag split.

A sequence of T tokens is cut into 2 n chunks for n ranks; rank r holds the chunks r and 2 n - 1 - r, so that
each rank has the same share of a causal mask. The mask of a step is a pair of intervals
(kernels/intervals.py), whatever mask it comes from: both chunks of a rank are in the order of the sequence,
so the keys that a query sees are one unbroken run of any rank's keys too. Keys that no query of a rank sees
are neither sent to it nor computed. A BlockMask has no such runs: there a step takes the blocks of keys that
some query of the rank sees, and the mask's blocks between the two ranks.

Source of the zigzag split: Zhu, ring-flash-attention, 2024.
"""

from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.block_mask import BlockMask
from kernels.checks import check_is_int, check_is_tensor, check_order
from kernels.intervals import document_bounds
from model.block_attention import Mask


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one step: local queries `rows` attend to the tokens `keys` of rank `source`.

    rows and keys are empty if nothing is visible. `send`: this rank's tokens whose keys rank `destination`
    needs in the same step. Tokens are one run or, with a BlockMask, ascending numbers (n,) int64.
    """

    source: int
    rows: slice
    keys: slice | Tensor
    mask: Mask
    destination: int
    send: slice | Tensor

    @property
    def is_empty(self) -> bool:
        return length(self.rows) == 0


class Ring:
    """One batch of sequences over the ranks of a process group: who holds which tokens, and who needs them.

    group: its ranks share each sequence. seq_len: T, a multiple of 2 n. document_ids: (B, T) int32 of the
    whole sequences, non-decreasing, on the CPU; a token sees its own document only, a negative id is
    padding. device: where the masks go. All ranks must agree on the arguments.
    Raises ValueError for a length that does not divide, and for document_ids of any other form.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        seq_len: int,
        document_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
    ):
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        check_is_int("seq_len", seq_len)
        self.seq_len = seq_len
        self.device = device
        if seq_len % (2 * self.size):
            above = -(-seq_len // (2 * self.size)) * 2 * self.size
            raise ValueError(
                f"seq_len={seq_len} must be a multiple of 2 * {self.size} ranks to be shared: use {above}"
            )
        self.positions = [zigzag_positions(seq_len, rank, self.size) for rank in range(self.size)]
        # by mask, rank and source: documents do not change these
        self._between: dict[tuple[BlockMask, int, int], tuple[slice, Tensor, BlockMask | None]] = {}
        self._take(document_ids)

    def with_documents(self, document_ids: Tensor) -> "Ring":
        """The ring of another batch, document_ids as for the class; keeps what documents do not change."""
        ring = copy(self)
        ring._take(document_ids)
        return ring

    def _take(self, document_ids: Tensor | None) -> None:
        if document_ids is not None:
            check_is_tensor("document_ids", document_ids)
            if document_ids.dtype != torch.int32:
                raise ValueError(f"document_ids must be int32, got {document_ids.dtype}: call .int()")
            if document_ids.shape[1:] != (self.seq_len,) or document_ids.is_cuda:
                raise ValueError(
                    f"document_ids must be (B, {self.seq_len}) on the CPU, one for each token of the whole "
                    f"sequence, got {tuple(document_ids.shape)} on {document_ids.device}"
                )
            check_order(document_ids)
        self.document_ids = document_ids
        self._steps: dict[tuple[int | None, BlockMask | None], list[Step]] = {}

    def split(self, x: Tensor) -> Tensor:
        """This rank's part (B, T / n, ...) of x (B, T, ...)."""
        return x[:, self.positions[self.rank].to(x.device)]

    def steps(self, window: int | None = None, block_mask: BlockMask | None = None) -> list[Step]:
        """The n steps of this rank, its own keys first; the same for every layer with this mask.

        block_mask: causal, of the whole sequence. Raises ValueError if its blocks do not fill the chunks.
        """
        if (window, block_mask) not in self._steps:
            if block_mask is None:
                bounds = self._bounds(window)
                steps = [self._step(distance, *bounds) for distance in range(self.size)]
            else:
                self._check_blocks(block_mask, window)
                bounds = None if self.document_ids is None else self._bounds(None)
                steps = [self._block_step(distance, block_mask, bounds) for distance in range(self.size)]
            self._steps[window, block_mask] = steps
        return self._steps[window, block_mask]

    def tokens_sent(self, window: int | None = None, block_mask: BlockMask | None = None) -> int:
        """Tokens whose keys and values this rank sends in one forward pass of one layer."""
        return sum(length(step.send) for step in self.steps(window, block_mask)[1:])

    def _bounds(self, window: int | None) -> tuple[Tensor, Tensor]:
        ids = self.document_ids
        if ids is None:
            ids = torch.zeros(1, self.seq_len, dtype=torch.int32, device="cpu")
        return document_bounds(ids, self.seq_len, causal=True, window=window)

    def _step(self, distance: int, key_bounds: Tensor, query_bounds: Tensor) -> Step:
        source, destination = (self.rank - distance) % self.size, (self.rank + distance) % self.size
        ours, theirs = self.positions[self.rank], self.positions[source]
        seen = local_bounds(key_bounds, ours, theirs)  # (B, 2, T / n) into their keys, for our queries
        seeing = local_bounds(query_bounds, theirs, ours)  # (B, 2, T / n) into our queries, for their keys
        rows, keys = hull(seeing), hull(seen)
        mask = Mask.of(
            seen[:, :, rows].sub(keys.start).clamp(0, length(keys)),
            seeing[:, :, keys].sub(rows.start).clamp(0, length(rows)),
            self.device,
        )
        send = hull(local_bounds(key_bounds, self.positions[destination], ours))
        return Step(source, rows, keys, mask, destination, send)

    def _block_step(self, distance: int, block_mask: BlockMask, whole: tuple[Tensor, Tensor] | None) -> Step:
        source, destination = (self.rank - distance) % self.size, (self.rank + distance) % self.size
        rows, keys, blocks = self._blocks_between(block_mask, self.rank, source)
        _, send, _ = self._blocks_between(block_mask, destination, self.rank)
        if whole is None or blocks is None:
            return Step(source, rows, keys, Mask(False, None, None, blocks), destination, send)
        key_bounds, query_bounds = whole
        ours = self.positions[self.rank][rows]
        theirs = self.positions[source][keys if isinstance(keys, slice) else keys.cpu()]
        bounds = local_bounds(key_bounds, ours, theirs), local_bounds(query_bounds, theirs, ours)
        mask = Mask(False, *(x.to(self.device) for x in bounds), blocks)
        return Step(source, rows, keys, mask, destination, send)

    def _blocks_between(
        self, block_mask: BlockMask, rank: int, source: int
    ) -> tuple[slice, slice | Tensor, BlockMask | None]:
        """The tokens of `rank` that see some of `source`, those seen, and the mask between them, or None."""
        key = block_mask, rank, source
        if key not in self._between:
            self._between[key] = self._find_blocks(*key)
        return self._between[key]

    def _find_blocks(
        self, block_mask: BlockMask, rank: int, source: int
    ) -> tuple[slice, slice | Tensor, BlockMask | None]:
        size, device = block_mask.block_size, block_mask.keys.device
        head, row, column = block_mask.coordinates()
        rows, columns = (
            place_of_blocks(self.positions[r], size, block_mask.n_rows).to(device) for r in (rank, source)
        )
        row, column = rows[row], columns[column]
        kept = (row >= 0) & (column >= 0)
        if not bool(kept.any()):
            return slice(0, 0), kept.new_empty(0, dtype=torch.int64), None
        head, row, column, tiles = head[kept], row[kept], column[kept], block_mask.tiles[kept]
        seen, column = column.unique(return_inverse=True)
        first, end = int(row.min()), int(row.max()) + 1
        keys = (head * (end - first) + row - first) * len(seen) + column
        between = BlockMask(
            (end - first) * size, len(seen) * size, size, block_mask.n_batch, block_mask.n_head,
            keys, tiles, block_mask.bits, causal=False,
        )  # fmt: skip
        return slice(first * size, end * size), tokens_of_blocks(seen, size), between

    def _check_blocks(self, block_mask: BlockMask, window: int | None) -> None:
        unit = 2 * self.size * block_mask.block_size
        if (block_mask.seq_q, block_mask.seq_k) != (self.seq_len,) * 2 or self.seq_len % unit:
            raise ValueError(
                f"block_mask must be of the {self.seq_len} tokens of the whole sequence, a multiple of 2 * "
                f"{self.size} ranks * {block_mask.block_size} = {unit}, got {block_mask.seq_q} queries and "
                f"{block_mask.seq_k} keys: build it for the sequence, or pad both"
            )
        if not block_mask.causal:
            raise ValueError("block_mask must be causal, got one that sees later keys: add & causal()")
        if window is not None:
            raise ValueError(f"window must be None with a block_mask, got {window}: add & window({window})")


def zigzag_positions(seq_len: int, rank: int, size: int) -> Tensor:
    """The places in the sequence of a rank's tokens, (T / n,) int32, ascending."""
    positions = torch.arange(seq_len, dtype=torch.int32, device="cpu").view(2 * size, -1)
    return positions[[rank, 2 * size - 1 - rank]].flatten()


def tokens_of_blocks(blocks: Tensor, size: int) -> slice | Tensor:
    """The tokens of some blocks (n,), ascending: a slice if they are one run, which needs no gather."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first + 1 == len(blocks):
        return slice(first * size, (last + 1) * size)
    return (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()


def local_bounds(bounds: Tensor, lines: Tensor, columns: Tensor) -> Tensor:
    """Bounds of some lines of the mask, counted in the columns that a rank holds, (B, 2, lines) int32."""
    wanted = bounds[:, :, lines].contiguous()  # (B, 2, lines)
    return torch.searchsorted(columns, wanted.flatten(), out_int32=True).view_as(wanted)


def hull(bounds: Tensor) -> slice:
    """The columns from the first to the last that any line sees; bounds (B, 2, lines)."""
    first, end = bounds.unbind(1)
    seen = first < end
    if not bool(seen.any()):
        return slice(0, 0)
    return slice(int(first[seen].min()), int(end[seen].max()))


def place_of_blocks(positions: Tensor, block_size: int, n_blocks: int) -> Tensor:
    """Each block's place among a rank's blocks, (n_blocks,) int64; -1 for blocks of other ranks."""
    own = positions[::block_size].long() // block_size
    places = torch.full((n_blocks,), -1, device="cpu")
    places[own] = torch.arange(len(own), device="cpu")
    return places


def length(tokens: slice | Tensor) -> int:
    return len(tokens) if isinstance(tokens, Tensor) else tokens.stop - tokens.start
