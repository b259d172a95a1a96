"""Attention on packed q, k and v, against attention on its parts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.flash_attention import flash_attention
from kernels.packed import flash_attention_packed


def packed(device, batch=2, seq_len=70, n_head=2, head_dim=16):
    return torch.randn(batch, seq_len, 3, n_head, head_dim, device=device, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [False, True])
def test_results_and_gradients_are_those_of_the_parts(device, causal, documents):
    qkv = packed(device)
    ids = None
    if documents:
        ids = (torch.arange(70, device=device) // 30).to(torch.int32).expand(2, -1).contiguous()
    options = {"causal": causal, "document_ids": ids}
    expected = flash_attention(*qkv.unbind(2), **options)
    actual = flash_attention_packed(qkv, **options)
    dout = torch.randn_like(expected)
    assert torch.equal(actual, expected)
    (gradient,) = torch.autograd.grad(actual, qkv, dout)
    assert torch.equal(gradient, torch.autograd.grad(expected, qkv, dout)[0])


def test_autocast_casts_the_packed_tensor(device):
    qkv = packed(device)
    with torch.autocast(device.type, dtype=torch.float16):
        expected, actual = flash_attention(*qkv.unbind(2)), flash_attention_packed(qkv)
    assert actual.dtype == torch.float16
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [1, 100, 1024])
def test_hopper_writes_the_gradient_in_place(seq_len, head_dim):
    qkv = torch.randn(2, seq_len, 3, 4, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected, actual = flash_attention(*qkv.unbind(2)), flash_attention_packed(qkv)
    dout = torch.randn_like(expected)
    assert torch.equal(actual, expected)
    (ours,) = torch.autograd.grad(actual, qkv, dout)
    (theirs,) = torch.autograd.grad(expected, qkv, dout)
    # dq is summed in any order
    torch.testing.assert_close(ours[:, :, 0], theirs[:, :, 0], rtol=2e-2, atol=1e-3)
    assert torch.equal(ours[:, :, 1:], theirs[:, :, 1:])


def test_a_result_without_a_gradient_gives_none_to_the_packed_tensor(device):
    qkv, x = packed(device), torch.ones(3, device=device, requires_grad=True)
    # the checkpoint hands back no gradient of what its layer leaves unused
    checkpoint(lambda x, _: 2 * x, x, flash_attention_packed(qkv), use_reentrant=True).sum().backward()
    assert qkv.grad is None
    assert x.grad.tolist() == [2.0] * 3


def test_the_operators_keep_pytorchs_rules(device):
    qkv = packed(device, batch=1, seq_len=20)
    operators, options = torch.ops.nanoflash, (None, None, 0.25, True, False, None)
    torch.library.opcheck(operators.packed_attention_forward.default, (qkv, *options))
    out, lse = operators.packed_attention_forward(qkv, *options)
    arguments = (torch.ones_like(out), qkv.detach(), out.detach(), lse.detach(), *options)
    torch.library.opcheck(operators.packed_attention_backward.default, arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 8, 2, 16), r"must have shape \(B, T, 3, H, D\)"),
        ((2, 8, 3, 2, 12), "head_dim must be a multiple of 8"),
    ],
)
def test_another_shape_is_refused(device, shape, message):
    with pytest.raises(ValueError, match=message):
        flash_attention_packed(torch.randn(*shape, device=device))


def test_a_tensor_that_is_not_contiguous_is_refused(device):
    qkv = torch.randn(2, 3, 8, 2, 16, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match=r"must be contiguous, .* call qkv.contiguous\(\)"):
        flash_attention_packed(qkv)
