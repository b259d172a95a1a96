"""What generation keeps of the tokens that a model has seen: the keys and values of each layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.block_mask import BlockMask
from kernels.decode import append_and_decode, split_heads
from kernels.reference import decode_reference
from model.rope import rotate


@dataclass(slots=True)
class LayerCache:
    """Keys and values of B sequences in one layer: first those of the prompts, then of one token at a time.

    k, v: (B, capacity, Hkv, D), token t at place t % capacity. A layer with a sliding window has the capacity
    of the window: a new token replaces the one that has left it. lengths: (B,) int64, the tokens of each
    sequence, including those about to be stored; one tensor for all layers, which a captured CUDA graph reads
    in every replay. block_mask: of capacity tokens, for layers with other patterns.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_mask: BlockMask | None = None

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], lengths: Tensor, block_mask: BlockMask | None, dtype: torch.dtype
    ) -> "LayerCache":
        """A cache of zeros of shape (B, capacity, Hkv, D). Each head's keys are contiguous in memory."""
        batch, capacity, n_head, head_dim = shape
        # two tensors, not halves of one: a compiler copies a view that it writes to beside another view
        k, v = (
            torch.zeros(batch, n_head, capacity, head_dim, dtype=dtype, device=lengths.device)
            for _ in range(2)
        )
        return cls(k.transpose(1, 2), v.transpose(1, 2), lengths, block_mask)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values of prompts, (B, T, Hkv, D); what comes after lengths[b] is padding."""
        batch, n_tokens = k.shape[:2]
        capacity = self.k.shape[1]
        if n_tokens <= capacity:
            self.k[:, :n_tokens], self.v[:, :n_tokens] = k, v
            return
        # the last tokens of each prompt; a shorter prompt repeats its first token
        places = torch.arange(capacity, device=k.device)
        tokens = (self.lengths[:, None] - capacity + places).clamp(min=0)  # (B, capacity)
        rows = torch.arange(batch, device=k.device)[:, None]
        self.k[rows, tokens % capacity] = k[rows, tokens].to(self.k.dtype)
        self.v[rows, tokens % capacity] = v[rows, tokens].to(self.v.dtype)

    def attend(
        self, qkv: Tensor, implementation: str, rotation: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Stores one new token's key and value, and returns its attention, (B, 1, H, D) in qkv's dtype.

        qkv: (B, 1, H + 2 Hkv, D), its queries, key and value. rotation: cos and sin that turn queries and key
        first, (B or 1, 1, 1, D / 2) or (1, 1, D / 2) float32.
        """
        capacity, n_kv_head = self.k.shape[1:3]
        if implementation == "flash":
            turn = rotation and tuple(x.expand(len(qkv), 1, 1, -1).contiguous() for x in rotation)
            options = {"turn": turn, "block_mask": self.block_mask}
            return append_and_decode(qkv, self.k, self.v, self.lengths, **options)
        q, k, v = split_heads(qkv, n_kv_head)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        rows, place = torch.arange(len(k), device=k.device), (self.lengths - 1) % capacity
        self.k[rows, place], self.v[rows, place] = k[:, 0], v[:, 0]
        if implementation == "reference":
            return decode_reference(q, self.k, self.v, self.lengths, block_mask=self.block_mask)
        mask = torch.arange(capacity, device=q.device) < self.lengths[:, None]  # (B, capacity)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.k.transpose(1, 2),
            self.v.transpose(1, 2),
            attn_mask=mask[:, None, None],
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
