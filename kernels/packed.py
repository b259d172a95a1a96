"""Self-attention on packed queries, keys and values, (B, T, 3, H, D), whose gradient is packed as well.

A linear layer makes q, k and v in one product and takes their gradient in one tensor. Here the kernels read
and write the parts of these in place; through `flash_attention` autograd would copy three gradients into one.
"""

import torch
from torch import Tensor

from kernels import checks
from kernels.intervals import document_bounds, mean_keys
from kernels.layouts import with_tokens_in_memory
from kernels.operators import choices, problem_of, refuse_second_derivative, run, save_nothing
from kernels.registration import differentiate, operator
from kernels.repeats import repeated


def _fake_forward(qkv, *options):
    batch, seq_len, _, n_head, head_dim = qkv.shape
    out = qkv.new_empty(batch, seq_len, n_head, head_dim)
    return out, qkv.new_empty(batch, n_head, seq_len, dtype=torch.float32)


def _fake_backward(dout, qkv, *options):
    return torch.empty_like(qkv)


@operator(fake=_fake_forward)
@repeated(also_depends_on=choices)
def packed_attention_forward(
    qkv: Tensor,
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    keys_per_query: float | None,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(
        key_bounds, query_bounds, None, [], softmax_scale, causal, None, 0.0, deterministic, keys_per_query
    )
    q, k, v = qkv.unbind(2)
    return run(problem, q, k, v, lambda module: module.attention_forward(problem, q, k, v))


@operator(fake=_fake_backward)
@repeated(also_depends_on=choices)
def packed_attention_backward(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    keys_per_query: float | None,
) -> Tensor:
    problem = problem_of(
        key_bounds, query_bounds, None, [], softmax_scale, causal, None, 0.0, deterministic, keys_per_query
    )
    q, k, v = qkv.unbind(2)
    dqkv = torch.empty_like(qkv)
    dout, gradients = with_tokens_in_memory(dout), dqkv.unbind(2)

    def backward(module):
        module.attention_backward(problem, dout, None, q, k, v, out, lse, gradients=gradients)

    run(problem, q, k, v, backward)
    return dqkv


def _save_for_backward(ctx, inputs, output):
    qkv, key_bounds, query_bounds, *options = inputs
    ctx.save_for_backward(qkv, *output, key_bounds, query_bounds)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, _):
    gradient = None
    if dout is not None:
        gradient = packed_backward(dout, *ctx.saved_tensors, *ctx.options)
    return gradient, None, None, *(None for _ in ctx.options)


packed_attention = differentiate(packed_attention_forward, _save_for_backward, _backward)
packed_backward = differentiate(packed_attention_backward, save_nothing, refuse_second_derivative)


def flash_attention_packed(
    qkv: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    document_ids: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """`flash_attention` on q, k, v = qkv.unbind(2), (B, T, H, D) each, whose gradient needs no copy.

    qkv: (B, T, 3, H, D) contiguous. Arguments, result and errors are flash_attention's.
    """
    (qkv,) = checks.autocast(qkv=qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape (B, T, 3, H, D), got {tuple(qkv.shape)}")
    if not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous, got strides {qkv.stride()}: call qkv.contiguous()")
    q, k, v = qkv.unbind(2)
    checks.check_tensors(q, k, v, n_dims=4)
    checks.check_flags(causal=causal, deterministic=deterministic)
    checks.check_options(q, causal, softmax_scale, None, 0.0, None)
    key_bounds = query_bounds = keys_per_query = None
    if document_ids is not None:
        length = checks.check_document_ids(document_ids, q, k)
        keys_per_query = mean_keys(length, causal=causal, window=None)
        key_bounds, query_bounds = document_bounds(document_ids, q.shape[1], causal=causal, window=None)
        causal = False
    scale = qkv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, _ = packed_attention(qkv, key_bounds, query_bounds, scale, causal, deterministic, keys_per_query)
    return out
