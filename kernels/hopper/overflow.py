"""Tiles that are computed once more, because scores rose far above the maximum of their first blocks of keys.

softmax.probabilities says why that may happen. A warpgroup notes such a tile in a list in global memory.
Behind a thread block's last tile its producer sends the noted ones again, and then every block raises the
maximum.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.primitives import any_exceeds, copies_arrived, named_barrier_sync, opaque, record

# a row's sum over the maximum of its first blocks may be this large, 44 in the exponent of e; out is finite
# then, if values are below 2**63
MOST = gl.constexpr(2.0**64)
# the end of a list
NOTHING = gl.constexpr(-1)
# the hardware's named barrier at which all warpgroups wait for each other's copies
COPIES_BARRIER = gl.constexpr(12)
# the first of those at which a warpgroup votes, one for each
VOTE_BARRIER = gl.constexpr(13)


@record
class Overflow:
    """The lists of a thread block, one for each of its warpgroups; a tile is its number in order."""

    # int32: for each warpgroup of the grid the tile that it noted last, then for each tile and each warpgroup
    # of a thread block the tile that was noted before it
    notes_ptr: gl.tensor
    done: gl.shared_memory_descriptor  # the barrier behind which nothing more is noted
    CONSUMERS: gl.constexpr

    @gluon.jit
    def last_ptr(self, index):
        # opaque: otherwise the address is held in registers from kernel start on
        return self.notes_ptr + (opaque(gl.program_id(0)) * self.CONSUMERS + index)

    @gluon.jit
    def before_ptr(self, i, index):
        return self.notes_ptr + ((gl.num_programs(0) + i) * self.CONSUMERS + index)

    @gluon.jit
    def note(self, l_i, i, anew, INDEX: gl.constexpr):
        """Notes tile i if a sum of l (ROWS,) exceeds MOST or is nan, unless the tile is being computed anew.

        Masks in place of a branch, and a vote in place of a maximum over threads: those would take registers
        in all loops.
        """
        exceeds = any_exceeds(l_i, MOST, VOTE_BARRIER + INDEX)
        first = gl.arange(0, l_i.shape[0], layout=l_i.type.layout) == 0
        noted = (exceeds > anew) & first
        last = self.last_ptr(INDEX) + exceeds * 0
        before = gl.load(last, mask=noted, other=0)
        gl.store(self.before_ptr(i, INDEX) + exceeds * 0, before, mask=noted)
        gl.store(last, i + exceeds * 0, mask=noted)

    @gluon.jit
    def end(self, tiles, nth):
        """Behind a warpgroup's last tile; nth: of the number that ended its loop."""
        tiles.q_ring.release(nth)
        mbarrier.arrive(self.done, count=1)

    @gluon.jit
    def wait_for_copies(self, anew):
        """Before a tile is computed anew: its first results must not arrive behind the second ones."""
        if anew > 0:
            copies_arrived(anew, 0)
            named_barrier_sync(anew, COPIES_BARRIER, self.CONSUMERS * 128)

    @gluon.jit
    def next(self, i, index, end):
        """The tile behind i in list `index`, or the first of the next list that has one, and its list.

        It begins with i = NOTHING and index = -1. Behind the last one follows `end`.
        """
        if i >= 0:
            i = gl.load(self.before_ptr(i, index))
        while (i < 0) & (index < self.CONSUMERS - 1):
            index += 1
            i = gl.load(self.last_ptr(index))
        return gl.where(i < 0, end, i), index


@gluon.jit
def make_overflow(notes_ptr, CONSUMERS: gl.constexpr, KEEPS_MAXIMUM: gl.constexpr):
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(done, count=CONSUMERS)
    overflow = Overflow(notes_ptr, done, CONSUMERS)
    if KEEPS_MAXIMUM:
        for index in gl.static_range(CONSUMERS):
            gl.store(overflow.last_ptr(index), NOTHING)
    return overflow
