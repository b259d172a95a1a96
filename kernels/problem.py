"""Everything about one attention call except q, k, v: what the operators hand to an implementation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dropout import keep_scale, limit_number
from kernels.tiles import architecture, variant_of

# heads over all batches, of a kernel that counts them in the second or third dimension of its grid
MOST_HEADS = 2**16 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """softmax_scale > 0; the mask is `causal` and `window`, or bounds that already contain both.

    window: None, or how many keys a query sees up to its own position. key_bounds, query_bounds: see
    kernels/intervals.py. dropout_seed: int64 tensor of one element on q's device, given exactly when
    dropout_p > 0.
    """

    softmax_scale: float
    causal: bool
    window: int | None = None
    key_bounds: Tensor | None = None
    query_bounds: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    deterministic: bool = False
    # keys that a query sees on average, if the host has read the bounds: only speed depends on it
    keys_per_query: float | None = None
    # BlockMask.tensors(): lists of rows and of columns, tiles, transposed tiles
    blocks: tuple[Tensor, ...] = ()

    @property
    def block_size(self) -> int:
        """How many queries, and keys, a block of the block mask has; 0 without one."""
        return self.blocks[-1].shape[1] if self.blocks else 0

    @property
    def row_lists(self) -> tuple[Tensor | None, ...]:
        """spans, entries, bits: for each block of queries its blocks of keys, see kernels/block_mask.py."""
        return (*self.blocks[:2], self.blocks[4]) if self.blocks else (None, None, None)

    @property
    def column_lists(self) -> tuple[Tensor | None, ...]:
        """spans, entries, bits: for each block of keys its blocks of queries."""
        return self.blocks[2:5] if self.blocks else (None, None, None)

    @property
    def transposed_column_lists(self) -> tuple[Tensor | None, ...]:
        """The same with a row of bits for each key."""
        return (*self.blocks[2:4], self.blocks[5]) if self.blocks else (None, None, None)

    @property
    def mask(self) -> str:
        """The kind of interval mask, one of portable/masks.py; a block mask cuts it further."""
        if self.key_bounds is not None:
            return "intervals"
        if self.window is not None:
            return "window"
        return "causal" if self.causal else "full"

    @property
    def tile_variant(self) -> str:
        """Which rows of kernels/tiles.py apply, see variant_of."""
        return variant_of(self.mask, self.block_size, dropout=self.dropout_p > 0.0)

    @property
    def keep_scale(self) -> float:
        """What a kept probability is multiplied by."""
        return keep_scale(self.dropout_p) if self.dropout_p > 0.0 else 1.0

    @property
    def dropout_limit(self) -> float:
        """The number at which kernels/dropout.py's "drop" begins."""
        return limit_number(self.dropout_p)


class CannotBuildError(RuntimeError):
    """The installed Triton does not compile an implementation, which refuses every problem from here on."""


def list_strides(lists: tuple[Tensor | None, ...]) -> tuple[int, int]:
    """Strides of the spans from batch to batch and from head to head; 0 where one list serves all."""
    spans = lists[0]
    if spans is None:
        return 0, 0
    return tuple(
        stride if n > 1 else 0 for stride, n in zip(spans.stride()[:2], spans.shape[:2], strict=True)
    )


def dot_precision(q: Tensor) -> str:
    """How operands of q's dtype are multiplied: IEEE, or TF32 where PyTorch's own float32 products use it."""
    # set_float32_matmul_precision and allow_tf32 set this too, but do not report it
    if q.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    # among AMD's GPUs Triton supports TF32 on this one, and refuses kernels that ask for it on others
    if q.is_cuda and torch.version.hip and architecture(q.device) != "gfx942":
        return "ieee"
    return "tf32"
