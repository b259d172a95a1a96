"""The definition itself, against PyTorch's attention and by hand."""

import pytest
import torch
import torch.nn.functional as F

from kernels.flash_attention import flash_attention
from kernels.reference import attention_reference, visible_keys


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_attention_of_torch(causal):
    q, k, v = (torch.randn(2, 10, 3, 8, dtype=torch.float64) for _ in range(3))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    torch.testing.assert_close(attention_reference(q, k, v, causal=causal), expected.transpose(1, 2))


def test_lse_is_the_log_of_the_sum_of_exponentials_and_carries_gradients():
    q, k, v = (torch.randn(1, 5, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = attention_reference(q, k, v, causal=False, return_lse=True)
    scores = (q[0, :, 0] @ k[0, :, 0].T) * 8**-0.5
    torch.testing.assert_close(lse[0, 0], scores.exp().sum(-1).log())
    lse.sum().backward()
    assert q.grad.abs().sum() > 0


def test_masks_are_what_they_say():
    def rows(**options):
        return ["".join("x" if seen else "." for seen in row) for row in visible_keys(3, 4, **options)[0, 0]]

    assert rows(causal=False) == ["xxxx", "xxxx", "xxxx"]
    assert rows(causal=True) == ["xx..", "xxx.", "xxxx"]
    assert rows(causal=True, window=2) == ["xx..", ".xx.", "..xx"]
    ids = torch.tensor([[-1, 0, 0, 1]])
    assert rows(causal=False, document_ids=ids) == [".xx.", ".xx.", "...x"]


def test_a_row_that_sees_nothing_gives_zero_and_no_gradient():
    q, k, v = (torch.randn(1, n, 1, 8, requires_grad=True) for n in (4, 2, 2))
    out, lse = attention_reference(q, k, v, return_lse=True)
    out.sum().backward()
    assert not out[:, :2].any()
    assert (lse[..., :2] == -torch.inf).all()
    assert not q.grad[:, :2].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_dropout_needs_a_seed():
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="dropout_seed must be given"):
        attention_reference(x, x, x, dropout_p=0.1)


def test_dropout_may_be_a_tensor_of_one_number():
    x = torch.randn(1, 8, 1, 8)
    tensor, number = (
        attention_reference(x, x, x, dropout_p=p, dropout_seed=3) for p in (torch.tensor(0.5), 0.5)
    )
    assert torch.equal(tensor, number)


def test_a_window_looks_back_only():
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="window looks back only, got window=3 with causal=False"):
        attention_reference(x, x, x, window=3, causal=False)


# with one query too many the last document would be taken for everyone's
@pytest.mark.parametrize("seq_q", [5, 6])
def test_documents_of_fewer_keys_than_queries_are_refused_as_the_kernels_refuse_them(seq_q):
    q, k = (torch.randn(1, n, 1, 8) for n in (seq_q, 4))
    ids = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    for attend in (attention_reference, flash_attention):
        with pytest.raises(
            ValueError, match=f"^document_ids need Tq <= Tk, got Tq {seq_q} and Tk 4: .*keys too$"
        ):
            attend(q, k, k, document_ids=ids)


def test_documents_may_differ_from_call_to_call_of_vmap():
    x = torch.randn(2, 1, 4, 1, 8)
    ids = torch.tensor([[[0, 0, 1, 1]], [[0, 1, 1, 2]]], dtype=torch.int32)

    def attend(x, ids):
        return attention_reference(x, x, x, document_ids=ids)

    expected = torch.stack([attend(*each) for each in zip(x, ids, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(x, ids), expected)


def test_a_compiled_definition_is_one_graph_that_reads_no_document():
    x, ids = torch.randn(1, 4, 1, 8), torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)

    def attend(x, ids, seed):
        return attention_reference(x, x, x, document_ids=ids, dropout_p=0.5, dropout_seed=seed)

    seed = torch.tensor([3])
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, seed), attend(x, ids, seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lse_of_the_definition_has_at_least_32_bits(dtype):
    x = torch.randn(1, 5, 1, 8, dtype=dtype)
    out, lse = attention_reference(x, x, x, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
