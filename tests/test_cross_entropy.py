"""The fused head and loss, against PyTorch's cross-entropy of the logits."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import cross_entropy_epilogue
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


def test_what_leaves_out_the_padding_is_float32_under_any_default_dtype(device, other_default_dtype):
    with other_default_dtype():
        mask = cross_entropy_epilogue.padding_mask(384, 300, device)
    assert mask.dtype == torch.float32
    assert mask[299] == 0.0
    assert mask[300] == -math.inf


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


@pytest.mark.parametrize(
    ("of_hidden", "of_weight"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_hidden_and_weight_may_have_any_two_dtypes(device, of_hidden, of_weight):
    hidden, weight, targets = inputs(device, n_rows=5, vocab_size=32, padded=32)
    tensors = [
        x.detach().to(dtype).requires_grad_() for x, dtype in ((hidden, of_hidden), (weight, of_weight))
    ]
    gradients = torch.autograd.grad(linear_cross_entropy(*tensors, targets, 32, 3), tensors)
    truths = torch.autograd.grad(expected(*tensors, targets, 32), tensors)
    for ours, theirs, x in zip(gradients, truths, tensors, strict=True):
        assert ours.dtype == x.dtype
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_a_gradient_is_finite_in_float16_where_its_sum_over_rows_is_not(device):
    hidden = torch.full((100, 16), 1000.0, device=device, requires_grad=True)
    weight = torch.zeros(32, 16, dtype=torch.float16, device=device, requires_grad=True)
    targets = torch.zeros(100, dtype=torch.int64, device=device)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 32), weight)
    assert gradient.dtype == torch.float16
    # a hundred times as much is beyond 65504
    torch.testing.assert_close(gradient[0], torch.full_like(gradient[0], -1000.0 * 31 / 32))


def test_what_the_loss_is_multiplied_by_is_not_rounded_to_16_bits(device):
    hidden, weight, targets = inputs(device)
    hidden = hidden.detach().half().requires_grad_()
    # to 16 bits one half would round it to 1
    n_rows, factor = hidden.shape[0], 1.0004
    losses = [times * n_rows * linear_cross_entropy(hidden, weight, targets, 300) for times in (1.0, factor)]
    once, scaled = (torch.autograd.grad(loss, hidden)[0] for loss in losses)
    truth = (once.double() * factor).half()
    assert (scaled != once).any()
    # the factor itself is a float32
    assert (scaled == truth).float().mean() > 0.99


def test_autocast_lowers_no_product(device):
    hidden, weight, targets = inputs(device)
    results = []
    for enabled in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            loss = linear_cross_entropy(hidden, weight, targets, 300, 16)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *results))


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
        ({"hidden": torch.zeros(37, 16).long()}, r"^hidden must .* dtype, got torch.int64: call .float\(\)"),
        ({"hidden": torch.zeros(37, 16).bool()}, "^hidden must have a floating-point dtype, got torch.bool"),
        ({"weight": torch.zeros(384, 16).int()}, "^weight must have a floating-point dtype, got torch.int32"),
        ({"weight": torch.zeros(384, 8)}, r"got \(37, 16\) and \(384, 8\)"),
        ({"targets": torch.zeros(36).long()}, r"each of the 37 rows of hidden, got \(36,\)"),
        ({"targets": torch.zeros(37)}, "one int64.*float32"),
        ({"targets": torch.zeros(37, device="meta").long()}, "targets must be on cpu, as hidden, got meta"),
        ({"weight": torch.zeros(384, 16, device="meta")}, "weight must be on cpu, as hidden, got meta"),
        ({"hidden": [[0.0]]}, "^hidden must be a tensor, got list"),
        ({"targets": [0]}, "^targets must be a tensor, got list"),
        ({"vocab_size": None}, r"^vocab_size must be an int, got NoneType None: int\(\) makes one"),
        ({"vocab_size": True}, "^vocab_size must be an int, got bool True"),
        ({"chunk": 2.5}, "^chunk must be an int, got float 2.5"),
        ({"vocab_size": 385}, "from 1 to the 384 rows of weight, got 385"),
        ({"chunk": 0}, "chunk must be at least 1 row, got 0: leave it out for 8448"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, weight, targets = inputs("cpu")
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "vocab_size": 300} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("target", [-100, -1, 300])
def test_a_target_that_is_no_token_is_refused_with_a_way_out(device, target):
    if device.type == "cuda":
        pytest.skip("ends the GPU's context, as a bad target of PyTorch's own does")
    hidden, weight, targets = inputs(device)
    targets[3] = target
    with pytest.raises(RuntimeError, match=r"targets must be from 0 to 299, .*use F\.cross_entropy"):
        linear_cross_entropy(hidden, weight, targets, 300)


def test_a_loss_without_a_gradient_gives_none_to_hidden_and_weight(device):
    hidden, weight, targets = inputs(device)
    x, loss = (
        torch.ones(3, device=device, requires_grad=True),
        linear_cross_entropy(hidden, weight, targets, 300),
    )
    # the checkpoint hands back no gradient of what its layer leaves unused
    checkpoint(lambda x, _: 2 * x, x, loss, use_reentrant=True).sum().backward()
    assert hidden.grad is None
    assert weight.grad is None
    assert x.grad.tolist() == [2.0] * 3


def test_without_a_gpu_and_without_the_interpreter_the_error_says_what_to_do(monkeypatch):
    hidden, weight, targets = inputs("cpu")
    monkeypatch.setattr("kernels.checks.INTERPRETED", False)
    with pytest.raises(
        ValueError, match=r"^hidden must be on a GPU, got cpu: .* use F\.cross_entropy of the"
    ):
        linear_cross_entropy(hidden, weight, targets, 300)


def test_double_backward_is_refused_with_a_way_out(device):
    hidden, weight, targets = inputs(device)
    loss = linear_cross_entropy(hidden, weight, targets, 300)
    # made and differentiated beside the loss, a gradient's own would be lost without a word
    with pytest.raises(NotImplementedError, match=r"F\.cross_entropy of the logits"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_forward_derivative_is_refused_with_a_way_out(device):
    hidden, weight, targets = inputs(device)
    for function, x in (
        (lambda x: linear_cross_entropy(x, weight, targets, 300), hidden),
        (lambda x: linear_cross_entropy(hidden, x, targets, 300), weight),
    ):
        with pytest.raises(NotImplementedError, match=r"no forward derivative: use F\.cross_entropy"):
            torch.func.jvp(function, (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_a_transform_of_functions_is_refused_with_a_way_out(transform, device):
    hidden, weight, targets = inputs(device)
    hidden, weight = hidden.detach(), weight.detach()
    refused = pytest.raises(
        NotImplementedError, match=r"torch.func .*vmap.*: use torch.autograd.grad, F\.cross"
    )
    with refused:
        transform(lambda x: linear_cross_entropy(x, weight, targets, 300))(hidden)
    with refused:
        transform(lambda x: linear_cross_entropy(hidden, x, targets, 300))(weight)


def test_vmap_gives_each_loss_without_gradients_and_loses_no_gradient(device):
    hidden, weight, targets = inputs(device)
    several = torch.stack([hidden, 2 * hidden])
    losses = torch.func.vmap(lambda x: linear_cross_entropy(x, weight, targets, 300))
    with torch.no_grad():
        one_by_one = [linear_cross_entropy(x, weight, targets, 300) for x in several]
        assert torch.equal(losses(several), torch.stack(one_by_one))
    # inside, nothing tells that `several` requires a gradient
    with pytest.raises(NotImplementedError, match=r"or torch.no_grad\(\) if none is needed"):
        losses(several)


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


def mm_exp2_and_sum(a, b, subtrahend, mask, out, width):
    """What kernels/epilogues.py says of it, in PyTorch."""
    exponents = (a.float() @ b.float()) * math.log2(math.e) - subtrahend[:, None] + mask
    exponentials = exponents.clamp(max=90).exp2()
    out.copy_(exponentials)
    return exponentials.sum(1)


@pytest.fixture
def by_exponentials(device, monkeypatch):
    """bfloat16 takes the way of exponentials, on a CPU with a product in PyTorch."""
    if device == "cuda":
        if not cross_entropy_epilogue.fits(torch.empty(1, 8, device=device).bfloat16(), torch.empty(384, 8)):
            pytest.skip("needs Hopper and quack-kernels")
    else:
        epilogues = SimpleNamespace(mm_exp2_and_sum=mm_exp2_and_sum)
        monkeypatch.setitem(sys.modules, "kernels.epilogues", epilogues)
        monkeypatch.setattr(cross_entropy_epilogue, "fits", lambda *_: True)
    return device


@pytest.mark.parametrize("chunk", [1000, 16])
@pytest.mark.parametrize(("vocab_size", "padded"), [(300, 384), (384, 384), (500, 512)])
def test_exponentials_give_the_loss_and_the_gradients(by_exponentials, vocab_size, padded, chunk):
    hidden, weight, targets = inputs(
        by_exponentials, vocab_size=vocab_size, padded=padded, dtype=torch.bfloat16
    )
    with torch.no_grad():
        weight.copy_(weight.bfloat16())
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size, chunk)
    truth = expected(hidden, weight, targets, vocab_size)
    torch.testing.assert_close(loss, truth.float(), rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad(loss * 3.0, (hidden, weight))
    for ours, theirs in zip(actual, torch.autograd.grad(truth * 3.0, (hidden, weight)), strict=True):
        assert (ours - theirs).norm() <= 0.006 * theirs.norm()
    assert not actual[1][vocab_size:].any(), "the padding of the vocabulary takes no gradient"
    again = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets, vocab_size, chunk) * 3.0, (hidden, weight)
    )
    assert all(torch.equal(one, other) for one, other in zip(actual, again, strict=True))


def test_exponentials_are_those_of_a_transposed_weight(by_exponentials):
    hidden, weight, targets = inputs(by_exponentials, n_rows=5, dtype=torch.bfloat16)
    transposed = weight.detach().T.contiguous().T.requires_grad_()
    losses = [linear_cross_entropy(hidden, x, targets, 300, 4) for x in (weight, transposed)]
    assert torch.equal(*losses)
    gradients = [torch.autograd.grad(loss, x) for loss, x in zip(losses, (weight, transposed), strict=True)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("nats", [-200, -50, 0, 50, 95])
def test_exponentials_stand_any_likelihood_of_the_target(by_exponentials, nats):
    # column 1 is `nats` above the target's, all others 20 below it
    weight = torch.zeros(384, 16, device=by_exponentials)
    weight[1:, 0], weight[1, 0] = -20, nats
    hidden = torch.eye(1, 16, device=by_exponentials).bfloat16().requires_grad_()
    targets = torch.zeros(1, device=by_exponentials).long()
    loss = linear_cross_entropy(hidden, weight, targets, 384)
    truth = expected(hidden, weight, targets, 384)
    torch.testing.assert_close(loss, truth.float(), rtol=1e-6, atol=1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(x, hidden) for x in (loss, truth))
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-6)


def test_exponentials_of_a_target_beyond_their_range_lose_104_nats_and_stay_finite(by_exponentials):
    weight = torch.zeros(384, 16, device=by_exponentials).requires_grad_()
    hidden = torch.eye(2, 16, device=by_exponentials).bfloat16().requires_grad_()
    with torch.no_grad():
        weight[1:, 0] = 1000
    targets = torch.zeros(2, device=by_exponentials).long()
    loss = linear_cross_entropy(hidden, weight, targets, 384)
    assert 0.5 * 150 * math.log(2) < loss < 0.5 * 160 * math.log(2) + math.log(384)
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.parametrize("where", ["hidden", "weight of a target", "weight of another token"])
def test_a_nan_in_hidden_states_or_weights_gives_a_nan_loss(by_exponentials, where):
    hidden, weight, targets = inputs(by_exponentials, dtype=torch.bfloat16)
    with torch.no_grad():
        targets[3] = 7
        targets[targets == 8] = 9
        if where == "hidden":
            hidden[3, 2] = float("nan")
        else:
            weight[7 if where == "weight of a target" else 8, 2] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets, 300).isnan()


def test_vocabularies_in_whole_tiles_on_hopper_have_exponentials(monkeypatch):
    monkeypatch.setattr(cross_entropy_epilogue.hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(cross_entropy_epilogue, "is_installed", lambda: True)
    bf16 = torch.empty(1, 768, dtype=torch.bfloat16)
    assert [cross_entropy_epilogue.fits(bf16, torch.empty(n, 1)) for n in (50304, 32000, 50257, 50368)] == [
        True,
        True,
        False,
        False,
    ]
    assert not cross_entropy_epilogue.fits(bf16.half(), torch.empty(50304, 1))
    assert not cross_entropy_epilogue.fits(bf16[:, :766], torch.empty(50304, 1))
    monkeypatch.setattr(cross_entropy_epilogue, "is_installed", lambda: False)
    assert not cross_entropy_epilogue.fits(bf16, torch.empty(50304, 1))
