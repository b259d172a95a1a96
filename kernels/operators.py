"""The two PyTorch operators, their gradients, and which implementation runs them.

An operator is opaque to torch.compile: what it decides inside, it decides at run time, from real tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import product

import torch
from torch import Tensor

from kernels import block_masks, hopper
from kernels.checks import DTYPES, has_kernels, is_interpreted_wrongly
from kernels.intervals import document_bounds
from kernels.layouts import with_tokens_in_memory
from kernels.problem import CannotBuildError, Problem
from kernels.registration import differentiate, operator
from kernels.repeats import repeated

# packages of kernels/, fastest first. The last one takes every problem; each of the others has
# refusal(problem, q, k, v), which returns why it does not take a problem, or None
IMPLEMENTATIONS = ("hopper", "portable")

# head sizes in implementation_table
TABLE_HEAD_DIMS = (16, 32, 64, 128, 256)

# set by use_implementation; for the whole process, because autograd runs backward passes in its own threads
forced: str | None = None


def _fake_forward(q, k, v, *options):
    batch, seq_q, n_head, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, n_head, seq_q, dtype=torch.float32)


def _fake_backward(dout, dlse, q, k, v, *options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def choices() -> tuple:
    """What decides between implementations besides the problem."""
    return forced, bool(hopper.failures)


def problem_of(
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    dropout_seed: Tensor | None,
    blocks: list[Tensor],
    softmax_scale: float,
    causal: bool,
    window: int | None,
    dropout_p: float,
    deterministic: bool,
    keys_per_query: float | None,
) -> Problem:
    # a call past the dispatcher may bring numbers of any type, but Triton compiles another kernel for an int
    # of 1, and to it True is not an int
    return Problem(
        softmax_scale=float(softmax_scale),
        causal=causal,
        window=None if window is None else int(window),
        key_bounds=key_bounds,
        query_bounds=query_bounds,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        keys_per_query=keys_per_query,
        blocks=tuple(blocks),
    )


@operator(fake=_fake_forward)
@repeated(also_depends_on=choices)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    dropout_seed: Tensor | None,
    blocks: list[Tensor],
    softmax_scale: float,
    causal: bool,
    window: int | None,
    dropout_p: float,
    deterministic: bool,
    keys_per_query: float | None,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(
        key_bounds, query_bounds, dropout_seed, blocks, softmax_scale, causal, window, dropout_p,
        deterministic, keys_per_query,
    )  # fmt: skip
    return run(problem, q, k, v, lambda module: module.attention_forward(problem, q, k, v))


@operator(fake=_fake_backward)
@repeated(also_depends_on=choices)
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    dropout_seed: Tensor | None,
    blocks: list[Tensor],
    softmax_scale: float,
    causal: bool,
    window: int | None,
    dropout_p: float,
    deterministic: bool,
    keys_per_query: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = problem_of(
        key_bounds, query_bounds, dropout_seed, blocks, softmax_scale, causal, window, dropout_p,
        deterministic, keys_per_query,
    )  # fmt: skip
    dout = with_tokens_in_memory(dout)

    return run(
        problem, q, k, v, lambda module: module.attention_backward(problem, dout, dlse, q, k, v, out, lse)
    )


def _save_for_backward(ctx, inputs, output):
    q, k, v, key_bounds, query_bounds, dropout_seed, blocks, *options = inputs
    ctx.save_for_backward(q, k, v, *output, key_bounds, query_bounds, dropout_seed, *blocks)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, key_bounds, query_bounds, dropout_seed, *blocks = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if dlse is not None:
        # in a row that sees nothing dlse may be nan, as -inf * 0 after a mask: it must not reach other rows
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    gradients = backward(
        dout, dlse, q, k, v, out, lse, key_bounds, query_bounds, dropout_seed, blocks, *ctx.options
    )
    return *gradients, None, None, None, None, *(None for _ in ctx.options)


def save_nothing(ctx, inputs, output):
    pass


def refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flash_attention has no second derivative: use attention_reference where you need one "
        "(double backward, gradient penalties), or leave out create_graph=True"
    )


# the operators with their gradients, called with the same arguments
attention = differentiate(attention_forward, _save_for_backward, _backward)
backward = differentiate(attention_backward, save_nothing, refuse_second_derivative)


def run(problem: Problem, q: Tensor, k: Tensor, v: Tensor, call: Callable):
    """call(module) with the module that runs a problem: it has attention_forward and attention_backward."""
    name, _ = choose_implementation(problem, q, k, v)
    try:
        return call(package(name))
    except CannotBuildError:
        if forced is not None:
            raise
    # that implementation now refuses every problem, and has said why
    return run(problem, q, k, v, call)


# cached: importing by name takes longer than choosing
@cache
def package(name: str):
    return import_module(f"kernels.{name}")


def choose_implementation(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    """The name of the implementation that runs a problem, "hopper" or "portable", and the reason.

    Raises ValueError if use_implementation asks for one that refuses the problem.
    """
    if forced is not None:
        refusal = None if forced == IMPLEMENTATIONS[-1] else package(forced).refusal(problem, q, k, v)
        if refusal is not None:
            raise ValueError(f"kernels/{forced} does not take this problem: {refusal}. Use kernels/portable")
        return forced, "asked for by use_implementation"
    refusals = []
    for name in IMPLEMENTATIONS[:-1]:
        refusal = package(name).refusal(problem, q, k, v)
        if refusal is None:
            return name, "the fastest that takes this problem"
        refusals.append(f"{name} {refusal}")
    return IMPLEMENTATIONS[-1], "; ".join(refusals)


def implementation_table(device: torch.device | str) -> str:
    """What runs on a device, one line for each kind of problem; python -m kernels.operators prints it."""
    lines = []
    ids = torch.zeros(1, 128, dtype=torch.int32, device=device)
    key_bounds, query_bounds = document_bounds(ids, 128, causal=True, window=None)
    kinds = {
        "plain": {},
        "window": {"window": 64},
        "documents": {"causal": False, "key_bounds": key_bounds, "query_bounds": query_bounds},
        "dropout": {"dropout_p": 0.1},
        "deterministic": {"deterministic": True},
    }
    for kind, block_size in (("block mask", 128), ("block mask of 64", 64)):
        mask = block_masks.causal(128, block_size=block_size, device=device)
        kinds[kind] = {"causal": False, "blocks": tuple(mask.tensors())}
    kinds["documents and block mask"] = kinds["documents"] | kinds["block mask"]
    for dtype, head_dim, (kind, options) in product(DTYPES, TABLE_HEAD_DIMS, kinds.items()):
        x = torch.empty(1, 128, 1, head_dim, dtype=dtype, device=device)
        problem = Problem(**{"softmax_scale": 1.0, "causal": True} | options)
        name, reason = choose_implementation(problem, x, x, x)
        if not has_kernels(x.device):
            name, reason = "none", "needs a GPU, or TRITON_INTERPRET=1 to run slowly on the CPU"
        elif is_interpreted_wrongly(x.device, dtype):
            name, reason = "none", "Triton's interpreter multiplies bfloat16 wrongly"
        lines.append(f"{str(dtype).removeprefix('torch.'):9} D {head_dim:3} {kind:24} {name:9} {reason}")
    return "\n".join(lines)


@contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Context in which all threads use this implementation, for tests and benchmarks; None: choose."""
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {name!r}")
    global forced
    before, forced = forced, name
    try:
        yield
    finally:
        forced = before


if __name__ == "__main__":
    print(implementation_table("cuda" if torch.cuda.is_available() else "cpu"))
