"""The key tiles of the backward kernels: who takes which, which queries each visits, the probabilities.

A place is a block of ROWS queries, or half of a listed block; see schedule.Mask.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.hopper import dropout
from kernels.hopper.block_lists import BLOCK_SIZE, hide_unseen
from kernels.hopper.primitives import (
    fragments,
    index_of,
    opaque,
    record,
    settle,
    thread_barrier,
)
from kernels.hopper.schedule import Mask, TileOrder, blocks_between, quotient
from kernels.hopper.wide_heads import copies_of, copy_in

# keys of one warpgroup, and the side of a square of dq
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
BLOCK_N = gl.constexpr(128)

# arguments of the kernels that are not worth specializing on
NOT_SPECIALIZED = [
    "group", "seq_q", "seq_k", "window", "padded", "n_heads", "n_tiles", "n_kv_head", "section",
    "by_section_tiles", "by_section", "by_last_section", "by_n_kv_head",
    "stride_list_batch", "stride_list_head", "stride_dqb", "stride_dqt", "stride_dqh", "n_rounded",
    "keep_limit", "keep_line",
]  # fmt: skip


@record
class KeyTiles:
    """All tiles of KEYS keys, which the thread blocks take one by one from a counter."""

    order: TileOrder
    mask: Mask
    n_kv_head: gl.tensor
    by_n_kv_head: gl.tensor
    group: gl.tensor
    padded: gl.tensor  # rows of one head in lse, delta and dq
    KEYS: gl.constexpr

    @gluon.jit
    def locate(self, i):
        """The batch, head of k and v, first key and ranges of places of the i-th tile in order."""
        head, tile = self.order.find(i)
        batch = quotient(head, self.by_n_kv_head)
        kv_head = head - batch * self.n_kv_head
        key, begin, whole_begin, whole_end, end = visit(self.mask, batch, kv_head, tile, self.KEYS)
        return batch, kv_head, key, begin, whole_begin, whole_end, end

    @gluon.jit
    def first_line(self, batch, kv_head, g):
        """Where query head g of the group begins in lse, delta and dq."""
        return ((batch * self.n_kv_head + kv_head) * self.group + g) * self.padded

    @gluon.jit
    def take(self, counter_ptr):
        """The next tile in order that nobody has taken."""
        return gl.atomic_add(counter_ptr, 1, sem="relaxed")

    @gluon.jit
    def take_behind_the_first(self, counter_ptr):
        """The same, where each thread block began with the tile of its own number."""
        return gl.num_programs(0) + self.take(counter_ptr)


@gluon.jit
def make_key_tiles(
    mask, group, padded, n_heads, n_tiles, n_kv_head, section, by_section_tiles, by_section, by_last_section,
    by_n_kv_head, KEYS: gl.constexpr = BLOCK_N
):  # fmt: skip
    """The tiles of all heads of k and v, from the arguments of the kernels."""
    order = TileOrder(
        n_heads, n_tiles, section,
        by_section_tiles, by_section, by_last_section, False
    )  # fmt: skip
    return KeyTiles(order, mask, n_kv_head, by_n_kv_head, group, padded, KEYS)


@gluon.jit
def copy_queries(
    tiles, q_desc, dout_desc, minus_lse_desc, minus_delta_desc, batch, head, line, place, n,
    REST: gl.constexpr = 0
):  # fmt: skip
    """Fills use n of the ring of queries with the queries at a place of a head."""
    row = query_block(tiles.work.mask, place) * ROWS
    stage, full = tiles.q_ring.fill(n)
    if tiles.dropout.IS_ON:
        tiles.dropout.leave_rows(stage, batch, head, row)
    nbytes: gl.constexpr = copies_of(REST) * q_desc.block_type.nbytes + minus_lse_desc.block_type.nbytes
    mbarrier.expect(full, 2 * nbytes)
    copy_in(q_desc, batch, head, row, full, tiles.q.index(stage), REST)
    tma.async_copy_global_to_shared(minus_lse_desc, [line + row], full, tiles.minus_lse.index(stage))
    copy_in(dout_desc, batch, head, row, full, tiles.dout.index(stage), REST)
    tma.async_copy_global_to_shared(minus_delta_desc, [line + row], full, tiles.minus_delta.index(stage))


@gluon.jit
def visit(mask, batch, kv_head, tile, KEYS: gl.constexpr):
    """The first of KEYS keys of a tile, and the ranges of places that it visits, see blocks_between.

    Tiles with lists are numbered from the longest list on.
    """
    if mask.KIND == "blocks":
        PARTS: gl.constexpr = BLOCK_SIZE // KEYS
        line, begin, whole_end, end = mask.lists.longest(batch, kv_head, tile // PARTS)
        key = line * BLOCK_SIZE + tile % PARTS * KEYS
        # a listed block is two places
        begin, whole_end, end = begin * 2, whole_end * 2, end * 2
        whole_begin = begin
    else:
        key = tile * KEYS
        first_of_first, end_of_first = mask.queries_of(batch, key)
        first_of_last, end_of_last = mask.queries_of(batch, key + KEYS - 1)
        if mask.KIND == "intervals":
            # the interval of keys that nobody sees may begin past the last query, among other heads' sums
            # (seq_q - 1 instead would be computed at kernel start, and spilled)
            first_of_first = gl.minimum(first_of_first + 1, mask.seq_q) - 1
        begin, whole_begin, whole_end, end = blocks_between(
            first_of_first, end_of_first, first_of_last, end_of_last, ROWS
        )
        # a tile that reaches past the last key needs a mask in every block
        if key + KEYS > mask.seq_k:
            whole_end = whole_begin
    return key, begin, whole_begin, whole_end, end


@gluon.jit
def query_block(mask, place):
    """The block of ROWS queries at a place."""
    return mask.lists.block(place >> 1) * 2 + (place & 1) if mask.KIND == "blocks" else place


@gluon.jit
def key_limits(mask, batch, key, nowhere, like):
    """What `hide` needs of each key from `key` on, for P in the layout of `like`.

    With lists, the key's line in tiles of bits; otherwise its interval of queries, (ROWS, 4), minus the part
    of a thread's column numbers that the compiler does not know, see hide_outside.
    """
    if mask.KIND == "blocks":
        first = (key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, like.type.layout))) % BLOCK_SIZE
        end = first
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, pairs_of_eights(like).type.layout))
        keys = key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        first, end = mask.queries_of(batch, keys)
        # no query sees the keys past the last one
        first = gl.where(keys < mask.seq_k, first, nowhere)
        pair = gl.expand_dims(2 * gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT)), 0)
        # opaque: otherwise the pair is subtracted in each step, which takes one more register
        first = opaque(gl.expand_dims(first, 1) - pair)
        end = opaque(gl.expand_dims(end, 1) - pair)
    return first, end


@gluon.jit
def hide(mask, p, first, end, place):
    """p (ROWS, ROWS) of the queries at a place, 0 where they do not see a key; see key_limits."""
    if mask.KIND == "blocks":
        words = mask.lists.words(place >> 1, first, (place & 1) * ROWS, p)
        p = hide_unseen(p, words, 0.0)
    else:
        p = hide_outside(mask, p, first - place * ROWS, end - place * ROWS)
    return p


@gluon.jit
def pairs_of_eights(p):
    """p (ROWS, ROWS) as (key, eight, pair, one): of each eight queries a thread holds one pair."""
    return gl.reshape(p, [ROWS, ROWS // 8, 4, 2])


@gluon.jit
def hide_outside(mask, p, first, end):
    """p, 0 outside each key's interval of queries, which is counted from the first column."""
    x = pairs_of_eights(p)
    LAYOUT: gl.constexpr = x.type.layout
    # as in softmax.hide, but the compiler also knows which one of a pair a column is
    known = 8 * index_of(ROWS // 8, 1, 4, LAYOUT) + index_of(2, 3, 4, LAYOUT)
    visible = known >= gl.expand_dims(gl.expand_dims(opaque(first), 1), 3)
    if mask.KIND == "window" or mask.KIND == "intervals":
        visible = visible & (known < gl.expand_dims(gl.expand_dims(opaque(end), 1), 3))
    return gl.convert_layout(gl.reshape(gl.where(visible, x, 0.0), p.shape), p.type.layout)


@gluon.jit
def columns(x, LAYOUT: gl.constexpr):
    """One value per query, broadcast over the keys, as the initial accumulator of a product."""
    zeros = gl.full([ROWS, x.shape[0]], 0.0, gl.float32, LAYOUT)
    spread, zeros = gl.broadcast(gl.expand_dims(x.load(gl.SliceLayout(0, LAYOUT)), 0), zeros)
    return settle(spread)


@gluon.jit
def probabilities(work, s, place, masked, limits, scale_log2, LATE: gl.constexpr = False):
    """P (keys, queries) of the queries at a place, from s = S - lse / scale.

    limits: what key_limits gave; if LATE, batch and first key, so that key_limits runs only where they cut.
    """
    p = gl.exp2(s * scale_log2)
    if masked:
        first_end = limits
        if LATE:
            first_end = key_limits(work.mask, limits[0], limits[1], work.padded, s)
        p = hide(work.mask, p, first_end[0], first_end[1], place)
    return p


@gluon.jit
def begin_to_drop(tiles, like, key):
    """Dropout's words for a tile of keys, for scores in the layout of `like`."""
    dropping = gl.to_tensor(0)
    if tiles.dropout.IS_ON:
        dropping = tiles.dropout.pairs_of(like, key)
    return dropping


@gluon.jit
def draw(tiles, like, dropping, n):
    """What dropout draws for block n of queries, once it has arrived."""
    words = gl.to_tensor(0), gl.to_tensor(0)
    if tiles.dropout.IS_ON:
        # opaque: otherwise part of the address is computed at kernel start, and spilled
        row_words = tiles.dropout.read(like, opaque(n % tiles.q_ring.STAGES), TRANSPOSED=True)
        words = dropout.draw(row_words, dropping)
    return words


@gluon.jit
def begin_dp(tiles, stage, LAYOUT: gl.constexpr):
    """The initial accumulator of dP: -delta, but 0 under dropout, where dropped entries keep only -delta."""
    if tiles.dropout.IS_ON:
        dp = gl.full([ROWS, ROWS], 0.0, gl.float32, LAYOUT)
    else:
        dp = columns(tiles.minus_delta.index(stage), LAYOUT)
    return dp


@gluon.jit
def minus_deltas(tiles, stage, dp):
    """-delta of each query, in the layout of dP: what is left of dP - delta where dropout drops P."""
    of_query = gl.expand_dims(tiles.minus_delta.index(stage).load(gl.SliceLayout(0, dp.type.layout)), 0)
    of_query, _ = gl.broadcast(of_query, dp)
    return of_query


@gluon.jit
def store_ds(tiles, ds, n, INDEX: gl.constexpr):
    """Stores one warpgroup's half of the n-th dS for the warpgroup of dq; returns its full barrier.

    A store issued after a product queues behind it among the memory instructions, and the fence waits for
    the store. So the store comes before the products that need not wait for it, and `hand_over` after them.
    """
    stage, full = tiles.ds_ring.fill(n)
    # opaque: otherwise part of the address is computed at kernel start, and spilled
    tiles.ds.index(opaque(stage)).slice(INDEX * ROWS, ROWS, 0).store(ds)
    return full


@gluon.jit
def leave(buffer, x):
    """Rounds a warpgroup's dk or dv into shared memory, (ROWS, D), for another partition to copy out.

    So the warpgroup waits for no copy, and the assembler carries no copy's address around its loops.
    """
    buffer.store(x.to(buffer.dtype))


@gluon.jit
def hand_over(full):
    """Signals at their barrier that a warpgroup's stores are done."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def stage_dq(dq, buffer, PENDING: gl.constexpr):
    """Stores 64 x 64 of dq for its reduction, once at most PENDING earlier ones still read their buffers."""
    tma.store_wait(PENDING)
    thread_barrier()
    buffer.store(fragments(dq))
    fence_async_shared()
    thread_barrier()
