"""Matrix products with GELU, its gradient, a sum or a softmax's exponentials in their epilogue.

They extend quack, Dao-AILab's GEMM kernels. The epilogue works on a tile of the product while it is in
registers, so GELU takes no pass of its own over (N, F), nor the exponentials over (N, V). On Hopper two
warpgroups take turns: one multiplies while the other is in its epilogue. PyTorch has no product that keeps
what the backward pass needs, and cuBLASLt's do not take turns (docs/training_speed.md).

Imported when a GPU first needs it: quack brings the compiler of CuTe kernels, whose import takes seconds.
"""

import math
from dataclasses import replace

import cutlass.cute as cute
from quack.activation import dswiglu, swiglu, tanh
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import F2, pack, pexp2, unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, RowVecReduce
from quack.gemm_config import default_config
from torch import Tensor

# bytes: rows must begin at multiples of this, so that TMA can copy tiles
ALIGNMENT = 16
# gelu(x) = x (1 + tanh(u)) / 2 with u = x (A + B x^2)
A = math.sqrt(2 / math.pi)
B = 0.044715 * A
LOG2E = math.log2(math.e)
# exponents are limited to this, so that no row's sum is infinite
MOST_EXPONENT = 90.0


def _gelu_and_slope(x):
    """GELU and its derivative, of a number or, on Blackwell, of a pair."""
    square = x * x
    t = tanh(x * (A + B * square))
    if isinstance(t, tuple):
        t = F2(*t)
    half = 0.5 + 0.5 * t
    hidden = x * half
    rest = hidden * (2 * A + 6 * B * square)
    return hidden, half + (rest - half * rest)


# in quack's terms acc is an element of the product in float32, c one of another matrix, and "D" what is
# written in place of the product


@gemm_epilogue(outputs=("hidden",))
def _gelu(acc):
    hidden, slope = _gelu_and_slope(acc)
    return {"D": slope, "hidden": hidden}


@gemm_epilogue(outputs=("hidden",), ops={"bias": RowVecLoad("bias")})
def _bias_gelu(acc, bias):
    hidden, slope = _gelu_and_slope(acc + bias)
    return {"D": slope, "hidden": hidden}


# pairs of columns: a channel of the gate, and the one that it opens


@gemm_epilogue(outputs=("hidden",), mode="acc_pair")
def _swiglu(acc):
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "hidden": swiglu(gate, up)}


@gemm_epilogue(outputs=("hidden",), mode="packed_cd_b16x2")
def _swiglu_gradient(acc, c):
    dgate, dup, hidden = dswiglu(*unpack(c), acc)
    return {"D": pack(dgate, dup), "hidden": hidden}


@gemm_epilogue()
def _added(acc, c):
    return {"D": acc + c}


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def _bias_added(acc, c, bias):
    return {"D": acc + bias + c}


@gemm_epilogue()
def _scaled(acc, c):
    return {"D": acc * c}


@gemm_epilogue(reduces={"sum": RowVecReduce("sum")})
def _scaled_and_sum(acc, c):
    out = acc * c
    return {"D": out, "sum": out}


def _at_most(x, most):
    """min(x, most), NaN where x is; of a number or, on Blackwell, of a pair."""
    if isinstance(x, tuple):
        return F2(*(cute.arch.fmin(lane, most, nan=True) for lane in x))
    return cute.arch.fmin(x, most, nan=True)


@gemm_epilogue(
    ops={"subtrahend": ColVecLoad("subtrahend"), "mask": RowVecLoad("mask")},
    reduces={"sum": ColVecReduce("sum")},
)
def _exp2_and_sum(acc, subtrahend, mask):
    e = pexp2(_at_most(acc * LOG2E + (mask - subtrahend), MOST_EXPONENT))
    return {"D": e, "sum": e}


def mm_gelu(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """gelu(a b + bias), in its tanh form, and GELU's derivative there, (N, F) each.

    a: (N, C), b: (C, F), bias: (F,).
    """
    _check(x=a, w1=b)
    out = _gelu(a, b, tuned=False) if bias is None else _bias_gelu(a, b, bias=bias.unsqueeze(0), tuned=False)
    return out["hidden"], out["D"]


def mm_swiglu(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """silu(g) u, (N, F), of the even columns g and the odd ones u of a b, and a b, (N, 2 F).

    a: (N, C), b: (C, 2 F).
    """
    _check(x=a, w1=b)
    out = _swiglu(a, b, tuned=False)
    return out["hidden"], out["D"]


def mm_swiglu_gradient(a: Tensor, b: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of inner, (N, 2 F), where a b is that of silu(g) u, which comes second, (N, F).

    a: (N, C), b: (C, F), inner: (N, 2 F), with even columns g and odd ones u, as mm_swiglu gives it.
    """
    _check(dout=a, w2=b, inner=inner)
    # as fast as wider tiles, whose epilogue does not fit into Hopper's registers
    config = replace(default_config(a.device), tile_n=128)
    out = _swiglu_gradient(a, b, inner, config=config, tuned=False)
    return out["D"], out["hidden"]


def mm_added(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """a b + bias + residual, (N, C), summed in float32.

    a: (N, F), b: (F, C), bias: (C,), residual: (N, C).
    """
    _check(hidden=a, w2=b, residual=residual)
    if bias is None:
        return _added(a, b, residual, tuned=False)["D"]
    return _bias_added(a, b, residual, bias=bias.unsqueeze(0), tuned=False)["D"]


def mm_scaled(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """a b times scale, element by element, (N, F). a: (N, C), b: (C, F), scale: (N, F)."""
    _check(dout=a, w2=b, slope=scale)
    return _scaled(a, b, scale, tuned=False)["D"]


def mm_scaled_and_sum(a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """mm_scaled, and its sum over rows in float32, (F,), in the same order in every run."""
    _check(dout=a, w2=b, slope=scale)
    out = _scaled_and_sum(a, b, scale, tuned=False)
    return out["D"], out["sum"]


def mm_exp2_and_sum(
    a: Tensor, b: Tensor, subtrahend: Tensor, mask: Tensor, out: Tensor, width: int
) -> Tensor:
    """out = exp2(log2(e) a b - subtrahend + mask), (N, V), and its sums over columns in float32, (N,).

    a: (N, C), b: (C, V); subtrahend: (N,) and mask: (V,), float32. width: of a tile; it must divide V,
    because a tile would also sum what lies beyond the edge. Sums are in the same order in every run.
    """
    _check(hidden=a, weight=b, logits=out)
    config = replace(default_config(a.device), tile_n=width)
    vectors = {"subtrahend": subtrahend.unsqueeze(0), "mask": mask.unsqueeze(0)}
    return _exp2_and_sum(a, b, out={"D": out}, config=config, tuned=False, **vectors)["sum"]


def _check(**matrices: Tensor) -> None:
    """matrices: under their names in gelu_mlp.py and cross_entropy.py, whose callers read the errors."""
    for name, x in matrices.items():
        row = max(x.stride()) * x.element_size()
        if min(x.stride()) != 1 or row % ALIGNMENT or x.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} must have rows that begin at multiples of {ALIGNMENT} bytes, got "
                f"{tuple(x.shape)} with strides {x.stride()} at address {x.data_ptr()}: clone it, or "
                "choose sizes in multiples of 8"
            )
