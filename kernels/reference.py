"""The definition of attention in plain PyTorch, against which the kernels are tested: quadratic in memory."""

import torch
from torch import Tensor

from kernels import checks
from kernels.block_mask import BlockMask
from kernels.dropout import dropout_keep_mask, keep_scale


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    document_ids: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v over the visible keys, with the arguments of `flash_attention`.

    Computes in q's dtype: pass float64 for the truth. lse is at least float32. `deterministic` has no effect
    here. Takes any device, floating dtype, head_dim and number of tokens. Raises ValueError for what else
    `flash_attention` refuses, and for dropout without a seed: only a given seed reproduces the kernels' mask.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_is_tensor(name, x)
    if torch.amp.is_autocast_available(q.device.type):
        q, k, v = checks.autocast_here(q, k, v)
    checks.check_together(q, k, v, n_dims=4, may_lack_tokens=True)
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be floating-point, got {q.dtype}: cast them")
    checks.check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    checks.check_options(q, causal, softmax_scale, window, dropout_p, dropout_seed)
    if block_mask is not None:
        checks.check_block_mask(block_mask, q, k)
    if document_ids is not None:
        checks.check_document_ids(document_ids, q, k)
    if dropout_p > 0.0 and dropout_seed is None:
        raise ValueError(
            f"dropout_seed must be given when dropout_p is {dropout_p}: pass an int or an int64 tensor"
        )
    batch, seq_q, n_head, head_dim = q.shape
    seq_k, n_kv_head = k.shape[1:3]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    k = k.repeat_interleave(n_head // n_kv_head, dim=2)
    v = v.repeat_interleave(n_head // n_kv_head, dim=2)

    visible = visible_keys(
        seq_q, seq_k, causal=causal, window=window, document_ids=document_ids, device=q.device
    )
    if block_mask is not None:
        visible = visible & block_mask.to_dense()
    sees_any = visible.any(dim=-1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    # softmax of a row of nothing but -inf is nan: give it zeros here, and mask the result below
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(~sees_any, 0.0)
    probabilities = scores.softmax(dim=-1).masked_fill(~sees_any, 0.0)
    if dropout_p > 0.0:
        # of a tensor of one number, too
        dropout_p = float(dropout_p)
        keep = dropout_keep_mask(dropout_seed, dropout_p, batch, n_head, seq_q, seq_k, q.device)
        probabilities = probabilities.masked_fill(~keep, 0.0) * keep_scale(dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
    if not return_lse:
        return out
    lse = scores.to(torch.promote_types(q.dtype, torch.float32)).logsumexp(dim=-1)
    return out, lse.masked_fill(~sees_any.squeeze(-1), float("-inf"))


def decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_mask: BlockMask | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """The last Tq tokens' attention to the first lengths[b] keys; arguments as in `decode_attention`."""
    n_query, capacity = q.shape[1], k.shape[1]
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    lengths = lengths.clamp(max=capacity)
    columns = torch.arange(capacity, device=q.device)
    ends = lengths[:, None] - torch.arange(n_query - 1, -1, -1, device=q.device)  # (B, Tq)
    visible = (columns < ends[:, :, None])[:, None]  # (B, 1, Tq, capacity)
    if block_mask is not None:
        visible = visible & block_mask.rows_to_dense((lengths - 1).clamp(min=0)).transpose(0, 2)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    sees_any = visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(~sees_any, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1).masked_fill(~sees_any, 0.0), v)


def visible_keys(
    seq_q: int,
    seq_k: int,
    *,
    causal: bool,
    window: int | None = None,
    document_ids: Tensor | None = None,
    device=None,
) -> Tensor:
    """True where query i sees key j; broadcasts to (B, H, Tq, Tk). The last query is at the last key."""
    i = torch.arange(seq_k - seq_q, seq_k, device=device)[:, None]
    j = torch.arange(seq_k, device=device)[None, :]
    visible = torch.ones(1, 1, seq_q, seq_k, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (j <= i)
    if window is not None:
        visible = visible & (j <= i) & (j > i - window)
    if document_ids is not None:
        of_query, of_key = document_ids[:, None, seq_k - seq_q :, None], document_ids[:, None, None, :]
        visible = visible & (of_query == of_key) & (of_query >= 0)
    return visible
