"""Walking tiles: every block of an interval, or, with BLOCK_SIZE, those that a BlockMask lists.

A span says which blocks a tile of queries (or keys) meets. Its first four numbers are (start, full_start,
full_end, end) as in masks.split_blocks: numbers of blocks or, with lists, positions in the list of full
blocks. The other two, (partial_start, partial_end), are positions of blocks that have tiles of bits. A listed
block of BLOCK_SIZE lines is walked in tiles of BLOCK lines; a line is a query or a key.
"""

import triton
import triton.language as tl

from kernels.portable.masks import block_at, n_blocks, split_blocks

# list entries that are examined together
CHUNK = tl.constexpr(64)


@triton.jit
def tiles_of(seq_len, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """How many programs one head takes."""
    return (
        tl.cdiv(seq_len, BLOCK) if BLOCK_SIZE == 0 else tl.cdiv(seq_len, BLOCK_SIZE) * (BLOCK_SIZE // BLOCK)
    )


def n_programs(seq_len: int, block_size: int, block: int) -> int:
    """`tiles_of`, for the launcher."""
    return triton.cdiv(seq_len, block_size or block) * (block_size // block or 1)


@triton.jit
def first_of_program(spans_ptr, program, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The first line of the program's tile; the first programs take the longest lists."""
    tiles_in_block: tl.constexpr = BLOCK_SIZE // BLOCK
    block = tl.load(spans_ptr + 8 * (program // tiles_in_block) + 7)
    return block * BLOCK_SIZE + program % tiles_in_block * BLOCK


@triton.jit
def find_span(
    first_of_first, end_of_first, first_of_last, end_of_last, listed, entries_ptr,
    MASK: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The span of a tile, from what load_list found and the intervals that its first and last line see."""
    if BLOCK_SIZE == 0:
        start, full_start, full_end, end = split_blocks(
            first_of_first, end_of_first, first_of_last, end_of_last, BLOCK
        )
        span = (start, full_start, full_end, end, 0, 0)
    else:
        start, full_start, full_end, end = split_blocks(
            first_of_first, end_of_first, first_of_last, end_of_last, BLOCK_SIZE
        )
        span = listed_span(listed, entries_ptr, start, full_start, full_end, end, MASK)
    return span


@triton.jit
def load_list(spans_ptr, line, BLOCK_SIZE: tl.constexpr):
    """Of the list of the tile that begins at `line`: its start, the start of its partial blocks, its end."""
    listed = (0, 0, 0)
    if BLOCK_SIZE != 0:
        spans_ptr += 8 * (line // BLOCK_SIZE)
        listed = (tl.load(spans_ptr), tl.load(spans_ptr + 1), tl.load(spans_ptr + 2))
    return listed


@triton.jit
def listed_span(listed, entries_ptr, start, full_start, full_end, end, MASK: tl.constexpr):
    """The span of a list, restricted by an interval mask. start ... end: its split_blocks."""
    first, partial, last = listed
    if MASK == "full":
        span = (first, first, partial, partial, partial, last)
    else:
        # how many full and partial blocks come before each bound: six counts in the bytes of one sum, since
        # every sum makes the threads wait for each other
        full_0, full_1, full_2, full_3, partial_0, partial_3 = 0, 0, 0, 0, 0, 0
        for position in tl.range(first, last, CHUNK, num_stages=1):
            positions = position + tl.arange(0, CHUNK)
            number = tl.load(entries_ptr + 2 * positions, mask=positions < last, other=2147483647)
            before_start = (number < start).to(tl.int64)
            before_end = (number < end).to(tl.int64)
            of_full = before_start + ((number < full_start).to(tl.int64) << 8)
            of_full += ((number < full_end).to(tl.int64) << 16) + (before_end << 24)
            of_partial = (before_start << 32) + (before_end << 40)
            counts = tl.sum(tl.where(positions < partial, of_full, of_partial))
            full_0 += (counts & 255).to(tl.int32)
            full_1 += (counts >> 8 & 255).to(tl.int32)
            full_2 += (counts >> 16 & 255).to(tl.int32)
            full_3 += (counts >> 24 & 255).to(tl.int32)
            partial_0 += (counts >> 32 & 255).to(tl.int32)
            partial_3 += (counts >> 40 & 255).to(tl.int32)
        span = (
            first + full_0,
            first + full_1,
            first + full_2,
            first + tl.maximum(full_3, full_0),
            partial + partial_0,
            partial + tl.maximum(partial_3, partial_0),
        )
    return span


@triton.jit
def n_tiles(span, CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles of a span the mask cuts, with CUT; otherwise how many it does not."""
    n = n_blocks(span[0], span[1], span[2], span[3], CUT)
    if BLOCK_SIZE != 0:
        if CUT:
            n += span[5] - span[4]
        n *= BLOCK_SIZE // BLOCK
    return n


@triton.jit
def tile_at(i, span, entries_ptr, CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The first line of the i-th of the tiles that `n_tiles` counts, and the tile of bits of its block."""
    bits = 0
    if BLOCK_SIZE == 0:
        line = block_at(i, span[0], span[1], span[2], CUT) * BLOCK
    else:
        tiles_in_block: tl.constexpr = BLOCK_SIZE // BLOCK
        position = block_at(i // tiles_in_block, span[0], span[1], span[2], CUT)
        if CUT:
            beyond = i // tiles_in_block - n_blocks(span[0], span[1], span[2], span[3], CUT)
            position = tl.where(beyond >= 0, span[4] + beyond, position)
            bits = tl.load(entries_ptr + 2 * position + 1)
        line = tl.load(entries_ptr + 2 * position) * BLOCK_SIZE + i % tiles_in_block * BLOCK
    return line, bits


@triton.jit
def visible_bits(
    bits_ptr, tile, first_row, first_column,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N), True where a tile of bits is set; its rows are queries, or keys if transposed.

    first_column: a multiple of BLOCK_N. BLOCK_N: a multiple of 32, or 16, which reads half a word.
    """
    N_WORDS: tl.constexpr = (BLOCK_N + 31) // 32
    EIGHTS: tl.constexpr = BLOCK_N // 8 // N_WORDS
    rows = first_row % BLOCK_SIZE + tl.arange(0, BLOCK_M)
    words_ptr = bits_ptr + tl.cast(tile, tl.int64) * (BLOCK_SIZE * BLOCK_SIZE // 32)
    words_ptr += rows * (BLOCK_SIZE // 32) + first_column % BLOCK_SIZE // 32
    # column = 32 * dim 1 + 8 * dim 2 + 2 * dim 3 + dim 4. A thread holds a single index of dim 3: it shifts a
    # word by that, and takes bits at constant positions
    word = tl.reshape(tl.arange(0, N_WORDS), (1, N_WORDS, 1, 1, 1))
    own = tl.reshape(2 * tl.arange(0, 4), (1, 1, 1, 4, 1))
    if BLOCK_N < 32:
        own += first_column % 32
    eight = tl.reshape(8 * tl.arange(0, EIGHTS), (1, 1, EIGHTS, 1, 1))
    one = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2))
    words = tl.zeros([BLOCK_M, N_WORDS, 1, 4, 1], tl.int32)
    # one word per row at a time: (BLOCK_M, BLOCK_N) addresses would not fit into registers
    for w in tl.static_range(N_WORDS):
        of_rows = tl.reshape(tl.load(words_ptr + w), (BLOCK_M, 1, 1, 1, 1))
        words = tl.where(word == w, of_rows >> own, words)
    return tl.reshape((words >> (eight + one)) & 1 != 0, (BLOCK_M, BLOCK_N))
