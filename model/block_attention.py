"""Attention to a part of the keys, forward and backward, as ring attention needs it: one entry per backend.

    forward(q, k, v, mask, softmax_scale) -> out, lse
    backward(dout, q, k, v, out, lse, mask, softmax_scale) -> dq, dk, dv

q, out, dout: (B, Tq, H, D); k, v: (B, Tk, Hkv, D); lse: (B, H, Tq). The backward pass takes the out and lse
of the whole row, over all keys: so its gradients are this part's share of the whole attention's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.block_mask import BlockMask
from kernels.operators import attention_backward, attention_forward


@dataclass(frozen=True, slots=True)
class Mask:
    """Which of Tk keys each of Tq queries sees: all, up to its own place or within bounds, cut to blocks.

    key_bounds (B, 2, Tq), query_bounds (B, 2, Tk) int32, see kernels/intervals.py; both None if not needed.
    blocks: the blocks kept of Tq queries and Tk keys; None for all.
    """

    causal: bool
    key_bounds: Tensor | None
    query_bounds: Tensor | None
    blocks: BlockMask | None = None

    @staticmethod
    def of(key_bounds: Tensor, query_bounds: Tensor, device: torch.device | str) -> "Mask":
        """The cheapest mask equal to the bounds (B or 1, 2, ...), which are on the CPU."""
        first, end = key_bounds.unbind(1)
        n_query, n_key = end.shape[1], query_bounds.shape[2]
        if bool((first == 0).all()):
            if bool((end == n_key).all()):
                return Mask(False, None, None)
            if n_query == n_key and bool((end == torch.arange(1, n_key + 1, device="cpu")).all()):
                return Mask(True, None, None)
        return Mask(False, key_bounds.to(device), query_bounds.to(device))

    def expanded(self, batch: int) -> tuple[Tensor | None, Tensor | None]:
        """The bounds with a line for each of the B sequences, as the kernels read them."""
        if self.key_bounds is None:
            return None, None
        return tuple(
            bounds.expand(batch, -1, -1).contiguous() for bounds in (self.key_bounds, self.query_bounds)
        )

    def visible(self, n_query: int, n_key: int, device: torch.device) -> Tensor:
        """True where a query sees a key; broadcasts to (B, H, Tq, Tk)."""
        visible = torch.ones(1, 1, n_query, n_key, dtype=torch.bool, device=device)
        if self.causal:
            visible = visible.tril()
        if self.key_bounds is not None:
            columns = torch.arange(n_key, device=device)
            first, end = self.key_bounds[:, :, :, None].unbind(1)  # (B, Tq, 1)
            visible = ((columns >= first) & (columns < end))[:, None]
        return visible if self.blocks is None else visible & self.blocks.to_dense()


def flash_forward(q, k, v, mask: Mask, softmax_scale: float) -> tuple[Tensor, Tensor]:
    return attention_forward(q, k, v, *mask.expanded(q.shape[0]), **_options(mask, softmax_scale))


def flash_backward(dout, q, k, v, out, lse, mask: Mask, softmax_scale: float) -> tuple[Tensor, ...]:
    bounds = mask.expanded(q.shape[0])
    return attention_backward(dout, None, q, k, v, out, lse, *bounds, **_options(mask, softmax_scale))


def _options(mask: Mask, softmax_scale: float) -> dict:
    """The keyword arguments of the forward and the backward operator, the same for both."""
    return {
        "dropout_seed": None,
        "blocks": [] if mask.blocks is None else mask.blocks.tensors(),
        "softmax_scale": softmax_scale,
        "causal": mask.causal,
        "window": None,
        "dropout_p": 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "keys_per_query": None,
    }


def reference_forward(q, k, v, mask: Mask, softmax_scale: float) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = map(_accurate, (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = reference_scores(q, k, mask, softmax_scale)
    lse = scores.logsumexp(-1)  # (B, H, Tq)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities(scores, lse), v.repeat_interleave(group, 2))
    return out.to(dtype), lse


def reference_backward(dout, q, k, v, out, lse, mask: Mask, softmax_scale: float) -> tuple[Tensor, ...]:
    dtype = q.dtype
    dout, q, k, v, out = map(_accurate, (dout, q, k, v, out))
    n_kv_head, group = k.shape[2], q.shape[2] // k.shape[2]
    p = probabilities(reference_scores(q, k, mask, softmax_scale), lse)
    delta = torch.einsum("bqhd,bqhd->bhq", dout, out)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(group, 2))
    ds = p * (dp - delta[..., None]) * softmax_scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(group, 2))
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (n_kv_head, group)).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (n_kv_head, group)).sum(3)
    return tuple(x.to(dtype) for x in (dq, dk, dv))


def _accurate(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64; lse has this dtype too, whatever the dtype of q."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reference_scores(q: Tensor, k: Tensor, mask: Mask, softmax_scale: float) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    visible = mask.visible(q.shape[1], k.shape[1], q.device)
    return (scores * softmax_scale).masked_fill(~visible, float("-inf"))


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """e^(scores - lse), and 0 in rows that see nothing."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()


BLOCK_ATTENTION = {
    "flash": (flash_forward, flash_backward),
    "reference": (reference_forward, reference_backward),
}
