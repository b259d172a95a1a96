"""Layouts of (B, T, H, D) tensors: which ones the kernels read in place, and copies of the others."""

import torch
from torch import Tensor

# alignment in bytes of the addresses and strides of a bulk copy (TMA) on NVIDIA's GPUs
BULK_ALIGNMENT = 16


def is_bulk_readable(x: Tensor) -> bool:
    """Whether a bulk copy can read x (B, T, H, D) in place: unbroken rows, aligned to 16 bytes."""
    batch, seq_len, n_head, _ = x.shape
    stride_b, stride_t, stride_h, stride_d = x.stride()
    aligned = BULK_ALIGNMENT // x.itemsize
    return (
        stride_d == 1
        and x.data_ptr() % BULK_ALIGNMENT == 0
        and (stride_t % aligned == 0 or seq_len <= 1)
        and (stride_h % aligned == 0 or n_head <= 1)
        and (stride_b % aligned == 0 or batch <= 1)
    )


def bulk_readable(x: Tensor) -> Tensor:
    """x, or a copy of it that a bulk copy can read."""
    return x if is_bulk_readable(x) else x.clone(memory_format=torch.contiguous_format)


def bulk_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batches, tokens and heads; where there is only one, it is not used but must be aligned."""
    batch, seq_len, n_head, head_dim = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    # spelled out, as in is_bulk_readable: run for each tensor of each call
    return (
        stride_b if batch > 1 else head_dim,
        stride_t if seq_len > 1 else head_dim,
        stride_h if n_head > 1 else head_dim,
    )


def with_tokens_in_memory(dout: Tensor) -> Tensor:
    """dout (B, T, H, D), copied if tokens or channels are expanded (stride 0), as after a mean.

    Otherwise all multiprocessors would read the same few addresses at once, and the whole backward pass would
    take up to 2.5 times as long (docs/kernels.md). Heads and batches may stay expanded.
    """
    stride_b, stride_t, stride_h, stride_d = dout.stride()
    if stride_t and stride_d:
        return dout
    batches, heads = (slice(1) if stride == 0 else slice(None) for stride in (stride_b, stride_h))
    return dout[batches, :, heads].contiguous().expand(dout.shape)
