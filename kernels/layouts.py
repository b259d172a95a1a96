"""Layouts of (B, T, H, D) tensors: which the kernels read in place, and copies of the others."""

import torch
from torch import Tensor

# of addresses and strides that a bulk copy (TMA) of NVIDIA's GPUs takes, in bytes
BULK_ALIGNMENT = 16


def is_bulk_readable(x: Tensor) -> bool:
    """Whether a bulk copy can read x (B, T, H, D) in place: unbroken rows, aligned to 16 bytes."""
    strides = (stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    steps = (x.data_ptr(), *(stride * x.itemsize for stride in strides))
    return x.stride(3) == 1 and all(step % BULK_ALIGNMENT == 0 for step in steps)


def bulk_readable(x: Tensor) -> Tensor:
    """x, or a copy of it that a bulk copy can read."""
    return x if is_bulk_readable(x) else x.clone(memory_format=torch.contiguous_format)


def bulk_strides(x: Tensor) -> tuple[int, int, int]:
    """Of batches, tokens and heads; that of a single one is never used, but its alignment is checked."""
    return tuple(s if n > 1 else x.shape[3] for s, n in zip(x.stride()[:3], x.shape[:3], strict=True))


def with_tokens_in_memory(dout: Tensor) -> Tensor:
    """dout (B, T, H, D), with its tokens and channels written out where they are expanded, as behind a mean.

    Else all multiprocessors would ask for the same few numbers at once, and the whole backward pass would
    take up to 2.5 times as long (docs/kernels.md). Heads and batches may stay expanded.
    """
    stride_b, stride_t, stride_h, stride_d = dout.stride()
    if stride_t and stride_d:
        return dout
    batches, heads = (slice(1) if stride == 0 else slice(None) for stride in (stride_b, stride_h))
    return dout[batches, :, heads].contiguous().expand(dout.shape)
