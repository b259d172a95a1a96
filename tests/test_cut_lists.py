"""What intervals leave of a block mask's lists, as the Hopper kernels read them, against the definition."""

from itertools import pairwise

import pytest
import torch

from kernels import block_masks
from kernels.bit_tiles import unpack
from kernels.block_mask import BlockMask
from kernels.hopper.cut_lists import without_intervals
from kernels.intervals import document_bounds, varlen_bounds
from kernels.problem import Problem
from kernels.reference import visible_keys
from tests.accuracy import holes
from tests.compile_apart import compile_apart, each_triton

BATCH = 2
SIDE = 128


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


def problem(mask: BlockMask, **options) -> Problem:
    return Problem(softmax_scale=1.0, blocks=tuple(mask.tensors()), **options)


@pytest.mark.parametrize(("mask_batch", "mask_head"), [(1, 2), (BATCH, 1)])
# the last has lists that are longer than what is looked at together
@pytest.mark.parametrize(("seq_q", "seq_k"), [(400, 400), (200, 500), (500, 200), (200, 4500)])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "padding"])
def test_intervals_leave_of_the_lists_what_both_masks_see(kind, seq_q, seq_k, mask_batch, mask_head, device):
    causal, window, ids = kind != "padding", 150 if kind == "window" else None, None
    options = {"causal": causal, "window": window}
    if kind in ("documents", "padding"):
        seq_q = min(seq_q, seq_k)
        ids = (torch.rand(BATCH, seq_k, device=device) < 0.01).cumsum(1).int()
        if kind == "padding":
            ids = -(torch.arange(seq_k, device=device) < torch.tensor([[70], [256]], device=device)).int()
        key_bounds, query_bounds = document_bounds(ids, seq_q, causal=causal, window=None)
        options = {"causal": False, "key_bounds": key_bounds, "query_bounds": query_bounds}
    mask = holes(mask_batch, mask_head, seq_q, seq_k, device, SIDE)
    given = problem(mask, **options)
    seen = visible_keys(seq_q, seq_k, causal=causal, window=window, document_ids=ids, device=device)
    expected = (mask.to_dense() & seen).expand(BATCH, -1, -1, -1).cpu()
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
    mask = holes(1, 1, 401, 600, device, SIDE)
    given = problem(mask, causal=False, key_bounds=key_bounds, query_bounds=query_bounds)
    seen = torch.zeros(401, 600, dtype=torch.bool, device=device)
    for (q, q_end), (k, k_end) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        seen[q:q_end, k:k_end] = visible_keys(q_end - q, k_end - k, causal=True, device=device)[0, 0]
    expected = (mask.to_dense() & seen).cpu()
    cut = without_intervals(given, 1, 401, 600, rows=True, columns=True)
    assert torch.equal(seen_by_lists(cut.row_lists, 401, 600), expected)
    assert torch.equal(seen_by_lists(cut.transposed_column_lists, 600, 401), expected.transpose(2, 3))


def test_lists_that_are_not_requested_stay_unchanged(device):
    mask = holes(1, 1, 300, 300, device, SIDE)
    cut = without_intervals(problem(mask, causal=True), BATCH, 300, 300, rows=True, columns=False)
    assert cut.blocks[2:4] == tuple(mask.tensors())[2:4]
    assert cut.blocks[5] is mask.transposed_bits


@pytest.mark.parametrize("seq_len", [2**12, 2**13])
def test_memory_is_allocated_only_for_blocks_that_are_cut(seq_len, device):
    mask = block_masks.causal(seq_len, device=device)
    ids = (torch.arange(seq_len, device=device) // 1000).int()[None]
    key_bounds, query_bounds = document_bounds(ids, seq_len, causal=True, window=None)
    given = problem(mask, causal=False, key_bounds=key_bounds, query_bounds=query_bounds)
    bits = without_intervals(given, 1, seq_len, seq_len, rows=True, columns=False).row_lists[2]
    assert len(bits) == len(mask.bits) + 4 * seq_len // SIDE


@each_triton
def test_the_kernel_that_cuts_lists_compiles_for_hopper_without_spilling(version):
    rows = compile_apart("tests.ahead_of_time_cut_lists", version)
    assert len(rows) == 6
    assert not [row for row in rows if row["spilled"] > 0]
