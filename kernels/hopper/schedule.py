"""Which tile a thread block computes next, and which blocks of keys or queries that tile visits."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.block_lists import BlockLists
from kernels.hopper.primitives import opaque, record

# tiles that a thread block has without asking a counter
DEALT = gl.constexpr(2)


@gluon.jit
def quotient(n, division):
    """n // d, for division = tiles.division(d): dividing at run time takes 30 instructions."""
    multiplier = division.to(gl.int32)
    shift = (division >> 32).to(gl.int32) & 31
    return (gl.umulhi(n, multiplier) + n) >> shift


@record
class TileOrder:
    """All tiles of all heads, in sections of heads that share L2, see tiles.section_heads and below it.

    Within a section the tile index varies slowest: neighbours in time read the same heads. LAST_FIRST runs
    from the last tiles, the longest under a causal mask, to the first in one section and back in the next,
    and ends with the first, so that short tiles come at the end.
    """

    n_heads: gl.tensor  # of all batches
    n_tiles: gl.tensor  # of one head
    section: gl.tensor  # heads
    # divisions by the tiles of a section, its heads, and the heads of the last one
    by_section_tiles: gl.tensor
    by_section: gl.tensor
    by_last_section: gl.tensor
    LAST_FIRST: gl.constexpr

    @gluon.jit
    def total(self):
        # opaque: so that it is not kept in a register throughout the kernel
        return opaque(self.n_heads) * self.n_tiles

    @gluon.jit
    def find(self, i):
        """Head over all batches, and tile in it, of the i-th tile in order."""
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
    def turns(self):
        """How many tiles a thread block is dealt if all tiles are dealt."""
        whole = self.total() // gl.num_programs(0)
        return whole + (self.dealt(whole) < self.total()).to(gl.int32)

    @gluon.jit
    def dealt(self, turn):
        """The place in order of the `turn`-th tile that this thread block is dealt.

        Turns go from the first thread block to the last and back, so that all get the same amount of work; a
        plain stride misses that by 15% with few heads.
        """
        block = gl.program_id(0)
        n_blocks = gl.num_programs(0)
        if self.LAST_FIRST:
            block = gl.where(turn % 2 == 0, block, n_blocks - 1 - block)
        return turn * n_blocks + block

    @gluon.jit
    def next(self, turn, counter_ptr, DEALT: gl.constexpr):
        """The same if only a thread block's first DEALT tiles are dealt, and others go to whoever asks."""
        i = self.dealt(turn)
        if turn >= DEALT:
            i = DEALT * gl.num_programs(0)
            # if all are dealt, counter_ptr is no counter
            if i < self.total():
                i += gl.atomic_add(counter_ptr, 1, sem="relaxed")
        return i


@record
class Mask:
    """Which keys a query sees: an interval that never moves back from query to query, or listed blocks.

    KIND: "full", "causal" (the last query stands at the last key), "window" (of these, the last `window`),
    "intervals" (bounds from memory, see kernels/intervals.py) or "blocks" (of a BlockMask). A tile visits
    places: of an interval they are blocks themselves, of a BlockMask they are entries of its lists.
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
        # opaque: otherwise what each tile derives from them is computed when the kernel begins, and spilled
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

    From the intervals of the tile's first and last line. Never empty: what sees nothing visits one masked
    block.
    """
    begin = first_of_first // BLOCK
    end = gl.maximum((end_of_last + BLOCK - 1) // BLOCK, begin + 1)
    whole_end = gl.minimum(gl.maximum(end_of_first // BLOCK, begin), end)
    whole_begin = gl.minimum(gl.maximum((first_of_last + BLOCK - 1) // BLOCK, begin), whole_end)
    return begin, whole_begin, whole_end, end
