"""Llama's MLP, (silu(x Wg^T) x Wu^T) W2^T, and the residual stream it is added to, in matrix products.

As in gelu_mlp.py, the gate, its gradient and the sum need no kernels of their own. Rows of Wg and Wu
alternate in the matrix that is multiplied, so that a tile of the product holds both numbers of a channel. The
backward pass computes what the gate lets through once more, in the product that makes the gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.epilogue_library import epilogues
from kernels.gelu_mlp import check_device, check_inputs, refuse_second_derivative
from kernels.operators import save_nothing
from kernels.registration import below_autocast, differentiate, operator


def _fake_forward(x, w1, w2, residual):
    return x.new_empty(x.shape[0], w2.shape[0]), x.new_empty(x.shape[0], w1.shape[0])


def _fake_gradient(dout, w2, inner):
    return torch.empty_like(inner), inner.new_empty(inner.shape[0], w2.shape[1])


@operator(fake=_fake_forward)
@below_autocast
def swiglu_mlp_forward(x: Tensor, w1: Tensor, w2: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result, (N, C), and x w1^T, (N, 2 F), in which gate and up of a channel are neighbours."""
    if x.is_cuda:
        check_device(x, "F.silu")
        hidden, inner = epilogues().mm_swiglu(x, w1.T)
        if residual is None:
            return F.linear(hidden, w2), inner
        return epilogues().mm_added(hidden, w2.T, None, residual), inner
    inner = F.linear(x, w1)
    gate, up = inner.unflatten(1, (-1, 2)).unbind(2)
    out = F.linear(F.silu(gate) * up, w2)
    return out if residual is None else out + residual, inner


@operator(fake=_fake_gradient)
@below_autocast
def swiglu_gradient(dout: Tensor, w2: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x w1^T, (N, 2 F), and what the gate lets through, (N, F); dout: (N, C)."""
    if dout.is_cuda:
        return epilogues().mm_swiglu_gradient(dout.contiguous(), w2, inner)
    dhidden = dout @ w2
    gate, up = inner.unflatten(1, (-1, 2)).unbind(2)
    opened = F.silu(gate)
    dgate = torch.ops.aten.silu_backward(dhidden * up, gate)
    return torch.stack((dgate, dhidden * opened), 2).flatten(1), opened * up


def _save_for_backward(ctx, inputs, output):
    x, w1, w2, _ = inputs
    _, inner = output
    ctx.save_for_backward(x, w1, w2, inner)
    ctx.mark_non_differentiable(inner)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, _):
    # gradients are enabled here only with create_graph=True
    if torch.is_grad_enabled():
        _refuse_second_derivative(ctx)
    if dout is None:
        return (None,) * 4
    x, w1, w2, inner = ctx.saved_tensors
    of_x, of_w1, of_w2, of_residual = ctx.needs_input_grad
    dinner, hidden = gradient(dout, w2, inner)
    return (
        dinner @ w1 if of_x else None,
        dinner.T @ x if of_w1 else None,
        dout.T @ hidden if of_w2 else None,
        dout if of_residual else None,
    )


def _refuse_second_derivative(ctx, *gradients):
    refuse_second_derivative("swiglu_mlp")


# the operators with their gradients, called with the same arguments
forward = differentiate(swiglu_mlp_forward, _save_for_backward, _backward)
gradient = differentiate(swiglu_gradient, save_nothing, _refuse_second_derivative)


def swiglu_mlp(x: Tensor, w1: Tensor, w2: Tensor, residual: Tensor | None = None) -> Tensor:
    """(silu(x wg^T) x wu^T) w2^T + residual, (..., C), wg the upper half of w1 and wu the lower one.

    x and residual: (..., C), which may be None; w1: (2 F, C); w2: (C, F); all of one dtype. On a GPU, which
    must be Hopper or newer: bf16 or fp16, C and F multiples of 8. Raises ValueError for others, and
    ImportError on a GPU without quack-kernels.
    """
    check_inputs({"x": x, "w1": w1, "w2": w2, "residual": residual}, "F.silu", matrices=2)
    channels = x.shape[-1]
    if residual is not None:
        residual = residual.reshape(-1, channels)
    alternating = w1.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return forward(x.reshape(-1, channels), alternating, w2, residual)[0].view(x.shape)
