"""The gated MLP inside of its products, against PyTorch's layers one by one."""

import pytest
import torch
import torch.nn.functional as F

from kernels.swiglu_mlp import swiglu_gradient, swiglu_mlp, swiglu_mlp_forward
from model.gpt import MLP
from tests.test_gelu_mlp import (
    assert_as_accurate_as_torch,
    assert_frozen_alone_has_no_gradient,
    assert_none_comes_of_no_gradient,
    assert_repeats,
    assert_trains_alike,
    model_config,
    on_hopper_or_newer,
    result_and_gradients,
)


def plain(x, w1, w2, residual=None):
    gate, value = F.linear(x, w1).chunk(2, dim=-1)
    out = F.linear(F.silu(gate) * value, w2)
    return out if residual is None else residual + out


def inputs(device, rows=(3, 37), channels=64, width=176, dtype=torch.float64, residual=True):
    shapes = (*rows, channels), (2 * width, channels), (channels, width), (*rows, channels)
    scales = 1.0, channels**-0.5, width**-0.5, 1.0
    tensors = [
        (scale * torch.randn(shape, device=device)).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return tensors if residual else [*tensors[:3], None]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_result_and_gradients_are_those_of_the_layers_one_by_one(residual, compiled):
    tensors = inputs("cpu", residual=residual)
    ours = torch.compile(swiglu_mlp, backend="aot_eager", fullgraph=True) if compiled else swiglu_mlp
    dout = torch.randn_like(tensors[0])
    expected = result_and_gradients(plain, tensors, dout, torch.float64)
    torch.testing.assert_close(result_and_gradients(ours, tensors, dout, torch.float64), expected)


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "width"),
    [((1,), 8, 24), ((3, 37), 64, 176), ((2, 1024), 768, 2048), ((2000,), 960, 2560)],
)
def test_on_a_gpu_it_is_as_accurate_as_torch(dtype, residual, rows, channels, width):
    tensors = inputs("cuda", rows, channels, width, dtype, residual)
    assert_as_accurate_as_torch(swiglu_mlp, plain, tensors)


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_and_gradient_are_accurate_far_from_zero(dtype):
    x = torch.zeros(4001, 8, device="cuda", dtype=dtype)
    x[:, 0] = torch.linspace(-20, 20, 4001)
    # one gate that sees x, in front of a value that is 1
    w1 = torch.zeros(16, 8, device="cuda", dtype=dtype)
    w1[0, 0] = w1[1, 1] = 1.0
    x[:, 1] = 1.0
    eye = torch.eye(8, device="cuda", dtype=dtype)
    out, inner = swiglu_mlp_forward(x, w1, eye, None)
    dinner, hidden = swiglu_gradient(torch.ones_like(x), eye, inner)
    wide = x[:, 0].double().requires_grad_()
    value = F.silu(wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    for ours in (out[:, 0], hidden[:, 0], dinner[:, 1]):
        torch.testing.assert_close(ours.double(), value, atol=1e-5, rtol=5e-3)
    torch.testing.assert_close(dinner[:, 0].double(), slope, atol=1e-5, rtol=5e-3)


@on_hopper_or_newer
@pytest.mark.gpu
def test_on_a_gpu_results_repeat_bit_for_bit():
    assert_repeats(swiglu_mlp, inputs("cuda", (4096,), 768, 2048, dtype=torch.bfloat16))


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_has_no_gradient(frozen):
    assert_frozen_alone_has_no_gradient(swiglu_mlp, inputs("cpu"), frozen)


def test_a_result_without_a_gradient_gives_none_to_any_input():
    assert_none_comes_of_no_gradient(swiglu_mlp, inputs("cpu"))


def test_a_second_derivative_is_refused():
    tensors = inputs("cpu")
    with pytest.raises(NotImplementedError, match="swiglu_mlp has no .* use fused_gelu=false"):
        torch.autograd.grad(swiglu_mlp(*tensors).sum(), tensors[0], create_graph=True)


def test_the_operators_keep_pytorchs_rules():
    x, *weights = inputs("cpu", rows=(5,), channels=8, width=16)
    torch.library.opcheck(swiglu_mlp_forward, (x, *weights))
    given = x.detach(), weights[1].detach(), torch.randn(5, 32).double()
    torch.library.opcheck(swiglu_gradient, given)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda w1: w1[1:], r"w1 \(2 F, C\), got shapes \(3, 37, 64\) and \(351, 64\)"),
        (1, lambda w1: w1[:, :8], r"w1 must have shape \(352, 64\), got \(352, 8\)"),
        (2, lambda w2: w2[:, :8], r"w2 must have shape \(64, 176\), got \(64, 8\)"),
        (2, lambda w2: w2.float(), "w2 must be torch.float64 on cpu, as x is, got torch.float32 on cpu"),
        (3, lambda residual: residual[:1], r"residual must have shape \(3, 37, 64\), got \(1, 37, 64\)"),
    ],
)
def test_what_does_not_fit_is_named(index, change, message):
    tensors = inputs("cpu")
    tensors[index] = change(tensors[index])
    with pytest.raises(ValueError, match=message):
        swiglu_mlp(*tensors)


def test_a_layer_multiplies_by_it_what_it_would_multiply_one_by_one(monkeypatch):
    torch.manual_seed(0)
    config = model_config(mlp="swiglu", bias="none", mlp_width=88)
    apart, fused = MLP(config), MLP(config, fused_gelu=True)
    fused.load_state_dict(apart.state_dict())
    monkeypatch.setattr(fused, "_fuses", lambda x: True)
    x, residual = torch.randn(2, 3, 5, 32)
    torch.testing.assert_close(fused(x, residual), apart(x, residual))


@pytest.mark.parametrize(("bias", "takes"), [("none", True), ("qkv", True), ("all", False)])
def test_only_a_gate_without_biases_is_fused(bias, takes):
    config = model_config(mlp="swiglu", bias=bias)
    assert MLP(config, fused_gelu=True).fused_gelu == takes
    assert not MLP(config, fused_gelu=False).fused_gelu


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_it_trains_as_one_without(compiled):
    config = model_config(mlp="swiglu", bias="none", mlp_width=88, norm="rms")
    assert_trains_alike(config, torch.bfloat16, compiled)
