"""When dq's float32 sums are zeroed, added to, rounded and zeroed again, while they lie in L2.

The sums of SLOTS sections of heads exist at a time, section s in slot s % SLOTS. Key tiles add to the sums of
their section. Once all tiles of a section have been added, two warps of every thread block round it, a
stretch of queries at a time, and leave zeros for the section that uses the slot next, if there is one. Tiles
of that section wait for the zeros. They seldom have to: a section is one tile for each multiprocessor, and
the slot's previous user is three sections back. The last section is rounded by a kernel of its own
(prepare_and_round.py), at the speed of memory. Where it does not pay that sections take turns at the slots
(tiles.turns_pay), every section has sums of its own, and that kernel rounds them all.

There is no deadlock. Tiles and stretches are taken from counters by whoever is free, so none belongs to a
thread block that is not running yet. The first tile that is not counted yet is in progress. All that it may
wait for is its slot, which depends on earlier tiles and on two warps that wait for nobody once they have
taken a stretch. A tile that is done but not counted is counted before its thread block waits (`Sums.open`).

Every handover works alike: the thread that issued the copies waits until they have arrived, fences the
proxies and, after a barrier, releases a count. Others acquire the count, fence the proxies, and copy. This
hands the sums from adding to rounding, and the zeros from rounding to adding.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.hopper.key_tiles import KeyTiles
from kernels.hopper.primitives import (
    acquire,
    copies_arrived,
    fence_proxies,
    opaque,
    pack,
    pause,
    peek,
    record,
    thread_barrier,
)

# sections whose sums exist at a time: most thread blocks add to one, the slowest to another, one is rounded
SLOTS = gl.constexpr(3)
# int32 counts of each section
COUNTS = gl.constexpr(4)
# tiles taken, of all sections: kept with the first section
TAKEN = gl.constexpr(0)
# tiles that have been added
ADDED = gl.constexpr(1)
# stretches whose rounding has begun, and ended
BEGUN = gl.constexpr(2)
ENDED = gl.constexpr(3)

HEAD_DIM = gl.constexpr(64)
# queries of a stretch, and of each part in which it is copied, STAGES parts at a time
STRETCH = gl.constexpr(128)
PART = gl.constexpr(16)
STAGES = gl.constexpr(3)
# warps of a thread block that round
WARPS = gl.constexpr(2)


@gluon.jit
def wait_for(count, n):
    """Waits until a count has reached n; what was written before that is then visible."""
    seen = peek(count)
    while seen < n:
        pause(seen)
        seen = peek(count)
    acquire(count)


@record
class Sums:
    """The work list, its counts, and the 16-bit dq (B, Tq, H, D) by its strides, which are even."""

    work: KeyTiles
    dq_ptr: gl.tensor
    counts_ptr: gl.tensor  # (sections, COUNTS) int32
    stride_b: gl.tensor
    stride_t: gl.tensor
    stride_h: gl.tensor
    softmax_scale: gl.tensor
    # sections that the two warps round: all but the last, or none
    n_rounded: gl.tensor
    SUMS_DQ: gl.constexpr

    @gluon.jit
    def count(self, section, WHICH: gl.constexpr):
        """The address of one of a section's counts."""
        return self.counts_ptr + section * COUNTS + WHICH

    @gluon.jit
    def heads(self):
        """Query heads of a section."""
        return opaque(self.work.order.section) * self.work.group

    @gluon.jit
    def stretches(self):
        """Stretches of a section."""
        return self.heads() * (self.work.padded // STRETCH)

    @gluon.jit
    def dq_of(self, section, stretch):
        """The address of dq of a stretch of the section, and how many rows its head has from there."""
        head = stretch // (self.work.padded // STRETCH)
        row = stretch * STRETCH - head * self.work.padded
        head += section * self.heads()
        n_head = opaque(self.work.n_kv_head) * self.work.group
        batch = head // n_head
        head -= batch * n_head
        place = batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h
        return self.dq_ptr + (place + row.to(gl.int64) * self.stride_t), self.work.mask.seq_q - row

    @gluon.jit
    def is_open(self, section):
        """Whether tiles of a section may add: the previous user of its slot is rounded and zeroed."""
        is_open = (section < SLOTS) | (self.n_rounded == 0)
        # a compile-time and a run-time condition do not mix
        if self.SUMS_DQ:  # noqa: SIM102
            if not is_open:
                is_open = acquire(self.count(section - SLOTS, ENDED)) == self.stretches()
                fence_proxies(section)
        return is_open

    @gluon.jit
    def open(self, section, uncounted):
        """Waits until tiles of a section may add; first counts the tile of section `uncounted`, if not -1."""
        if uncounted >= 0:
            self.count_tile(uncounted, 0)
        wait_for(self.count(section - SLOTS, ENDED), self.stretches())
        fence_proxies(section)

    @gluon.jit
    def behind(self, section):
        """What to subtract from a row's number among all heads, to get its number among the sums."""
        before = section - section % SLOTS
        return gl.where(self.n_rounded == 0, 0, before) * self.heads() * self.work.padded

    @gluon.jit
    def count_tile(self, section, PENDING: gl.constexpr):
        """Counts a tile of the section, once all copies have arrived but the last PENDING, of other tiles."""
        copies_arrived(section, PENDING)
        thread_barrier()
        gl.atomic_add(self.count(section, ADDED), 1, sem="release")


@record
class Parts:
    """Shared memory of the two warps."""

    sums: gl.shared_memory_descriptor  # (STAGES, PART, D) float32, in the order of primitives.fragments
    zeros: gl.shared_memory_descriptor  # (PART, D)
    full: gl.shared_memory_descriptor  # (STAGES, 1)


@gluon.jit
def make_parts(part_desc):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return Parts(
        gl.allocate_shared_memory(gl.float32, [STAGES, PART, HEAD_DIM], part_desc.layout),
        gl.allocate_shared_memory(gl.float32, [PART, HEAD_DIM], part_desc.layout),
        full,
    )


@gluon.jit
def copy_part(parts, part_desc, line, n):
    """Starts copying the n-th part, from row `line` of the sums on."""
    full = parts.full.index(n % STAGES)
    mbarrier.expect(full, part_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(part_desc, [line, 0], full, parts.sums.index(n % STAGES))


@gluon.jit
def round_sums(sums, parts, part_desc):
    """Rounds the sections in order: what the two warps do."""
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    gl.static_assert(STRETCH % PART == 0)
    gl.static_assert(PART % 8 == 0)
    gl.static_assert(STAGES * PART <= STRETCH)
    parts.zeros.store(gl.full([PART, HEAD_DIM], 0.0, gl.float32, ZEROS))
    fence_async_shared()
    thread_barrier()
    # parts so far
    n = 0
    order = sums.work.order
    for section in range(sums.n_rounded):
        wait_for(sums.count(section, ADDED), order.section * order.n_tiles)
        fence_proxies(section)
        # the last section needs zeros too, although another kernel rounds it
        zeroes = section + SLOTS <= sums.n_rounded
        stretch = gl.atomic_add(sums.count(section, BEGUN), 1, sem="relaxed")
        while stretch < sums.stretches():
            # row of the sums
            line = (section % SLOTS) * sums.heads() * sums.work.padded + stretch * STRETCH
            for i in gl.static_range(STAGES):
                copy_part(parts, part_desc, line + i * PART, n + i)
            dq_ptr, n_rows = sums.dq_of(section, stretch)
            for i in range(STRETCH // PART):
                row = i * PART
                mbarrier.wait(parts.full.index(n % STAGES), (n // STAGES) & 1)
                part = parts.sums.index(n % STAGES)
                for eight in gl.static_range(0, PART, 8):
                    round_eight(
                        part.slice(eight, 8, 0), dq_ptr + (row + eight) * sums.stride_t, sums.stride_t,
                        n_rows - row - eight, sums.softmax_scale
                    )  # fmt: skip
                thread_barrier()
                if zeroes:
                    tma.async_copy_shared_to_global(part_desc, [line + row, 0], parts.zeros)
                if i + STAGES < STRETCH // PART:
                    copy_part(parts, part_desc, line + row + STAGES * PART, n + STAGES)
                n += 1
            if zeroes:
                copies_arrived(section, 0)
                thread_barrier()
                gl.atomic_add(sums.count(section, ENDED), 1, sem="release")
            stretch = gl.atomic_add(sums.count(section, BEGUN), 1, sem="relaxed")


@gluon.jit
def round_eight(part, dq_ptr, stride_t, n_rows, scale):
    """Rounds the sums of eight queries, of which n_rows exist."""
    # a thread holds one, half and a bit of eighth of a fragment: it loads 16 bytes at a time, and stores 4
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16]], [[0, 4], [0, 8], [0, 32], [1, 0], [2, 0]], [[4, 0]], [], [8, HEAD_DIM]
    )
    x = part.load(LAYOUT) * scale
    # warp, eighth in two parts, pair, half, one
    low, high = gl.split(gl.permute(gl.reshape(x, [4, 4, 2, 4, 2, 2]), (0, 1, 3, 4, 5, 2)))
    even, odd = gl.split(pack(low, high, dq_ptr.dtype.element_ty))
    pairs_ptr = dq_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    store_rows(pairs_ptr, even, stride_t, 0, n_rows)
    store_rows(pairs_ptr + stride_t // 2, odd, stride_t, 1, n_rows)


@gluon.jit
def store_rows(ptr, x, stride, first, n_rows):
    """Stores x (warp, eighth, pair, half) int32, pairs of channels, of every second of eight queries."""
    left, right = gl.split(x)
    LAYOUT: gl.constexpr = left.type.layout
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eighth = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    column = gl.expand_dims(8 * gl.expand_dims(warp, 1) + gl.expand_dims(eighth, 0), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 0)
    ptrs = ptr + (column + row * stride)
    gl.store(ptrs, left, mask=2 * row + first < n_rows)
    gl.store(ptrs + 4, right, mask=2 * row + first < n_rows)
