"""Windows, documents, padding, packed sequences: each mask against its definition, forward and backward.

Masks combined with everything else: test_combinations.py.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import block_masks
from kernels.checks import check_document_ids
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.intervals import document_bounds, mean_length, varlen_bounds
from kernels.packed import flash_attention_packed
from kernels.reference import attention_reference, visible_keys
from tests.accuracy import assert_as_accurate_as_torch, random_qkv, run


@pytest.mark.parametrize("window", [1, 7, 32, 64, 1000, 2**30 - 1])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(100, 100), (40, 97), (97, 40)])
def test_window_keeps_the_last_keys(window, seq_q, seq_k, device):
    q, k, v = random_qkv(1, seq_q, seq_k, 1, 1, 16, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, window=window)


def test_a_token_of_padding_is_in_a_document_of_no_length():
    ids = torch.tensor([[-1, -1, 0, 0, 0, 4], [1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    assert mean_length(ids) == (2 * 0 + 3 * 3 + 1 + 4 * 4 + 2 * 2) / 12
    assert mean_length(torch.full((1, 5), -1, dtype=torch.int32)) == 0.0


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 9}])
@pytest.mark.parametrize("seq_q", [100, 37])
def test_a_token_sees_its_own_document_only(options, seq_q, device):
    q, k, v = random_qkv(2, seq_q, 100, 2, 1, 16, torch.float32, device)
    ids = torch.stack([documents(3, 60, 1, 36), documents(100)]).to(device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, document_ids=ids, **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_sees_nothing_or_only_itself(side, device):
    q, k, v = random_qkv(1, 70, 70, 1, 1, 16, torch.float32, device)
    # a negative id must come first; behind the text, padding is one more document
    ids = torch.zeros(1, 70, dtype=torch.int32, device=device)
    ids[:, :33] = -1 if side == "left" else 0
    ids[:, 33:] = 0 if side == "left" else 1
    assert_as_accurate_as_torch(flash_attention, q, k, v, document_ids=ids, causal=False)
    if side == "left":
        assert not flash_attention(q, k, v, document_ids=ids)[:, :33].any()


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 5}])
def test_packed_sequences_equal_each_sequence_alone(options, device):
    lengths_q, lengths_k = [40, 1, 0, 30], [33, 20, 5, 0]
    q, _, _ = random_qkv(1, sum(lengths_q), 1, 2, 1, 16, torch.float32, device)
    _, k, v = random_qkv(1, 1, sum(lengths_k), 2, 1, 16, torch.float32, device)
    dout, dlse = torch.randn_like(q), torch.randn(1, 2, sum(lengths_q), device=device)

    def packed(q, k, v, return_lse):
        starts = cumulative(lengths_q, device), cumulative(lengths_k, device)
        out, lse = flash_attention_varlen(
            q[0], k[0], v[0], starts[0], cu_seqlens_k=starts[1], return_lse=True, **options
        )
        return out[None], lse[None]

    def one_by_one(q, k, v, return_lse):
        parts = zip(q.split(lengths_q, 1), k.split(lengths_k, 1), v.split(lengths_k, 1), strict=True)
        results = [
            attention_reference(*part, return_lse=True, **options) for part in parts if part[0].shape[1]
        ]
        return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)

    ours = run(packed, q, k, v, dout, dlse)
    alone = run(one_by_one, *(x.double() for x in (q, k, v, dout, dlse)))
    for a, b in zip(ours, alone, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_boundaries_of_packed_sequences_may_lie_apart_in_memory(device, recwarn):
    q = torch.randn(20, 1, 16, device=device)
    apart = torch.tensor([0, 9, 8, 9, 20, 9], dtype=torch.int32, device=device)[::2]
    out, expected = (flash_attention_varlen(q, q, q, starts) for starts in (apart, apart.clone()))
    assert torch.equal(out, expected)
    assert not [warning for warning in recwarn if "contiguous" in str(warning.message)]


MASKS = ["causal", "window", "documents", "documents and window", "varlen"]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_see_nothing_give_exactly_zero_and_no_gradient(mask, dropout_p, device):
    attention, q, k, v, visible = masked(mask, device)
    options = {"dropout_p": dropout_p, "dropout_seed": 3} if dropout_p else {}
    out, lse = attention(q, k, v, **options)
    # gradients that nothing has set to zero on these rows
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.ones_like(lse)))
    for x in (out, dq, dk, dv):
        assert x.isfinite().all()
    blind, unseen = ~visible.any(1), ~visible.any(0)
    assert 0 < blind.sum() < len(blind)
    assert not out[:, blind].any()
    assert (lse[..., blind] == -torch.inf).all()
    assert lse[..., ~blind].isfinite().all()
    assert not dq[:, blind].any()
    assert not dk[:, unseen].any()
    assert not dv[:, unseen].any()


@pytest.mark.parametrize("mask", MASKS)
def test_lse_of_rows_that_see_nothing_can_be_masked_after_any_function(mask, device):
    attention, q, k, v, visible = masked(mask, device)
    gradients = []
    for rows in (slice(None), visible.any(1)):
        # of -inf its square has the gradient 2 * -inf * 0, which is nan
        square = attention(q, k, v)[1][..., rows] ** 2
        gradients.append(torch.autograd.grad(square.masked_fill(square == torch.inf, 0.0).sum(), (q, k)))
    for masked_behind, cut_out in zip(*gradients, strict=True):
        torch.testing.assert_close(masked_behind, cut_out, rtol=0, atol=0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mask", [*MASKS, "full", "blocks"])
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_nothing_is_left_unwritten(mask, dropout_p, device):
    attention, q, k, v, _ = masked(mask, device)
    options = {"dropout_p": dropout_p, "dropout_seed": 3} if dropout_p else {}
    out, lse = attention(q, k, v, **options)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(x.isnan().any() for x in (out, lse, *gradients))


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_nothing_of_a_packed_gradient_is_left_unwritten(device):
    qkv = torch.randn(2, 70, 3, 1, 24, device=device, requires_grad=True)
    ids = (documents(30, 40) - 1)[None].expand(2, -1).contiguous().to(device)
    for document_ids in (None, ids):
        out = flash_attention_packed(qkv, document_ids=document_ids)
        (gradient,) = torch.autograd.grad(out.sum(), qkv)
        assert not out.isnan().any()
        assert not gradient.isnan().any()


def masked(mask: str, device):
    """attention(q, k, v, **options) -> out, lse under a mask, its q, k and v, and the mask (Tq, Tk) itself.

    Under every mask but "full" and "blocks" some rows see nothing.
    """
    seq_q, seq_k = (70, 33) if mask in ("causal", "window") else (65, 65)
    options = {"causal": mask not in ("full", "blocks")}
    if "window" in mask:
        options["window"] = 5
    if "documents" in mask:
        # a negative id is padding
        options["document_ids"] = (documents(10, 35, 20) - 1)[None].to(device)
    visible = visible_keys(seq_q, seq_k, device=device, **options)[0, 0]
    attention = partial(flash_attention, return_lse=True, **options)
    if mask == "blocks":
        row, column = torch.tensor([[0, 1], [1, 0]], device=device)
        attention = partial(attention, block_mask=block_masks.from_blocks(row, column, 65, block_size=64))
    if mask == "varlen":
        lengths_q, lengths_k = [40, 1, 0, 30], [33, 20, 5, 0]
        seq_q, seq_k = sum(lengths_q), sum(lengths_k)
        pairs = zip(lengths_q, lengths_k, strict=True)
        visible = torch.block_diag(*(visible_keys(*pair, causal=True)[0, 0] for pair in pairs)).bool()
        starts_q, starts_k = cumulative(lengths_q, device), cumulative(lengths_k, device)

        def attention(q, k, v, **options):
            out, lse = flash_attention_varlen(
                q[0], k[0], v[0], starts_q, cu_seqlens_k=starts_k, return_lse=True, **options
            )
            return out[None], lse[None]

    return attention, *random_qkv(1, seq_q, seq_k, 2, 1, 24, torch.float32, device), visible.to(device)


def test_a_new_set_of_documents_reuses_the_compiled_kernel(device):
    q, k, v = random_qkv(1, 64, 64, 1, 1, 16, torch.float32, device)
    for lengths in ((64,), (1, 63), (20, 20, 24)):
        ids = documents(*lengths)[None].to(device)
        assert_as_accurate_as_torch(flash_attention, q, k, v, document_ids=ids)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    n_query=st.integers(1, 40),
    padding=st.integers(0, 6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 15),
)
def test_document_intervals_are_the_mask_from_both_sides(lengths, n_query, padding, causal, window):
    ids = torch.cat([torch.full((padding,), -1, dtype=torch.int32), documents(*lengths)])[None]
    seq_k = ids.shape[1]
    seq_q = min(n_query, seq_k)
    window = window if causal else None
    rows, columns = document_bounds(ids, seq_q, causal=causal, window=window)
    expected = visible_keys(seq_q, seq_k, causal=causal, window=window, document_ids=ids)[0, 0]
    assert_intervals_are(expected, rows[0], columns[0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 15),
)
def test_varlen_intervals_are_the_mask_from_both_sides(pairs, causal, window):
    lengths_q, lengths_k = zip(*pairs, strict=True)
    window = window if causal else None
    blocks = [visible_keys(n, m, causal=causal, window=window)[0, 0] for n, m in pairs]
    rows, columns = varlen_bounds(
        cumulative(lengths_q),
        cumulative(lengths_k),
        sum(lengths_q),
        sum(lengths_k),
        causal=causal,
        window=window,
    )
    assert_intervals_are(torch.block_diag(*blocks).bool(), rows[0], columns[0])


def documents(*lengths: int) -> torch.Tensor:
    """Document ids 0, 1, ... of these lengths, int32."""
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))


def cumulative(lengths, device=None) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def assert_intervals_are(expected: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """The mask is what the row intervals say, and what the column intervals say, and no bound decreases."""
    i, j = torch.arange(expected.shape[0])[:, None], torch.arange(expected.shape[1])[None, :]
    assert torch.equal((j >= rows[0][:, None]) & (j < rows[1][:, None]), expected)
    assert torch.equal((i >= columns[0][None, :]) & (i < columns[1][None, :]), expected)
    assert all((bound.diff() >= 0).all() for bound in (*rows, *columns))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 5)])
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_told_how_many_keys_a_query_sees(packed, causal, window, device, monkeypatch):
    told = []

    def operator(q, k, v, key_bounds, *options):
        seen = (key_bounds[:, 1] - key_bounds[:, 0]).double().mean().item()
        told.append((seen, options[-1]))
        return q, q

    monkeypatch.setattr("kernels.flash_attention.attention", operator)
    x = torch.zeros(2, 30, 1, 16, device=device)
    lengths = [[17, 1, 12], [30]]
    if packed:
        starts = cumulative([*lengths[0], 0, *lengths[1]], device)
        x = x.flatten(0, 1)
        flash_attention_varlen(x, x, x, starts, causal=causal, window=window)
    else:
        ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
        ids = torch.stack(ids).int().to(device)
        flash_attention(x, x, x, document_ids=ids, causal=causal, window=window)
    [(seen, count)] = told
    # rounded, so that batches repeat calls; the first queries of a sequence see less than a window
    assert count == (pytest.approx(seen, rel=1 / 32) if window is None else window)


def test_what_is_not_read_is_not_counted(device):
    x = torch.zeros(1, 8, 1, 16, device=device)
    ids = torch.zeros(1, 8, dtype=torch.int32, device=device)
    counts = []

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(ids):
        counts.append(check_document_ids(ids, x, x))
        return ids

    compiled(ids)
    assert counts == [None]
    with torch.no_grad():
        unread = ids.clone()
        assert check_document_ids(unread, x, x) is None
    # a mask that was looked at without gradients first, as in evaluation, is read again for them
    assert check_document_ids(unread, x, x) == 8.0
    assert check_document_ids(ids, x, x) == 8.0
    # what another version holds is read anew
    ids[:, 4:] = 1
    assert check_document_ids(ids, x, x) == 4.0
