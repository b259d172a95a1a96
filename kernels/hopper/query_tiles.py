"""Which rows a tile of queries has, and which keys it visits, in the forward kernel and dq.py.

tiles: forward.Tiles or dq.Tiles. A tile is CONSUMERS * ROWS queries of one head.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from kernels.hopper.block_lists import BLOCK_SIZE
from kernels.hopper.primitives import record
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
    # without a mask, see make_steps
    end_of_first -= (end_of_first < end_of_last).to(gl.int32)
    return blocks_between(first_of_first, end_of_first, first_of_last, end_of_last, tiles.BLOCK_N)


@record
class Steps:
    """The steps in which a tile or a part of it visits its places, from the last one back.

    Of a list the places without a mask come first: behind them, those with one can keep the maximum, too.
    """

    count: gl.tensor
    cut: gl.tensor  # steps that need a mask before those without one
    whole: gl.tensor  # the step with which those without one end
    kept: gl.tensor  # the first step that keeps the maximum of those before, see softmax.probabilities
    whole_end: gl.tensor  # of the places without a mask
    end: gl.tensor
    LISTED: gl.constexpr

    @gluon.jit
    def place(self, step):
        # behind the places without a mask those from whole_end to end follow
        end = self.end
        if self.LISTED:
            end = gl.where(step < self.whole, self.whole_end, self.end + self.whole)
        return end - 1 - step

    @gluon.jit
    def is_masked(self, step):
        return (step < self.cut) | (step >= self.whole)


@gluon.jit
def make_steps(tiles, begin, whole_begin, whole_end, end, anew):
    """The steps of these ranges of places; anew: whether the tile is computed anew, see overflow.py."""
    LISTED: gl.constexpr = tiles.mask.KIND == "blocks"
    count = end - begin
    cut = end - whole_end
    whole = end - whole_begin
    if LISTED:
        cut = count * 0
        whole = whole_end - begin
    # every row has seen a key by then; a tile's cut places alone may hide all keys from a row
    kept = gl.where((whole > cut) & (anew == 0), gl.maximum(cut, 1), count)
    return Steps(count, cut, whole, kept, whole_end, end, LISTED)


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
