"""Which rows a tile of queries has, and which keys it visits, in the forward kernel and dq.py.

tiles: forward.Tiles or dq.Tiles. A tile is CONSUMERS * ROWS queries of one head.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.block_lists import BLOCK_SIZE
from kernels.hopper.schedule import blocks_between, quotient

# rows of one warpgroup's products
ROWS = gl.constexpr(64)


@gluon.jit
def locate(tiles, i):
    """The batch, head in it, first row and ranges of places of the i-th tile in order, see `places`.

    A place is a block of BLOCK_N keys, or a part of that size of a listed block.
    """
    head, tile = tiles.order.find(i)
    batch = quotient(head, tiles.by_n_head)
    head -= batch * tiles.n_head
    if tiles.mask.KIND == "blocks":
        PARTS: gl.constexpr = BLOCK_SIZE // tiles.BLOCK_N
        rank = tiles.order.n_tiles - 1 - tile
        line, begin, whole_end, end = tiles.mask.lists.longest(batch, head, rank)
        row = line * BLOCK_SIZE
        ranges = begin * PARTS, begin * PARTS, whole_end * PARTS, end * PARTS
    else:
        # where the rows do not fill all tiles, the surplus lies before row 0, where a causal mask hides most
        missing = (tiles.order.n_tiles * (tiles.CONSUMERS * ROWS) - tiles.mask.seq_q) // ROWS
        row = (tile * tiles.CONSUMERS - missing) * ROWS
        ranges = places(tiles, batch, row, tiles.CONSUMERS * ROWS)
    return batch, head, row, ranges[0], ranges[1], ranges[2], ranges[3]


@gluon.jit
def places(tiles, batch, row, N_ROWS: gl.constexpr):
    """What N_ROWS rows from `row` on visit under an interval mask, in the form of blocks_between."""
    first_of_first, end_of_first = tiles.mask.keys_of(batch, gl.maximum(row, 0))
    first_of_last, end_of_last = tiles.mask.keys_of(batch, gl.maximum(row + N_ROWS - 1, 0))
    # where rows end apart, the first row's last key is masked, too: so every row has seen a key before blocks
    # without a mask, see kept_places_end
    end_of_first -= (end_of_first < end_of_last).to(gl.int32)
    return blocks_between(first_of_first, end_of_first, first_of_last, end_of_last, tiles.BLOCK_N)


@gluon.jit
def kept_places_end(tiles, whole_begin, whole_end, own_end, anew):
    """The end of the places that keep the maximum of those visited before: every row has seen a key by then.

    A list's cut blocks, which are visited first, may hide all keys from a row. An interval's do not, where
    there are whole blocks beside them. A tile that is computed anew keeps none, see overflow.py.
    """
    if tiles.mask.KIND == "blocks":
        kept_end = whole_end - 1
    else:
        kept_end = gl.where(whole_begin < whole_end, gl.minimum(whole_end, own_end - 1), 0)
    return gl.where(anew > 0, -1, kept_end)


@gluon.jit
def key_block(tiles, place):
    """The block of BLOCK_N keys at a place."""
    if tiles.mask.KIND == "blocks":
        PARTS: gl.constexpr = BLOCK_SIZE // tiles.BLOCK_N
        part = place & (PARTS - 1)
        block = tiles.mask.lists.block((place - part) // PARTS) * PARTS + part
    else:
        block = place
    return block


@gluon.jit
def words_at(tiles, place, lines, x):
    """The bits of the keys at a place, see block_lists.BlockLists.words."""
    PARTS: gl.constexpr = BLOCK_SIZE // tiles.BLOCK_N
    part = place & (PARTS - 1)
    return tiles.mask.lists.words((place - part) // PARTS, lines, part * tiles.BLOCK_N, x)


@gluon.jit
def own_places(tiles, batch, row, begin, whole_begin, whole_end, end):
    """What a warpgroup's rows visit of what its tile does: all of a list, of an interval what they see."""
    own_begin = begin
    own_end = end
    if tiles.mask.KIND != "blocks":
        own_begin, whole_begin, whole_end, own_end = places(tiles, batch, row, ROWS)
        if tiles.mask.KIND == "intervals":
            # the interval of rows that see nothing may lie past the last block that the tile visits
            own_begin = gl.minimum(own_begin, end - 1)
            own_end = gl.minimum(own_end, end)
        # the first tile's surplus rows lie before row 0
        if row < 0:
            own_begin = begin
            own_end = begin
    return own_begin, whole_begin, whole_end, own_end


@gluon.jit
def skip(tiles, n_k, n_v):
    """Releases a block of keys and values that only other rows of the tile see.

    A warpgroup that did not wait for the block could release its buffer before it has arrived.
    """
    tiles.k_ring.take(n_k)
    tiles.k_ring.release(n_k)
    tiles.v_ring.take(n_v)
    tiles.v_ring.release(n_v)
