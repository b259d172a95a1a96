"""What intervals leave of a block mask's lists, as the Hopper kernels read them, against the definition."""

import pytest
import torch

from kernels import block_masks
from kernels.bit_tiles import unpack
from kernels.block_mask import BlockMask
from kernels.hopper.cut_lists import without_intervals
from kernels.intervals import document_bounds, varlen_bounds
from kernels.problem import Problem

BATCH = 2
SIDE = 128


def some_blocks(n_batch: int, n_head: int, seq_q: int, seq_k: int, device) -> BlockMask:
    """Full blocks, partial ones and none, in each batch and head others; a line without any."""
    blocks = torch.randint(3, (n_batch, n_head, (seq_q + 127) // SIDE, (seq_k + 127) // SIDE))
    blocks[:, :, 1:2] = 0
    shares = torch.tensor([0.0, 0.3, 1.0])[blocks].repeat_interleave(SIDE, 2).repeat_interleave(SIDE, 3)
    mask = torch.rand(n_batch, n_head, seq_q, seq_k) < shares[:, :, :seq_q, :seq_k]
    return block_masks.from_dense(mask.to(device))


def seen_by_lists(lists, seq_lines: int, seq_others: int) -> torch.Tensor:
    """(B, H, lines, others) bool; both tables of spans say the same, and whole blocks are whole."""
    spans, entries, bits = (x.cpu() for x in lists)
    n_batch, n_head, n_lines, _ = spans.shape
    n_others = (seq_others + SIDE - 1) // SIDE
    dense = torch.zeros(n_batch, n_head, n_lines, n_others, SIDE, SIDE, dtype=torch.bool)
    tiles = unpack(bits)
    for batch in range(n_batch):
        for head in range(n_head):
            of_lines = spans[batch, head, :, :4]
            assert torch.equal(of_lines[spans[batch, head, :, 7].long()], spans[batch, head, :, 4:])
            for begin, whole_end, end, line in of_lines.tolist():
                for place in range(begin, end):
                    block, tile = entries[place].tolist()
                    assert not dense[batch, head, line, block].any(), "a block is listed twice"
                    assert (place < whole_end) == bool(tiles[tile].all()), (line, block)
                    dense[batch, head, line, block] = tiles[tile]
    dense = dense.transpose(3, 4).reshape(n_batch, n_head, n_lines * SIDE, n_others * SIDE)
    return dense[:, :, :seq_lines, :seq_others]


def seen_by_bounds(problem: Problem, seq_q: int, seq_k: int) -> torch.Tensor:
    """(B or 1, 1, Tq, Tk) bool, of the intervals alone."""
    columns = torch.arange(seq_k)
    if problem.key_bounds is not None:
        first, end = problem.key_bounds.cpu()[:, :, :, None].unbind(1)
        return ((columns >= first) & (columns < end))[:, None]
    last = torch.arange(seq_q)[:, None] + seq_k - seq_q
    seen = columns <= last
    if problem.window is not None:
        seen &= columns > last - problem.window
    return seen[None, None]


def problem(mask: BlockMask, **options) -> Problem:
    return Problem(softmax_scale=1.0, blocks=tuple(mask.tensors()), **options)


@pytest.mark.parametrize(("mask_batch", "mask_head"), [(1, 2), (BATCH, 1)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(400, 400), (200, 500), (500, 200)])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "padding"])
def test_intervals_leave_of_the_lists_what_both_masks_see(kind, seq_q, seq_k, mask_batch, mask_head, device):
    options = {"causal": kind in ("causal", "window")}
    if kind == "window":
        options["window"] = 150
    if kind in ("documents", "padding"):
        seq_q = min(seq_q, seq_k)
        ids = (torch.rand(BATCH, seq_k, device=device) < 0.01).cumsum(1).int()
        if kind == "padding":
            ids = torch.where(
                torch.arange(seq_k, device=device) < torch.tensor([[70], [256]], device=device), -1, 0
            )
        key_bounds, query_bounds = document_bounds(ids.int(), seq_q, causal=kind == "documents", window=None)
        options |= {"key_bounds": key_bounds, "query_bounds": query_bounds}
    mask = some_blocks(mask_batch, mask_head, seq_q, seq_k, device)
    given = problem(mask, **options)
    expected = (mask.to_dense().cpu() & seen_by_bounds(given, seq_q, seq_k)).expand(BATCH, -1, -1, -1)
    cut = without_intervals(given, BATCH, seq_q, seq_k, rows=True, columns=True)
    assert cut.mask == "full"
    assert torch.equal(seen_by_lists(cut.row_lists, seq_q, seq_k), expected)
    assert torch.equal(seen_by_lists(cut.transposed_column_lists, seq_k, seq_q), expected.transpose(2, 3))


def test_packed_sequences_without_queries_or_keys_leave_what_both_masks_see(device):
    starts_q, starts_k = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([0, 100, 100, 400, 401], [0, 0, 300, 310, 600])
    )
    key_bounds, query_bounds = varlen_bounds(starts_q, starts_k, 401, 600, causal=True, window=None)
    mask = some_blocks(1, 1, 401, 600, device)
    given = problem(mask, causal=False, key_bounds=key_bounds, query_bounds=query_bounds)
    expected = mask.to_dense().cpu() & seen_by_bounds(given, 401, 600)
    cut = without_intervals(given, 1, 401, 600, rows=True, columns=True)
    assert torch.equal(seen_by_lists(cut.row_lists, 401, 600), expected)
    assert torch.equal(seen_by_lists(cut.transposed_column_lists, 600, 401), expected.transpose(2, 3))


def test_what_is_not_asked_for_is_left_as_it_is(device):
    mask = some_blocks(1, 1, 300, 300, device)
    cut = without_intervals(problem(mask, causal=True), BATCH, 300, 300, rows=True, columns=False)
    assert cut.blocks[2:4] == tuple(mask.tensors())[2:4]
    assert cut.blocks[5] is mask.transposed_bits


@pytest.mark.parametrize("seq_len", [2**12, 2**13])
def test_room_is_made_for_the_blocks_that_are_cut_alone(seq_len, device):
    mask = block_masks.causal(seq_len, device=device)
    ids = (torch.arange(seq_len, device=device) // 1000).int()[None]
    key_bounds, query_bounds = document_bounds(ids, seq_len, causal=True, window=None)
    given = problem(mask, causal=False, key_bounds=key_bounds, query_bounds=query_bounds)
    bits = without_intervals(given, 1, seq_len, seq_len, rows=True, columns=False).row_lists[2]
    assert len(bits) == len(mask.bits) + 4 * seq_len // SIDE
