"""Backward pass: dq, dk and dv from dout, without atomics, so that every run gives the same bits.

    p = 2^(s - lse)    ds = p (dout v^T - delta)    delta = rowsum(out dout) - dlse
    dq = ds k          dk = ds^T q                  dv = p^T dout

Three kernels: `preprocess_kernel` computes delta and lse in base 2 for every query, `dkdv_kernel` and
`dq_kernel` the rest. Both of these compute the scores. That takes two more matrix products than one fused
kernel, but no float32 dq in memory, and no order of additions that depends on timing. dk and dv are computed
for each head of q; where heads share keys, they are added up after the kernel.

Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2; the gradient of lse enters through delta.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import Descriptor, launch
from kernels.layouts import bulk_readable
from kernels.portable.block_lists import n_programs
from kernels.portable.dkdv import dkdv_kernel
from kernels.portable.dq import dq_kernel
from kernels.portable.tile_io import head_descriptor, in_reach, load_tile
from kernels.problem import Problem, dot_precision, list_strides
from kernels.tiles import Tile, choose_tile, padded_head_dim

LOG2E = tl.constexpr(1.4426950408889634)
PREPROCESS_BLOCK_M = 64
# a multiple of every BLOCK_M of tiles.py
MAX_BLOCK_M = 128


@triton.jit(do_not_specialize=["seq_q", "seq_padded"])
def preprocess_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_log2_ptr,
    stride_ob, stride_ot, stride_oh, stride_od,
    stride_dob, stride_dot, stride_doh, stride_dod,
    seq_q, seq_padded, n_head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n_tiles = seq_padded // BLOCK_M
    first_row = tl.program_id(0) % n_tiles * BLOCK_M
    head_of_batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = head_of_batch // n_head, head_of_batch % n_head
    out = load_tile(
        out_ptr + batch * stride_ob + head * stride_oh, batch, head, first_row, seq_q, stride_ot, stride_od,
        False, HEAD_DIM, BLOCK_M, BLOCK_D, True,
    )  # fmt: skip
    dout = load_tile(
        dout_ptr + batch * stride_dob + head * stride_doh, batch, head, first_row, seq_q,
        stride_dot, stride_dod,
        False, HEAD_DIM, BLOCK_M, BLOCK_D, True,
    )  # fmt: skip
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # (BLOCK_M,)

    rows = first_row + tl.arange(0, BLOCK_M)
    offsets = head_of_batch * seq_q + rows
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offsets, mask=rows < seq_q, other=0.0)
    lse = tl.load(lse_ptr + offsets, mask=rows < seq_q, other=float("-inf"))
    # a row that sees nothing, or does not exist: 2^(s - inf) is 0, and so are all its gradients
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    offsets = head_of_batch * seq_padded + rows
    tl.store(delta_ptr + offsets, delta)
    tl.store(lse_log2_ptr + offsets, lse)


class Inputs(NamedTuple):
    """What dkdv_kernel and dq_kernel are both launched with."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    # (B, H, seq_padded) float32
    lse_log2: Tensor
    delta: Tensor
    # of q, k, v and dout, by dimension
    strides: tuple[int, ...]
    # seq_q, seq_k, seq_padded, n_head, group_size
    sizes: tuple[int, ...]
    # the window, two softmax scales and two numbers of dropout
    scalars: tuple[float, ...]
    constants: dict[str, Any]


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
    """dq, dk, dv in the shape and dtype of q, k, v: contiguous, or in `gradients` where it is given.

    dlse: (B, H, Tq) float32 or None. gradients: its dk and dv have the same strides. Raises ValueError for
    2**31 or more queries over all heads, each head padded to whole tiles.
    """
    dout, q, k, v, out = map(in_reach, (dout, q, k, v, out))
    seq_padded = padded_length(q)
    dq, dk, dv = gradients or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, lse_log2 = preprocess(out, dout, lse, dlse, seq_padded)
    dkdv_tile, dq_tile = (
        choose_tile(name, q.shape[3], q.dtype, q.device, problem.tile_variant, problem.block_size)
        for name in ("dkdv", "dq")
    )
    if dkdv_tile.tma or dq_tile.tma:
        q, k, v, dout = map(bulk_readable, (q, k, v, dout))
    inputs = gather_inputs(problem, q, k, v, dout, lse_log2, delta)
    compute_dkdv(problem, inputs, dkdv_tile, dk, dv)
    compute_dq(problem, inputs, dq_tile, dq)
    return dq, dk, dv


