"""Which tile a thread block computes next, and which blocks of keys or queries that tile visits.

`nth` counts the tiles that a thread block has had: its first is tile 0.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.block_lists import BlockLists
from kernels.hopper.primitives import opaque, record


@gluon.jit
def quotient(n, division):
    """n // d, for division = order.division(d): dividing at run time takes 30 instructions."""
    multiplier = division.to(gl.int32)
    shift = (division >> 32).to(gl.int32) & 31
    return (gl.umulhi(n, multiplier) + n) >> shift


@record
class TileOrder:
    """The order of all tiles of all heads, by sections of heads that share L2, see tiles.section_heads.

    Within a section the tile index varies slowest, so that tiles close in time read the same heads. With
    LAST_FIRST one section runs from its last tiles, the longest under a causal mask, to its first, the next
    one back. The last section ends with its first tiles: short ones fill the end.
    """

    n_heads: gl.tensor  # of all batches
    n_tiles: gl.tensor  # of one head
    section: gl.tensor  # heads
    # order.division by the tiles of a section, by its heads, and by the heads of the last section
    by_section_tiles: gl.tensor
    by_section: gl.tensor
    by_last_section: gl.tensor
    LAST_FIRST: gl.constexpr

    @gluon.jit
    def total(self):
        # opaque: otherwise it is held in a register from kernel start on
        return opaque(self.n_heads) * self.n_tiles

    @gluon.jit
    def find(self, i):
        """The head, counted over all batches, and the tile in it, of the i-th tile in order."""
        section = self.section_of(i)
        first_head = section * self.section
        i -= first_head * self.n_tiles
        if first_head + self.section <= self.n_heads:
            heads = self.section
            tile = quotient(i, self.by_section)
        else:
            heads = self.n_heads - first_head
            tile = quotient(i, self.by_last_section)
        head = first_head + i - tile * heads
        if self.LAST_FIRST:
            last_section = (self.n_heads - 1) // self.section
            if (last_section - section) % 2 == 0:
                tile = self.n_tiles - 1 - tile
        return head, tile

    @gluon.jit
    def section_of(self, i):
        """The section of the i-th tile in order."""
        return quotient(i, self.by_section_tiles)

    @gluon.jit
    def n_dealt(self):
        """How many tiles this thread block is dealt, where all tiles are dealt."""
        whole = self.total() // gl.num_programs(0)
        return whole + (self.dealt(whole) < self.total()).to(gl.int32)

    @gluon.jit
    def dealt(self, nth):
        """The number in order of the nth tile that this thread block is dealt.

        Rounds go from the first thread block to the last and back, so that all get the same amount of work; a
        plain stride misses that by 15% with few heads.
        """
        block = gl.program_id(0)
        n_blocks = gl.num_programs(0)
        if self.LAST_FIRST:
            block = gl.where(nth % 2 == 0, block, n_blocks - 1 - block)
        return nth * n_blocks + block

    @gluon.jit
    def next(self, nth, counter_ptr, DEALT: gl.constexpr):
        """The same, where a thread block is dealt its first DEALT tiles and asks a counter for the others."""
        i = self.dealt(nth)
        if nth >= DEALT:
            i = DEALT * gl.num_programs(0)
            # where all tiles are dealt, the counter is not initialised
            if i < self.total():
                i += gl.atomic_add(counter_ptr, 1, sem="relaxed")
        return i


@record
class Mask:
    """Which keys a query sees: an interval that never moves back from query to query, or listed blocks.

    KIND: "full", "causal" (the last query is aligned with the last key), "window" (of the causal keys, the
    last `window`), "intervals" (bounds from memory, see kernels/intervals.py) or "blocks" (of a BlockMask).
    A tile visits places: those of an interval are the blocks themselves, those of a BlockMask list entries.
    """

    seq_q: gl.tensor
    seq_k: gl.tensor
    window: gl.tensor
    bounds_ptr: gl.tensor
    lists: BlockLists
    KIND: gl.constexpr

    @gluon.jit
    def keys_of(self, batch, rows):
        """[first, end) of the keys that each query sees."""
        rows = gl.minimum(rows, self.seq_q - 1)
        if self.KIND == "intervals":
            # bounds_ptr: (B, 2, Tq)
            pointers = self.bounds_ptr + 2 * batch * self.seq_q + rows
            first = gl.load(pointers)
            end = gl.load(pointers + self.seq_q)
        else:
            first = rows * 0
            end = first + self.seq_k
            if self.KIND != "full":
                end = gl.minimum(rows + (self.seq_k - self.seq_q) + 1, self.seq_k)
            if self.KIND == "window":
                first = end - self.window
        return gl.maximum(first, 0), gl.maximum(end, 0)

    @gluon.jit
    def queries_of(self, batch, columns):
        """[first, end) of the queries that see each key."""
        # opaque: otherwise what each tile derives from them is computed at kernel start, and spilled
        seq_q, seq_k = opaque(self.seq_q), opaque(self.seq_k)
        columns = gl.minimum(columns, seq_k - 1)
        if self.KIND == "intervals":
            # bounds_ptr: (B, 2, Tk)
            pointers = self.bounds_ptr + 2 * batch * seq_k + columns
            first = gl.load(pointers)
            end = gl.load(pointers + seq_k)
        else:
            first = columns * 0
            end = first + seq_q
            if self.KIND != "full":
                first = columns - (seq_k - seq_q)
            if self.KIND == "window":
                end = gl.minimum(first + self.window, seq_q)
        return gl.maximum(first, 0), gl.maximum(end, 0)


@gluon.jit
def blocks_between(first_of_first, end_of_first, first_of_last, end_of_last, BLOCK: gl.constexpr):
    """[begin, end) of the blocks that a tile visits, and [whole_begin, whole_end) that need no mask.

    Computed from the intervals of the tile's first and last line. Never empty: a tile that sees nothing
    visits one masked block.
    """
    begin = first_of_first // BLOCK
    end = gl.maximum((end_of_last + BLOCK - 1) // BLOCK, begin + 1)
    whole_end = gl.minimum(gl.maximum(end_of_first // BLOCK, begin), end)
    whole_begin = gl.minimum(gl.maximum((first_of_last + BLOCK - 1) // BLOCK, begin), whole_end)
    return begin, whole_begin, whole_end, end
