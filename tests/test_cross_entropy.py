"""The fused head and loss, against PyTorch's cross-entropy of the logits."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy
from tests.compile_apart import compile_apart, each_triton


def inputs(device, n_rows=37, n_embd=16, vocab_size=300, padded=384, dtype=torch.float32):
    hidden = torch.randn(n_rows, n_embd, device=device, dtype=dtype)
    weight = torch.randn(padded, n_embd, device=device)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(vocab_size, (n_rows,), device=device),
    )


def expected(hidden, weight, targets, vocab_size):
    logits = F.linear(hidden.double(), weight[:vocab_size].double())
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize("chunk", [1000, 37, 16])
@pytest.mark.parametrize(("vocab_size", "padded"), [(300, 384), (384, 384), (5000, 5120)])
def test_loss_and_gradients_are_those_of_the_logits(device, chunk, vocab_size, padded):
    hidden, weight, targets = inputs(device, vocab_size=vocab_size, padded=padded)
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size, chunk)
    # a factor in front, as gradient accumulation and loss scaling have it
    actual = torch.autograd.grad(loss * 3.0, (hidden, weight))
    truth = expected(hidden, weight, targets, vocab_size)
    torch.testing.assert_close(loss, truth.float())
    for ours, theirs in zip(actual, torch.autograd.grad(truth * 3.0, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not actual[1][vocab_size:].any(), "the padding of the vocabulary takes no gradient"


def test_without_gradients_it_is_the_loss_alone(device):
    hidden, weight, targets = inputs(device)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 300)
    torch.testing.assert_close(loss, expected(hidden, weight, targets, 300).float())


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_its_gradient_neither_made_nor_kept(device, frozen):
    *tensors, targets = inputs(device)
    both = torch.autograd.grad(linear_cross_entropy(*tensors, targets, 300, 37), tensors)
    tensors[frozen].requires_grad_(False)
    loss = linear_cross_entropy(*tensors, targets, 300, 37)
    assert [x.shape for x in loss.grad_fn.saved_tensors if x.numel()] == [tensors[1 - frozen].shape]
    loss.backward()
    assert tensors[frozen].grad is None
    assert torch.equal(tensors[1 - frozen].grad, both[1 - frozen])


def test_large_logits_do_not_overflow(device):
    hidden, weight, targets = inputs(device)
    loss = linear_cross_entropy(hidden * 100, weight, targets, 300)
    torch.testing.assert_close(loss, expected(hidden * 100, weight, targets, 300).float())


def test_targets_may_be_a_view(device):
    hidden, weight, targets = inputs(device)
    strided = torch.stack([targets, targets * 0], 1)[:, 0]
    loss = linear_cross_entropy(hidden, weight, strided, 300)
    torch.testing.assert_close(loss, expected(hidden, weight, targets, 300).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(0, 16)}, r"N at least 1, and weight \(V', C\), got \(0, 16\)"),
        ({"weight": torch.zeros(384, 8)}, r"got \(37, 16\) and \(384, 8\)"),
        ({"targets": torch.zeros(36).long()}, r"each of the 37 rows of hidden, got \(36,\)"),
        ({"targets": torch.zeros(37)}, "one int64.*float32"),
        ({"vocab_size": 385}, "from 1 to the 384 rows of weight, got 385"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, weight, targets = inputs("cpu")
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "vocab_size": 300} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def test_double_backward_is_refused_with_a_way_out(device):
    hidden, weight, targets = inputs(device)
    loss = linear_cross_entropy(hidden, weight, targets, 300)
    # made and differentiated beside the loss, a gradient's own would be lost without a word
    with pytest.raises(NotImplementedError, match=r"F\.cross_entropy of the logits"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_operator_keeps_pytorchs_rules(device):
    hidden, weight, targets = inputs(device, n_rows=4)
    torch.library.opcheck(
        torch.ops.nanoflash.linear_cross_entropy.default, (hidden, weight, targets, 300, 3, True, True)
    )


@each_triton
def test_two_rows_fit_a_hopper_multiprocessor_without_spilling(version):
    (used,) = compile_apart("tests.ahead_of_time_cross_entropy", version)
    # a multiprocessor has 228 KiB, of which each block takes one for the system
    assert 2 * (used["shared"] + 1024) <= 228 * 1024
    assert used["spilled"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_as_accurate_as_torch(dtype):
    hidden, weight, targets = inputs(
        "cuda", n_rows=1000, n_embd=768, vocab_size=50257, padded=50304, dtype=dtype
    )
    with torch.no_grad():
        weight *= 0.05
    loss = linear_cross_entropy(hidden, weight, targets, 50257, chunk=384)
    truth = expected(hidden, weight, targets, 50257)
    torchs = F.cross_entropy(F.linear(hidden, weight[:50257].to(dtype)).float(), targets)
    assert abs(loss - truth) <= 2 * abs(torchs - truth) + 1e-5
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in (loss, torchs, truth)]
    for ours, theirs, exact in zip(*gradients, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
