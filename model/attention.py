"""Causal self-attention: the layer, and the choice of implementation and of blocks."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import block_masks
from kernels.block_mask import BLOCK_SIZES, BlockMask, reach
from kernels.checks import HEAD_DIMS, check_document_ids, takes_head_dim
from kernels.flash_attention import flash_attention
from kernels.packed import flash_attention_packed
from kernels.reference import attention_reference
from model.cache import LayerCache
from model.config import ModelConfig
from model.ring import Ring
from model.ring_attention import ring_attention
from model.rope import rotate

IMPLEMENTATIONS = ("flash", "sdpa", "reference")
# the pattern of a layer in which a query sees every key up to its own
DENSE = "dense"


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    # flash: our kernels; sdpa: torch's fused attention; reference: plain PyTorch, stores the (T, T) scores
    implementation: str
    # which keys the layers see, in turn: dense, or patterns of kernels/block_masks.py such as window(1024)
    patterns: list[str] = field(default_factory=lambda: [DENSE])
    # queries and keys in a block of a pattern: 64 or 128
    block_size: int = 128

    def __post_init__(self):
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention.implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                f"got {self.implementation!r}"
            )
        if not self.patterns:
            raise ValueError(f"attention.patterns must name at least one pattern, such as {DENSE}, got none")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"attention.block_size must be one of {BLOCK_SIZES}, got {self.block_size}")
        for pattern in self.patterns:
            if pattern == DENSE:
                continue
            if self.implementation == "sdpa":
                raise ValueError(
                    f"attention.patterns={self.patterns} needs attention.implementation=flash or reference, "
                    "got sdpa, which computes every block"
                )
            try:
                causal = block_masks.parse(pattern, 1).causal
            except ValueError as error:
                raise ValueError(
                    f"attention.patterns: {pattern}: {error}; or {DENSE}, by itself, for every key"
                ) from error
            if not causal:
                raise ValueError(f"attention.patterns: {pattern} sees keys behind the query: add & causal()")

    @property
    def sparse(self) -> bool:
        return any(pattern != DENSE for pattern in self.patterns)


def why_not_flash(config: ModelConfig) -> str | None:
    """Why flash cannot run this model's heads, in the configuration's words; None if it can."""
    if takes_head_dim(config.head_dim):
        return None
    return (
        f"needs model.head_dim to be {HEAD_DIMS}, got {config.head_dim} of model.n_embd={config.n_embd} and "
        f"model.n_head={config.n_head}"
    )


class SelfAttention(nn.Module):
    """Multi-head causal self-attention on (B, T, C); a group of query heads may share keys and values."""

    def __init__(self, config: ModelConfig, implementation: str):
        super().__init__()
        self.n_heads = config.n_head, config.n_kv_head, config.n_kv_head
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.implementation = implementation
        # nothing stands between the qkv product and the kernel: the product's gradient is written in place
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
        block_mask: BlockMask | None = None,
    ) -> Tensor:
        """Attention of x. rotation: cos and sin for queries and keys."""
        return self.project(self.attend(self.qkv(x), document_ids, cache, rotation, block_mask))

    def attend(
        self,
        qkv: Tensor,
        document_ids: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:
        """The heads' outputs (B, T, H, D); qkv: the product of these, (B, T, (H + 2 Hkv) D)."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        dropout_p = self.dropout if self.training else 0.0
        as_it_is = block_mask is None and cache is None and rotation is None and dropout_p == 0.0
        if self.takes_packed and as_it_is:
            deterministic = torch.are_deterministic_algorithms_enabled()
            return flash_attention_packed(
                qkv.unflatten(2, (3, -1)), document_ids=document_ids, deterministic=deterministic
            )
        is_one_token = cache is not None and qkv.shape[1] == 1
        # a cache rotates a single token itself
        q, k, v = self._parts(qkv, None if is_one_token else rotation)
        if is_one_token:
            if self.qk_norm:
                qkv = torch.cat((q, k, v), dim=2)
            return cache.attend(qkv, self.implementation, rotation)
        if cache is not None:
            cache.fill(k, v)
        options = {"document_ids": document_ids, "block_mask": block_mask, "dropout_p": dropout_p}
        return attend(q, k, v, self.implementation, **options)

    def queries_keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """q (B, T, H, D), k and v (B, T, Hkv, D) of x; rotation as in forward."""
        return self._parts(self.qkv(x).unflatten(-1, (-1, self.head_dim)), rotation)

    def attend_over_ring(
        self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, block_mask: BlockMask | None
    ) -> Tensor:
        """Attention to the tokens of all processes of the ring; q, k, v: what queries_keys_values gives."""
        if self.training and self.dropout > 0.0:
            raise ValueError(f"model.dropout={self.dropout}: there is none over several processes, set it 0")
        return ring_attention(q, k, v, ring, self.implementation, block_mask=block_mask)

    def project(self, out: Tensor) -> Tensor:
        """What attention adds to the residual stream (B, T, C), of its heads' outputs (B, T, H, D)."""
        return self.residual_dropout(self.projection(out.flatten(2)))

    def _parts(self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        # views of the packed product: no copy is made for the kernel
        q, k, v = qkv.split(self.n_heads, dim=2)  # (B, T, H, D), twice (B, T, Hkv, D)
        if self.qk_norm:
            # in the weights' own precision: autocast does not cast norms
            q, k = (
                norm(x.to(norm.weight.dtype)).to(v.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return q, k, v


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    implementation: str,
    *,
    document_ids: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention by the implementation that the configuration names, and by no other.

    q: (B, T, H, D); k, v: (B, T, Hkv, D). document_ids: (B, T) int32, non-decreasing; a token sees only its
    own document, a negative id is padding. Returns (B, T, H, D), 0 for padding. Raises ValueError for another
    implementation, and for a block_mask that sdpa does not take.
    """
    options = {"document_ids": document_ids, "block_mask": block_mask, "dropout_p": dropout_p}
    if implementation == "flash":
        deterministic = torch.are_deterministic_algorithms_enabled()
        return flash_attention(q, k, v, causal=True, deterministic=deterministic, **options)
    if implementation == "reference":
        if dropout_p > 0.0:
            # drawn as flash draws its own: recomputation resets the generator, and draws the same seed
            options["dropout_seed"] = torch.randint(2**62, (1,), device=q.device)
        return attention_reference(q, k, v, causal=True, **options)
    if implementation != "sdpa":
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if block_mask is not None:
        raise ValueError("block_mask needs implementation flash or reference: sdpa computes every block")
    mask = None
    if document_ids is not None:
        check_document_ids(document_ids, q, k)
        mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()  # (B, 1, T, T)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    # padding has seen padding, or its softmax would be one of nothing
    return out if document_ids is None else out * (document_ids >= 0)[:, :, None, None]


def window_of(pattern: str) -> int | None:
    """n of a pattern that is window(n) and nothing else; None for any other."""
    match = re.fullmatch(r"\s*window\(\s*(\d+)\s*\)\s*", pattern)
    return int(match[1]) if match else None


# so the graph of a compiled model takes the masks as inputs. The same as torch.compiler.disable, which would
# import the compiler here: a second that a refused command need not wait
@torch._disable_dynamo
def layer_masks(
    config: AttentionConfig, n_layer: int, seq_len: int, device: torch.device, *, warns: bool = True
) -> list[BlockMask | None]:
    """The block mask of every layer, None where it is dense.

    warns: if some tokens can never influence others; see kernels.block_mask.reach for what that costs.
    """
    arguments = tuple(config.patterns), config.block_size, n_layer, seq_len, device
    layers = _layer_masks(*arguments)
    if warns and None not in layers:
        _warn_below_full_reach(*arguments)
    return layers


@lru_cache(maxsize=4)
def _layer_masks(
    patterns: tuple[str, ...], block_size: int, n_layer: int, seq_len: int, device: torch.device
):
    # masks made in inference mode could not be saved for a backward pass, and training may ask for them next
    with torch.inference_mode(False), torch.no_grad():
        masks = {
            pattern: block_masks.parse(pattern, seq_len, block_size=block_size, device=device)
            for pattern in set(patterns) - {DENSE}
        }
    return [masks.get(patterns[index % len(patterns)]) for index in range(n_layer)]


@lru_cache(maxsize=4)
def _warn_below_full_reach(*arguments) -> None:
    reach(_layer_masks(*arguments))
