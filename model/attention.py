"""Causal self-attention: the layer, its key-value cache, and the choice of implementation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.flash_attention import flash_attention
from kernels.reference import attention_reference

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

    k, v: (B, capacity, H, D); the first `length` positions are filled.
    """

    k: Tensor
    v: Tensor
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores (B, T, H, D) new keys and values; returns all (B, length, H, D) so far."""
        end = self.length + k.shape[1]
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]


class SelfAttention(nn.Module):
    """Multi-head causal self-attention on (B, T, C), heads of C / n_head channels."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, implementation: str):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.implementation = implementation
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.projection = nn.Linear(n_embd, n_embd)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, document_ids: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        batch, seq_len, n_embd = x.shape
        # views of the packed product: no copy is made for the kernel
        q, k, v = self.qkv(x).view(batch, seq_len, 3, self.n_head, -1).unbind(2)  # (B, T, H, D) each
        if cache is not None:
            k, v = cache.append(k, v)
        dropout_p = self.dropout if self.training else 0.0
        out = attend(q, k, v, self.implementation, document_ids=document_ids, dropout_p=dropout_p)
        return self.residual_dropout(self.projection(out.reshape(batch, seq_len, n_embd)))


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

    q: (B, Tq, H, D); k, v: (B, Tk, H, D), Tk >= Tq, the last query sees the last key.
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
    )
    return out.transpose(1, 2)
