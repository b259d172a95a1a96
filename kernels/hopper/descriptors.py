"""Descriptors, by which the Hopper kernels copy tiles of a tensor to and from shared memory."""

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from kernels.launches import Descriptor
from kernels.layouts import bulk_strides

# shared memory layouts, made once, because making one takes Python longer than the rest of a descriptor
HEAD_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FLOAT32_LAYOUTS = {
    rank: NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank) for rank in (1, 2)
}


def tile_width(head_dim: int) -> int:
    """Channels of a head in shared memory: copies fill missing ones with zeros, and do not write them out."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def rest_width(head_dim: int) -> int:
    """Channels behind the first 128 that the kernels compute, see wide_heads.py; 0 for narrower heads."""
    return 0 if head_dim <= 128 else 64 if head_dim <= 192 else 128


def copy_width(head_dim: int) -> int:
    """Channels that one copy brings: 64 where those of tile_width end with 64 zeros, see wide_heads.py."""
    return 64 if rest_width(head_dim) == 64 else tile_width(head_dim)


def head_descriptor(x: Tensor, rows: int, width: int | None = None) -> Descriptor:
    """Tiles of `rows` tokens of one head of (B, T, H, D), by strides: T and D are clipped batch by batch.

    width: of a tile, in channels; by default copy_width.
    """
    batch, seq, n_head, head_dim = x.shape
    stride_b, stride_t, stride_h = bulk_strides(x)
    shape, block = (batch, n_head, seq, head_dim), (1, 1, rows, width or copy_width(head_dim))
    return Descriptor(x, shape, (stride_b, stride_h, stride_t, 1), block, HEAD_LAYOUT)


def float32_descriptor(x: Tensor, block: tuple[int, ...]) -> Descriptor:
    return Descriptor(x, tuple(x.shape), x.stride(), block, FLOAT32_LAYOUTS[len(block)])
