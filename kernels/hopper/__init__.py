"""Gluon kernels for sm_90, the fast path for 16-bit heads of 32 to 256. Imports without a GPU or Gluon."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.layouts import bulk_readable
from kernels.problem import MOST_HEADS, CannotBuildError, Problem

# tiles have 64, 128 or 256 channels: for heads narrower than 32 the portable kernels are as fast
HEAD_DIMS = range(32, 257, 8)
DTYPES = (torch.bfloat16, torch.float16)
# row and tile numbers are int32 in the kernels
MOST_ROWS = 2**30
# why the installed Triton cannot build the kernels; empty until a build has failed
failures: list[str] = []


def refusal(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these kernels do not take a problem, or None if they do."""
    batch, seq_q, n_head, head_dim = q.shape
    if not is_hopper(q.device):
        return f"needs a GPU of compute capability 9.0, the tensors are on {q.device}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not one of {DTYPES}"
    if head_dim not in HEAD_DIMS:
        return f"takes heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, not of {head_dim}"
    if problem.block_size not in (0, 128):
        return f"takes block masks of 128 queries and keys, not of {problem.block_size}"
    if problem.softmax_scale < 1e-20:
        return f"divides by softmax_scale, which is {problem.softmax_scale}"
    if min(batch, seq_q, k.shape[1]) == 0 or batch * n_head * (max(seq_q, k.shape[1]) + 128) > MOST_ROWS:
        heads = f"{batch * n_head} heads of {seq_q} queries and {k.shape[1]} keys"
        return f"takes 1 to {MOST_ROWS} rows over all heads, each head padded by 128, not {heads}"
    if batch * n_head > MOST_HEADS:
        return f"takes at most {MOST_HEADS} heads over all batches, not {batch * n_head}"
    return build_error()


@cache
def is_hopper(device: torch.device) -> bool:
    # AMD's gfx90a also reports capability 9.0
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def build_error() -> str | None:
    """Why the installed Triton cannot build the kernels, or None if it can."""
    if not failures:
        try:
            launcher()
        except (ImportError, AttributeError) as error:
            note_failure(f"Gluon of the installed Triton lacks what they use: {error}")
    return failures[0] if failures else None


# Gluon is imported only where it is used; cached, because importing by name takes longer than choosing
@cache
def launcher():
    return import_module("kernels.hopper.launch")


def note_failure(reason: str) -> None:
    """Records and warns why kernels/hopper refuses every problem from now on."""
    failures.append(reason)
    warnings.warn(f"kernels/hopper does not run, kernels/portable does: {reason}", stacklevel=3)


@contextmanager
def building() -> Iterator[None]:
    """A context in which a kernel that does not compile is recorded and raises CannotBuildError."""
    try:
        yield
    except (CompilationError, PTXASError, OutOfResources, RuntimeError) as error:
        # the compiler's passes fail with a RuntimeError, but so does much else
        if isinstance(error, RuntimeError) and "PassManager" not in str(error):
            raise
        reason = f"the installed Triton does not compile it: {error}"
        note_failure(reason)
        raise CannotBuildError(reason) from error


def attention_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Tq, H, D) in q's dtype, lse (B, H, Tq) float32, of what `refusal` does not refuse."""
    with building():
        return launcher().attention_forward(problem, *map(bulk_readable, (q, k, v)))


def attention_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous or in `gradients`, of what `refusal` does not refuse."""
    dout, q, k, v, out = map(bulk_readable, (dout, q, k, v, out))
    with building():
        return launcher().attention_backward(problem, dout, dlse, q, k, v, out, lse, gradients=gradients)
