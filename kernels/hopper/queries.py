"""Which queries a tile of keys visits in the backward kernels, and their probabilities.

A place is a block of ROWS queries, or half of a listed one; see schedule.Mask.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.block_lists import BLOCK_SIZE, hide_unseen
from kernels.hopper.primitives import opaque, settle
from kernels.hopper.schedule import blocks_between

# keys of one warpgroup, and the sides of its part of dq
ROWS = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
BLOCK_N = gl.constexpr(128)


@gluon.jit
def visit(mask, batch, kv_head, tile):
    """First key of a tile, and the ranges of places that it visits, as schedule.blocks_between gives blocks.

    Listed tiles are counted from the longest list.
    """
    if mask.KIND == "blocks":
        tile = mask.lists.longest(batch, kv_head, tile)
    key = tile * BLOCK_N
    if mask.KIND == "blocks":
        # a listed block is two of ROWS
        begin, whole_begin, whole_end, end = mask.lists.places(batch, kv_head, tile)
        begin, whole_begin, whole_end, end = begin * 2, whole_begin * 2, whole_end * 2, end * 2
    else:
        first_of_first, end_of_first = mask.queries_of(batch, key)
        first_of_last, end_of_last = mask.queries_of(batch, key + BLOCK_N - 1)
        begin, whole_begin, whole_end, end = blocks_between(
            first_of_first, end_of_first, first_of_last, end_of_last, ROWS
        )
        # the end of the keys needs a mask in every block
        if key + BLOCK_N > mask.seq_k:
            whole_end = whole_begin
    return key, begin, whole_begin, whole_end, end


@gluon.jit
def query_block(mask, place):
    """The block of ROWS queries at a place."""
    return mask.lists.block(place >> 1) * 2 + (place & 1) if mask.KIND == "blocks" else place


@gluon.jit
def key_limits(mask, batch, keys, nowhere):
    """What `hide` takes of each key: its interval of queries, or its line in tiles of bits."""
    if mask.KIND == "blocks":
        first = keys % BLOCK_SIZE
        end = first
    else:
        first, end = mask.queries_of(batch, keys)
        # keys behind the last see no query
        first = gl.where(keys < mask.seq_k, first, nowhere)
    return first, end


@gluon.jit
def hide(mask, p, first, end, place):
    """p (ROWS, ROWS) of the queries at a place, 0 where a key does not see them; see key_limits."""
    if mask.KIND == "blocks":
        words = mask.lists.words(place >> 1, first, (place & 1) * ROWS, p)
        p = hide_unseen(p, words, 0.0)
    else:
        p = hide_outside(mask, p, first - place * ROWS, end - place * ROWS)
    return p


@gluon.jit
def hide_outside(mask, p, first, end):
    """0 outside of each key's interval of queries, counted from the first column."""
    index = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, p.type.layout)), 0)
    # as in softmax.hide
    eight = index & -8
    rest = index & 7
    visible = eight >= gl.expand_dims(opaque(first), 1) - rest
    if mask.KIND == "window" or mask.KIND == "intervals":
        visible = visible & (eight < gl.expand_dims(opaque(end), 1) - rest)
    return gl.where(visible, p, 0.0)


@gluon.jit
def columns(x, LAYOUT: gl.constexpr):
    """One value for each query, spread over the keys, for a product to begin from."""
    zeros = gl.full([ROWS, x.shape[0]], 0.0, gl.float32, LAYOUT)
    spread, zeros = gl.broadcast(gl.expand_dims(x.load(gl.SliceLayout(0, LAYOUT)), 0), zeros)
    return settle(spread)


@gluon.jit
def scores(tiles, k, v, n):
    """Issues S - lse / scale and dP - delta, (keys, queries), of queries n; with q and dout, (queries, D)."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stage = tiles.q_ring.take(n)
    q = tiles.q.index(stage).reshape([ROWS, k.shape[1]])
    dout = tiles.dout.index(stage).reshape([ROWS, k.shape[1]])
    minus_lse = columns(tiles.minus_lse.index(stage), S_LAYOUT)
    minus_delta = columns(tiles.minus_delta.index(stage), S_LAYOUT)
    s = warpgroup_mma(k, q.permute((1, 0)), minus_lse, is_async=True)
    dp = warpgroup_mma(v, dout.permute((1, 0)), minus_delta, is_async=True)
    return s, dp, q, dout


@gluon.jit
def probabilities(mask, s, place, masked, first, end, scale_log2):
    """P of the queries at a place, (keys, queries), once s has been computed; dP may still be on its way."""
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * scale_log2)
    if masked:
        p = hide(mask, p, first, end, place)
    return p
