"""What a causal mask, a window, documents or packed sequences leave of a BlockMask's lists, in plain Triton.

An attention kernel applies one kind of mask. So a mask that comes with a block mask is first applied to its
lists, in one launch that neither waits for the GPU nor reads anything on the host. A line keeps its place
among the entries and can only lose some of them.

A line's intervals begin between two keys and end between two others, and no bound ever moves back from line
to line. So few blocks are cut, and each gets a number for which the host can reserve room: in the blocks in
which the intervals of line x begin (or end), block + x is above the numbers of all earlier lines.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.portable.masks import keys_of_queries, queries_of_keys
from kernels.problem import Problem, list_strides

# entries processed at a time: with 32, Triton 3.7 spills
CHUNK = 16


@triton.jit
def classified(
    entries_ptr, positions, whole_end, end, begins, begun, ends, ended, BLOCK: tl.constexpr
):  # fmt: skip
    """Block, and whether it stays whole, stays with a tile of bits, or is cut, of the entries at `positions`.

    A block is cut, and gets a new tile, if intervals begin (from `begins` to `begun`) or end (from `ends` to
    `ended`) inside it.
    """
    block = tl.load(entries_ptr + 2 * positions, mask=positions < end, other=0)
    first, behind = block * BLOCK, block * BLOCK + BLOCK
    stays = (positions < end) & (first < ended) & (behind > begins)
    cut = stays & ((first < begun) | (behind > ends))
    whole = stays & ~cut & (positions < whole_end)
    return block, whole, stays & ~whole, cut


@triton.jit(do_not_specialize=[
    "stride_batch", "stride_head", "n_head", "n_entries", "n_tiles", "n_others", "seq_q", "seq_k", "window"
])  # fmt: skip
def cut_kernel(
    spans_ptr, entries_ptr, bits_ptr, bounds_ptr, new_spans_ptr, new_entries_ptr, new_bits_ptr,
    stride_batch, stride_head, n_head, n_entries, n_tiles, n_others, seq_q, seq_k, window,
    MASK: tl.constexpr, OF_QUERIES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes one line's entries and spans, and the tiles of bits of the blocks that are cut.

    Grid: (lines, B * H of the new lists). n_entries: from one batch's new entries to the next batch's, 0
    where each batch has old entries of its own. n_others: blocks of the other side.
    """
    n_lines = tl.num_programs(0)
    rank, batch, head = tl.program_id(0), tl.program_id(1) // n_head, tl.program_id(1) % n_head
    span_ptr = spans_ptr + (batch * stride_batch + head * stride_head + 8 * rank + 4)
    begin, whole_end = tl.load(span_ptr), tl.load(span_ptr + 1)
    end, line = tl.load(span_ptr + 2), tl.load(span_ptr + 3)

    lines = line * BLOCK + tl.arange(0, BLOCK)
    if OF_QUERIES:
        bounds_ptr += 2 * batch.to(tl.int64) * seq_q
        first_seen, end_seen = keys_of_queries(lines, seq_q, seq_k, window, bounds_ptr, MASK)
    else:
        bounds_ptr += 2 * batch.to(tl.int64) * seq_k
        first_seen, end_seen = queries_of_keys(lines, seq_q, seq_k, window, bounds_ptr, MASK)
    begins, begun = tl.min(first_seen), tl.max(first_seen)
    ends, ended = tl.min(end_seen), tl.max(end_seen)

    n_whole = 0
    for position in range(begin, end, CHUNK):
        positions = position + tl.arange(0, CHUNK)
        _, whole, _, _ = classified(entries_ptr, positions, whole_end, end, begins, begun, ends, ended, BLOCK)
        n_whole += tl.sum(whole.to(tl.int32))

    new_begin = batch * n_entries + begin
    next_whole, next_partial = new_begin, new_begin + n_whole
    slots = n_lines + n_others
    for position in range(begin, end, CHUNK):
        positions = position + tl.arange(0, CHUNK)
        block, whole, partial, cut = classified(
            entries_ptr, positions, whole_end, end, begins, begun, ends, ended, BLOCK
        )
        tile = tl.load(entries_ptr + 2 * positions + 1, mask=positions < end, other=0)
        # one slot for each block in which intervals begin, one for each other block in which they end
        slot = block + line + tl.where((block * BLOCK < begun) & (block * BLOCK + BLOCK > begins), 0, slots)
        slot += n_tiles + tl.program_id(1) * (2 * slots)
        place = tl.where(
            whole,
            next_whole + tl.cumsum(whole.to(tl.int32)) - 1,
            next_partial + tl.cumsum(partial.to(tl.int32)) - 1,
        )
        tl.store(new_entries_ptr + 2 * place, block, mask=whole | partial)
        tl.store(new_entries_ptr + 2 * place + 1, tl.where(cut, slot, tile), mask=whole | partial)
        if tl.max(cut.to(tl.int32)) > 0:
            of_line = tl.arange(0, BLOCK)[None, :] * (BLOCK // 32)
            old_ptr = bits_ptr + tile.to(tl.int64)[:, None] * (BLOCK * BLOCK // 32) + of_line
            new_ptr = new_bits_ptr + slot.to(tl.int64)[:, None] * (BLOCK * BLOCK // 32) + of_line
            for word in tl.static_range(BLOCK // 32):
                origin = block[:, None] * BLOCK + 32 * word
                # int64, where a shift by 32 is defined
                below_first = tl.minimum(tl.maximum(first_seen[None, :] - origin, 0), 32).to(tl.int64)
                below_end = tl.minimum(tl.maximum(end_seen[None, :] - origin, 0), 32).to(tl.int64)
                seen = ((1 << below_end) - 1) & ~((1 << below_first) - 1)
                old = tl.load(old_ptr + word, mask=cut[:, None], other=0)
                tl.store(new_ptr + word, old & seen.to(tl.int32), mask=cut[:, None])
        next_whole += tl.sum(whole.to(tl.int32))
        next_partial += tl.sum(partial.to(tl.int32))

    new_spans_ptr += tl.program_id(1).to(tl.int64) * n_lines * 8
    for place in tl.static_range(2):
        new_ptr = new_spans_ptr + (8 * line if place == 0 else 8 * rank + 4)
        tl.store(new_ptr, new_begin)
        tl.store(new_ptr + 1, new_begin + n_whole)
        tl.store(new_ptr + 2, next_partial)
        tl.store(new_ptr + 3, line)


def cut_lists(
    lists: tuple[Tensor, Tensor, Tensor], problem: Problem, batch: int, seq_q: int, seq_k: int,
    *, of_queries: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The spans, entries and bits that problem.mask leaves of the lists of queries, or of keys.

    In the form of kernels/block_mask.py, but ranked by how long the lists were before.
    """
    spans, entries, bits = lists
    n_head, n_lines = spans.shape[1:3]
    n_others = triton.cdiv(seq_k if of_queries else seq_q, problem.block_size)
    is_shared = len(spans) < batch
    n_new = 2 * batch * n_head * (n_lines + n_others)
    new_bits = bits.new_empty(len(bits) + n_new, *bits.shape[1:])
    new_bits[: len(bits)] = bits
    new_entries = entries.new_empty(len(entries) * (batch if is_shared else 1), 2)
    new_spans = spans.new_empty(batch, *spans.shape[1:])
    bounds = problem.key_bounds if of_queries else problem.query_bounds
    launch(
        cut_kernel,
        (n_lines, batch * n_head),
        spans,
        entries,
        bits,
        spans if bounds is None else bounds,
        new_spans,
        new_entries,
        new_bits,
        *list_strides(lists),
        n_head,
        len(entries) if is_shared else 0,
        len(bits),
        n_others,
        seq_q,
        seq_k,
        problem.window or 0,
        MASK=problem.mask,
        OF_QUERIES=of_queries,
        BLOCK=problem.block_size,
        CHUNK=CHUNK,
    )
    return new_spans, new_entries, new_bits


def without_intervals(
    problem: Problem, batch: int, seq_q: int, seq_k: int, *, rows: bool, columns: bool
) -> Problem:
    """The problem with its block mask alone: the other mask is applied to the lists of rows, columns or both.

    A problem that has only one mask is returned as it is.
    """
    if not problem.blocks or problem.mask == "full":
        return problem
    row_spans, row_entries, column_spans, column_entries, bits, transposed_bits = problem.blocks
    if rows:
        row_spans, row_entries, bits = cut_lists(
            problem.row_lists, problem, batch, seq_q, seq_k, of_queries=True
        )
    if columns:
        column_spans, column_entries, transposed_bits = cut_lists(
            problem.transposed_column_lists, problem, batch, seq_q, seq_k, of_queries=False
        )
    blocks = (row_spans, row_entries, column_spans, column_entries, bits, transposed_bits)
    return replace(problem, blocks=blocks, causal=False, window=None, key_bounds=None, query_bounds=None)
