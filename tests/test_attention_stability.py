"""Rounding that leans to one side, which makes GPT-2 diverge in bf16 (arXiv:2510.04212), does not happen."""

import pytest
import torch

from kernels.flash_attention import flash_attention
from kernels.reference import attention_reference
from tests.accuracy import assert_as_accurate_as_torch


# on Hopper the last two run on kernels of their own
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_outputs_of_tied_rows_are_not_rounded_to_one_side(head_dim, device):
    # two keys tie for the maximum: with probabilities of exactly 1, their values' sum falls half-way between
    # two numbers in every second output, and the third key's tiny share then always decides downwards
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    q = torch.zeros(1, 128, 1, head_dim)
    q[..., 0] = 1 + torch.rand(128, 1) / 4
    k = torch.zeros(1, 3, 1, head_dim)
    k[0, :, 0, 0] = torch.tensor([8.0, 8.0, -2.0])
    v = -1 - torch.rand(1, 3, 1, head_dim)
    v[:, 2] = -8.0
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    options = {"causal": False, "softmax_scale": 1.0}
    truth = attention_reference(q.double(), k.double(), v.double(), **options)
    unit = torch.finfo(dtype).eps

    def bias(out: torch.Tensor) -> float:
        return (out.double() - truth).mean().item() / unit

    assert bias(attention_reference(q, k, v, **options)) < -0.1
    assert abs(bias(flash_attention(q, k, v, **options))) < 0.05


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rows_of_one_great_probability_lose_nothing_by_it(head_dim, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    v = torch.randn(2, 1, 2, head_dim).to(device, dtype)
    q, k = (torch.randn(2, n, 2, head_dim).to(device, dtype) for n in (100, 1))
    assert torch.equal(flash_attention(q, k, v, causal=False), v.expand(q.shape))
    # each query is its own key: nearly all of a row is one probability
    q, k, v = (torch.randn(2, 130, 2, head_dim).to(device, dtype),) * 3
    assert_as_accurate_as_torch(flash_attention, *(x.detach().requires_grad_() for x in (q, k, v)))
