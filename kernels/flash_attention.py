"""Exact attention that never stores the (Tq, Tk) scores. Start reading here.

    flash_attention            (B, T, H, D): causal, full, window, documents, grouped heads, dropout
    flash_attention_varlen     (total, H, D): sequences of any lengths, packed one after the other

Both check their arguments, turn documents and lengths into intervals (intervals.py), and call one PyTorch
operator, `nanoflash::attention_forward`, whose gradient is another, `nanoflash::attention_backward`. The
operators hand the work to an implementation that operators.choose_implementation finds for each problem:
`python -m kernels.operators` prints which runs what, and why.
"""

import torch
from torch import Tensor

from kernels import checks
from kernels.block_mask import BlockMask
from kernels.intervals import document_bounds, mean_keys, varlen_bounds
from kernels.operators import attention


def flash_attention(
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
    """Exact attention, softmax(q k^T * softmax_scale) v over the visible keys, without storing the scores.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D), H a multiple of Hkv; bf16, fp16 or fp32; any strides.
    causal: query i sees keys up to i + Tk - Tq. window: only the last `window` of these.
    softmax_scale: D**-0.5 by default.
    document_ids: (B, Tk) int32, non-decreasing. A token sees only its own document; a negative id is padding.
        The queries are the last Tq tokens.
    block_mask: a key must also be visible in it, see kernels/block_masks.py.
    dropout_p: the share of probabilities to drop, at most 0.9961, in steps of 2**-16 (kernels/dropout.py).
    dropout_seed: int, or int64 tensor of one element on q's device, which a CUDA graph reads again at each
        replay. By default it is drawn from PyTorch's generator of that device.
    deterministic: gradients are bit-identical in every run.

    Returns (B, Tq, H, D) in q's dtype; with return_lse also the log of each row's sum of exponentials,
    (B, H, Tq) float32, through which gradients flow. A query that sees no key gives 0, lse -inf and zero
    gradients. Hidden keys and values, padding included, weigh 0 but must be finite: 0 * NaN is NaN. Under
    autocast q, k and v are cast to its dtype. Second derivatives and transforms of torch.func (grad, vmap)
    are not supported. Raises ValueError for anything else, before anything is launched; only the limit of
    2**31 queries over all heads is checked in the backward pass, and the values of document_ids not at all
    where nothing can be read: under torch.compile and while a CUDA graph is captured, where wrong ones give
    wrong results. Source: FlashAttention-2, arXiv:2307.08691.
    """
    q, k, v = checks.autocast(q=q, k=k, v=v)
    checks.check_tensors(q, k, v, n_dims=4)
    checks.check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    checks.check_options(q, causal, softmax_scale, window, dropout_p, dropout_seed)
    if block_mask is not None:
        checks.check_block_mask(block_mask, q, k)
        # the tiles of a causal block mask are already cut at the diagonal, from which a window is counted
        causal = causal and not (block_mask.causal and window is None)
    key_bounds = query_bounds = keys_per_query = None
    if document_ids is not None:
        length = checks.check_document_ids(document_ids, q, k)
        keys_per_query = mean_keys(length, causal=causal, window=window)
        key_bounds, query_bounds = document_bounds(document_ids, q.shape[1], causal=causal, window=window)
    out, lse = attend(
        q,
        k,
        v,
        key_bounds=key_bounds,
        query_bounds=query_bounds,
        causal=causal,
        softmax_scale=softmax_scale,
        window=window,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        block_mask=block_mask,
        keys_per_query=keys_per_query,
    )
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` for packed sequences: a token sees its own sequence only.

    q: (total_q, H, D); k, v: (total_k, Hkv, D). cu_seqlens: (n_sequences + 1,) int32, where each sequence
    starts, followed by total_q; values are checked where document_ids are. cu_seqlens_k: the same for k and
    v, if their lengths differ.
    Returns (total_q, H, D), and with return_lse also (H, total_q). New lengths never recompile a kernel.
    Sequences share tiles, so a NaN or an infinity in one may reach its neighbours.
    """
    q, k, v = checks.autocast(q=q, k=k, v=v)
    checks.check_tensors(q, k, v, n_dims=3)
    checks.check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    checks.check_options(q, causal, softmax_scale, window, dropout_p, dropout_seed)
    length = checks.check_cu_seqlens("cu_seqlens", cu_seqlens, q)
    if cu_seqlens_k is None:
        checks.check_same_total(q, k)
        cu_seqlens_k = cu_seqlens
    else:
        length = checks.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k)
        checks.check_same_count(cu_seqlens, cu_seqlens_k)
    if block_mask is not None:
        checks.check_block_mask(block_mask, q, k)
    key_bounds, query_bounds = varlen_bounds(
        cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0], causal=causal, window=window
    )
    q, k, v = q[None], k[None], v[None]
    out, lse = attend(
        q,
        k,
        v,
        key_bounds=key_bounds,
        query_bounds=query_bounds,
        causal=causal,
        softmax_scale=softmax_scale,
        window=window,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        block_mask=block_mask,
        keys_per_query=mean_keys(length, causal=causal, window=window),
    )
    return (out[0], lse[0]) if return_lse else out[0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bounds: Tensor | None,
    query_bounds: Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    deterministic: bool,
    block_mask: BlockMask | None,
    keys_per_query: float | None,
) -> tuple[Tensor, Tensor]:
    """Fills in the defaults and calls the operator."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if dropout_p == 0.0:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = torch.randint(2**62, (1,), device=q.device)
    elif not isinstance(dropout_seed, Tensor):
        dropout_seed = torch.full((1,), dropout_seed, dtype=torch.int64, device=q.device)
    if block_mask is not None or dropout_seed is not None:
        checks.check_may_be_saved(block_mask, dropout_seed, q, k, v)
    if key_bounds is not None:
        # the bounds already contain both
        causal, window = False, None
    return attention(
        q,
        k,
        v,
        key_bounds,
        query_bounds,
        dropout_seed,
        [] if block_mask is None else block_mask.tensors(),
        softmax_scale,
        causal,
        window,
        dropout_p,
        deterministic,
        keys_per_query,
    )
