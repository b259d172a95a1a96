"""The MLP of a GPT, gelu(x W1^T + b1) W2^T + b2, and the residual stream it is added to, in matrix products.

GELU, its gradient and the sum need no kernels of their own: they run in the epilogues of the products beside
them (epilogues.py). The forward pass writes GELU and its derivative, and the backward pass multiplies by that
derivative in the product that makes the gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_is_tensor
from kernels.epilogue_library import epilogues, serves
from kernels.operators import save_nothing
from kernels.registration import below_autocast, differentiate, operator


def _fake_forward(x, w1, b1, w2, b2, residual):
    return x.new_empty(x.shape[0], w2.shape[0]), *(x.new_empty(x.shape[0], w1.shape[0]) for _ in range(2))


def _fake_gradient(dout, w2, slope, bias):
    return torch.empty_like(slope), slope.new_empty(slope.shape[1] if bias else 0)


@operator(fake=_fake_forward)
@below_autocast
def gelu_mlp_forward(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, (N, C), and GELU and its derivative, (N, F) each."""
    if x.is_cuda:
        check_device(x, "F.gelu")
        hidden, slope = epilogues().mm_gelu(x, w1.T, b1)
        if residual is None:
            return F.linear(hidden, w2, b2), hidden, slope
        return epilogues().mm_added(hidden, w2.T, b2, residual), hidden, slope
    inner = F.linear(x, w1, b1)
    hidden = F.gelu(inner, approximate="tanh")
    slope = torch.ops.aten.gelu_backward(torch.ones_like(inner), inner, approximate="tanh")
    out = F.linear(hidden, w2, b2)
    return out if residual is None else out + residual, hidden, slope


@operator(fake=_fake_gradient)
@below_autocast
def gelu_gradient(dout: Tensor, w2: Tensor, slope: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """The gradients of GELU's input, (N, F), and of its bias, (F,) or (0,) without one; dout: (N, C)."""
    if not dout.is_cuda:
        dinner = (dout @ w2) * slope
        return dinner, dinner.sum(0) if bias else dinner.new_empty(0)
    if not bias:
        return epilogues().mm_scaled(dout.contiguous(), w2, slope), slope.new_empty(0)
    dinner, dbias = epilogues().mm_scaled_and_sum(dout.contiguous(), w2, slope)
    return dinner, dbias.to(slope.dtype)


def _save_for_backward(ctx, inputs, output):
    x, w1, _, w2, _, _ = inputs
    ctx.save_for_backward(x, w1, w2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, *_):
    # gradients are enabled here only with create_graph=True
    if torch.is_grad_enabled():
        _refuse_second_derivative(ctx)
    if dout is None:
        return (None,) * 6
    x, w1, w2, hidden, slope = ctx.saved_tensors
    of_x, of_w1, of_b1, of_w2, of_b2, of_residual = ctx.needs_input_grad
    dinner, db1 = gradient(dout, w2, slope, of_b1)
    return (
        dinner @ w1 if of_x else None,
        dinner.T @ x if of_w1 else None,
        db1 if of_b1 else None,
        dout.T @ hidden if of_w2 else None,
        dout.sum(0) if of_b2 else None,
        dout if of_residual else None,
    )


def _refuse_second_derivative(ctx, *gradients):
    refuse_second_derivative("gelu_mlp")


# the operators with their gradients, called with the same arguments
forward = differentiate(gelu_mlp_forward, _save_for_backward, _backward)
gradient = differentiate(gelu_gradient, save_nothing, _refuse_second_derivative)


def gelu_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """gelu(x w1^T + b1) w2^T + b2 + residual, (..., C), GELU in its tanh form.

    x and residual: (..., C); w1: (F, C); w2: (C, F); biases: (F,) and (C,); all of one dtype. Biases and
    residual may be None. On a GPU, which must be Hopper or newer: bf16 or fp16, C and F multiples of 8.
    Raises ValueError for others, and ImportError on a GPU without quack-kernels.
    """
    check_inputs({"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "residual": residual}, "F.gelu")
    channels = x.shape[-1]
    if residual is not None:
        residual = residual.reshape(-1, channels)
    return forward(x.reshape(-1, channels), w1, b1, w2, b2, residual)[0].view(x.shape)


def check_inputs(given: dict[str, Tensor | None], activation: str, matrices: int = 1) -> None:
    """Raises ValueError for inputs of an MLP, by their names, that do not fit each other or the device.

    matrices: that w1, (matrices F, C), is made of. activation: PyTorch's function, which takes any.
    """
    x, w1 = given["x"], given["w1"]
    for name, tensor in given.items():
        if tensor is None and name not in ("x", "w1", "w2"):
            continue
        check_is_tensor(name, tensor)
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} must be {x.dtype} on {x.device}, as x is, got {tensor.dtype} on {tensor.device}"
            )
    rows = "F" if matrices == 1 else f"{matrices} F"
    if x.dim() == 0 or w1.dim() != 2 or w1.shape[0] % matrices:
        raise ValueError(
            f"x must be (..., C) and w1 ({rows}, C), got shapes {tuple(x.shape)} and {tuple(w1.shape)}"
        )
    channels, width = x.shape[-1], w1.shape[0] // matrices
    shapes = {
        "w1": (matrices * width, channels),
        "b1": (width,),
        "w2": (channels, width),
        "b2": (channels,),
        "residual": tuple(x.shape),
    }
    for name, tensor in given.items():
        if name in shapes and tensor is not None and tensor.shape != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(tensor.shape)}")
    if x.is_cuda and not fuses(x.dtype, channels, width):
        raise ValueError(
            "x must be bfloat16 or float16 with channels in multiples of 8 on both sides of the activation, "
            f"got {x.dtype}, {channels} and {width}: use PyTorch's F.linear and {activation}"
        )


def check_device(x: Tensor, activation: str) -> None:
    """Raises ValueError on a GPU without such products; called in operators, which are not traced."""
    if not serves(x.device):
        raise ValueError(
            f"x must be on an NVIDIA GPU of compute capability 9.0 or newer, got {x.device}, "
            f"{torch.cuda.get_device_name(x.device)}: use PyTorch's F.linear and {activation}"
        )


def refuse_second_derivative(name: str) -> None:
    raise NotImplementedError(
        f"{name} has no second derivative: use fused_gelu=false where you need one "
        "(double backward, gradient penalties), or leave out create_graph=True"
    )


def fuses(dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether quack multiplies matrices of this dtype, with rows of these lengths."""
    return dtype in (torch.bfloat16, torch.float16) and channels % 8 == 0 and width % 8 == 0
