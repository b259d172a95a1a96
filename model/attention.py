"""Causal self-attention: the layer, its key-value cache, and the choice of implementation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.flash_attention import flash_attention
from kernels.packed import flash_attention_packed
from kernels.reference import attention_reference
from model.config import ModelConfig
from model.ring_attention import Ring, ring_attention
from model.rope import rotate

IMPLEMENTATIONS = ("flash", "sdpa", "reference")


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    # flash: our kernels; sdpa: torch's fused attention; reference: plain PyTorch, stores the (T, T) scores
    implementation: str

    def __post_init__(self):
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention.implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                f"got {self.implementation!r}"
            )


@dataclass(slots=True)
class LayerCache:
    """Keys and values of the tokens that one layer has seen, for generation.

    k, v: (B, capacity, Hkv, D); the first `length` positions are filled.
    """

    k: Tensor
    v: Tensor
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores (B, T, Hkv, D) new keys and values; returns all (B, length, Hkv, D) so far."""
        end = self.length + k.shape[1]
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]


class SelfAttention(nn.Module):
    """Multi-head causal self-attention on (B, T, C); a group of query heads may share keys and values."""

    def __init__(self, config: ModelConfig, implementation: str):
        super().__init__()
        self.n_heads = config.n_head, config.n_kv_head, config.n_kv_head
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.implementation = implementation
        # nothing comes between the product and the kernel: its gradient can be written in place
        equal_heads = config.n_head == config.n_kv_head
        self.takes_packed = implementation == "flash" and equal_heads and not config.qk_norm
        width = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, sum(self.n_heads) * config.head_dim, config.bias != "none")
        self.projection = nn.Linear(width, config.n_embd, config.bias == "all")
        self.residual_dropout = nn.Dropout(config.dropout)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(
        self,
        x: Tensor,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        ring: Ring | None = None,
    ) -> Tensor:
        """rotation: cos and sin by which queries and keys turn; ring: x is a part of longer sequences."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        dropout_p = self.dropout if self.training else 0.0
        as_it_is = cache is None and rotation is None and ring is None and dropout_p == 0.0
        if self.takes_packed and as_it_is:
            out = flash_attention_packed(qkv.unflatten(2, (3, -1)), document_ids=document_ids)
            return self.projection(out.flatten(2))
        # views of the packed product: no copy is made for the kernel
        q, k, v = qkv.split(self.n_heads, dim=2)  # (B, T, H, D), twice (B, T, Hkv, D)
        if self.qk_norm:
            # in the weights' own precision: autocast does not cast norms
            q, k = (
                norm(x.to(norm.weight.dtype)).to(v.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        if ring is not None:
            if dropout_p > 0.0:
                raise ValueError(f"model.dropout={dropout_p}: there is none over several processes, set it 0")
            out = ring_attention(q, k, v, ring, self.implementation)
        else:
            out = attend(q, k, v, self.implementation, document_ids=document_ids, dropout_p=dropout_p)
        return self.residual_dropout(self.projection(out.flatten(2)))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    implementation: str,
    *,
    document_ids: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention by the implementation that the configuration names, and by no other.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D), Tk >= Tq, the last query sees the last key.
    document_ids: (B, T) int32, a token sees only its own document. Returns (B, Tq, H, D).
    """
    if implementation == "flash":
        return flash_attention(q, k, v, causal=True, document_ids=document_ids, dropout_p=dropout_p)
    if implementation == "reference":
        return attention_reference(q, k, v, causal=True, document_ids=document_ids, dropout_p=dropout_p)
    n_query, n_key = q.shape[1], k.shape[1]
    mask = None
    if document_ids is not None:
        mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()  # (B, 1, T, T)
    elif n_query not in (1, n_key):
        # torch aligns its causal mask to the first key, a cache needs the last
        mask = torch.ones(n_query, n_key, dtype=torch.bool, device=q.device).tril(n_key - n_query)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None and n_query == n_key,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