def padded_length(q: Tensor) -> int:
    """Rows of delta and lse for each head: whole tiles, which the other two kernels load without masks."""
    batch, seq_q, n_head, _ = q.shape
    seq_padded = triton.cdiv(seq_q, MAX_BLOCK_M) * MAX_BLOCK_M
    if batch * n_head * seq_padded >= 2**31:
        raise ValueError(
            f"q must have fewer than 2**31 queries over all heads, each head padded to {seq_padded}, got "
            f"{batch * n_head} heads of {seq_q}: split the batch"
        )
    return seq_padded


def preprocess(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, seq_padded: int
) -> tuple[Tensor, Tensor]:
    """delta, and lse in base 2: (B, H, seq_padded) float32."""
    batch, seq_q, n_head, head_dim = out.shape
    delta, lse_log2 = (lse.new_empty(batch, n_head, seq_padded) for _ in range(2))
    launch(
        preprocess_kernel,
        (seq_padded // PREPROCESS_BLOCK_M * batch * n_head,),
        out, dout, lse, None if dlse is None else dlse.contiguous(), delta, lse_log2,
        *out.stride(), *dout.stride(), seq_q, seq_padded, n_head,
        HEAD_DIM=head_dim, BLOCK_M=PREPROCESS_BLOCK_M, BLOCK_D=padded_head_dim(head_dim),
    )  # fmt: skip
    return delta, lse_log2


def gather_inputs(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, delta: Tensor
) -> Inputs:
    seq_q, n_head, head_dim = q.shape[1:]
    seq_k, n_kv_head = k.shape[1:3]
    return Inputs(
        q, k, v, dout, lse_log2, delta,
        strides=(*q.stride(), *k.stride(), *v.stride(), *dout.stride()),
        sizes=(seq_q, seq_k, delta.shape[2], n_head, n_head // n_kv_head),
        scalars=(
            problem.window or 0, problem.softmax_scale, problem.softmax_scale * math.log2(math.e),
            problem.dropout_limit, problem.keep_scale,
        ),
        constants={
            "MASK": problem.mask,
            "BLOCK_SIZE": problem.block_size,
            "DROPOUT": problem.dropout_p > 0.0,
            "PRECISION": dot_precision(q),
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
        },
    )  # fmt: skip


def compute_dkdv(problem: Problem, inputs: Inputs, tile: Tile, dk: Tensor, dv: Tensor) -> None:
    """Writes dk and dv."""
    batch, seq_k, n_kv_head, head_dim = dk.shape
    *_, n_head, group_size = inputs.sizes
    keys_first = tile.keys_first and problem.dropout_p == 0.0
    lists = problem.transposed_column_lists if keys_first else problem.column_lists
    # for each head of q: a loop over the heads that share a key would run out of registers
    parts = (dk, dv)
    if group_size > 1:
        parts = torch.empty(2, batch, seq_k, n_head, head_dim, dtype=dk.dtype, device=dk.device).unbind()
    launch(
        dkdv_kernel,
        (n_programs(seq_k, problem.block_size, tile.block_n) * batch * n_head,),
        *sources(inputs, tile), inputs.lse_log2, inputs.delta, *parts,
        problem.query_bounds, problem.key_bounds, problem.dropout_seed, *lists,
        *inputs.strides, *parts[0].stride()[:3], *list_strides(lists), *inputs.sizes, *inputs.scalars,
        TMA=tile.tma, KEYS_FIRST=keys_first, **inputs.constants, **tile.options(),
    )  # fmt: skip
    if group_size > 1:
        for total, part in zip((dk, dv), parts, strict=True):
            torch.sum(part.unflatten(2, (n_kv_head, group_size)), 3, out=total)


def compute_dq(problem: Problem, inputs: Inputs, tile: Tile, dq: Tensor) -> None:
    """Writes dq."""
    batch, seq_q, n_head, _ = dq.shape
    lists = problem.row_lists
    launch(
        dq_kernel,
        (n_programs(seq_q, problem.block_size, tile.block_m) * batch * n_head,),
        *sources(inputs, tile), inputs.lse_log2, inputs.delta, dq,
        problem.key_bounds, problem.dropout_seed, *lists,
        *inputs.strides, *dq.stride()[:3], *list_strides(lists), *inputs.sizes, *inputs.scalars,
        TMA=tile.tma, HELD=tile.held, **inputs.constants, **tile.options(),
    )  # fmt: skip


def sources(inputs: Inputs, tile: Tile) -> tuple[Tensor | Descriptor, ...]:
    """q, k, v and dout as the kernels read them."""
    tensors = inputs[:4]
    if not tile.tma:
        return tensors
    rows, block_d = (tile.block_m, tile.block_n, tile.block_n, tile.block_m), inputs.constants["BLOCK_D"]
    return tuple(head_descriptor(x, n, block_d) for x, n in zip(tensors, rows, strict=True))
