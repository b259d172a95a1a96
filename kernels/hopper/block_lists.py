"""How the Hopper kernels read the lists of a BlockMask: the blocks that each line visits, and their bits.

A line is a block of BLOCK_SIZE queries (forward and dq.py) or keys (backward). A place is a position among
the entries. A line's places before `whole_end` are wholly visible, those from it on have tiles of bits. The
tile of a wholly visible place is tile 0, of which all bits are set.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.primitives import opaque, record

# the only block size of masks that these kernels take
BLOCK_SIZE = gl.constexpr(128)
WORD_BITS = gl.constexpr(32)


@record
class BlockLists:
    """The lists of kernels/block_mask.py; a stride is 0 where one list serves all batches or heads."""

    spans_ptr: gl.tensor  # (B or 1, H or 1, n_lines, 8) int32
    entries_ptr: gl.tensor  # (n, 2) int32
    bits_ptr: gl.tensor  # (n_tiles, BLOCK_SIZE, BLOCK_SIZE / 32) int32, a row for each line of a tile
    stride_batch: gl.tensor
    stride_head: gl.tensor

    @gluon.jit
    def longest(self, batch, head, rank):
        """The line with the rank-th longest list, and begin, whole_end and end of its places.

        Never empty, as in schedule.blocks_between: a line without entries visits place -1, a block of which
        it sees nothing.
        """
        span = self.spans_ptr + (batch * self.stride_batch + head * self.stride_head + 8 * rank + 4)
        begin = gl.load(span)
        whole_end = gl.load(span + 1)
        end = gl.load(span + 2)
        line = gl.load(span + 3)
        empty = begin == end
        return line, gl.where(empty, -1, begin), gl.where(empty, -1, whole_end), gl.where(empty, 0, end)

    @gluon.jit
    def block(self, place):
        """The block at a place: of keys for a line of queries, of queries for a line of keys."""
        return gl.load(self.entries_ptr + 2 * place, mask=place >= 0, other=0)

    @gluon.jit
    def words(self, place, lines, column, x):
        """(M, N / 32) bits: which of a block's N columns from `column` on each of the lines (M,) sees.

        x: (M, N), in the layout of what is to be masked.
        """
        LAYOUT: gl.constexpr = in_words(x).type.layout
        tile = gl.load(self.entries_ptr + 2 * place + 1, mask=place >= 0, other=0)
        lines = gl.convert_layout(lines, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        index = gl.arange(0, x.shape[1] // WORD_BITS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        offsets = gl.expand_dims(lines * (BLOCK_SIZE // WORD_BITS), 1) + gl.expand_dims(index, 0)
        words_ptr = self.bits_ptr + tile.to(gl.int64) * (BLOCK_SIZE * BLOCK_SIZE // WORD_BITS)
        return gl.load(words_ptr + column // WORD_BITS + offsets, mask=place >= 0, other=0)


@gluon.jit
def in_words(x):
    """(M, N) as (M, N / 32, 32)."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // WORD_BITS, WORD_BITS])


@gluon.jit
def hide_unseen(x, words, hidden):
    """x (M, N), but `hidden` where words (M, N / 32) have no bit."""
    parts = in_words(x)
    bit = gl.arange(0, WORD_BITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts.type.layout)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 1)
    # as in softmax.hide: the compiler knows the multiple of eight of each bit that a thread holds
    shifted = gl.expand_dims(words, 2) >> (bit & 7)
    # opaque: otherwise the compiler packs a thread's conditions into a word, and unpacks them
    parts = gl.where(opaque(shifted & (1 << (bit & -8))) != 0, parts, hidden)
    return gl.convert_layout(gl.reshape(parts, x.shape), x.type.layout)
