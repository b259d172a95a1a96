"""The head's loss and gradient without a pass over the logits: the product itself writes their exponentials.

With x = hidden W^T and t the target of row i, the epilogue of the product (epilogues.py) writes
E_ij = 2^-SHIFT exp(x_ij - x_it) and sums its rows. Then

    loss_i = log(sum_j E_ij) + log(2) SHIFT,    dloss_i / dx_ij = E_ij / sum_j E_ij - onehot(t)_j

and the gradients of hidden and W are products with E, after E_it has become E_it - sum_j E_ij. The factors
1 / sum_j E_ij scale rows of (N, C), not of (N, V).

An exponential relative to the target needs no maximum of the row, because bfloat16 has the exponent range of
float32. A column less likely than the target by a factor of 2^(126 - SHIFT) or more rounds to zero. One that
is more likely by more than 2^(SHIFT + MOST_EXPONENT) counts as that, which bounds a token's loss at 104 nats.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper
from kernels.epilogue_library import epilogues, is_installed

LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(60.0)
# widths of the product's tiles: one must divide V', since a tile would also sum what lies beyond the edge
WIDTHS = (192, 128)
NUM_WARPS = 4


@triton.jit
def _subtrahend_kernel(hidden_ptr, weight_ptr, targets_ptr, subtrahends_ptr, n_embd, BLOCK: tl.constexpr):
    """log2(e) x_it + SHIFT of one row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    channels = tl.arange(0, BLOCK)
    x = tl.load(hidden_ptr + row * n_embd + channels, mask=channels < n_embd, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + target * n_embd + channels, mask=channels < n_embd, other=0.0).to(tl.float32)
    tl.store(subtrahends_ptr + row, tl.sum(x * w, 0) * LOG2E + SHIFT)


@triton.jit
def _row_kernel(
    exponentials_ptr, targets_ptr, hidden_ptr, subtrahends_ptr, sums_ptr, losses_ptr, scaled_ptr,
    n_columns, n_embd, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one row's loss, its E_it, its hidden / sum, and 1 / sum in place of the sum."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(sums_ptr + row)
    subtrahend = tl.load(subtrahends_ptr + row)
    # NaN where the target's logit is NaN
    tl.store(losses_ptr + row, (tl.log2(total) + SHIFT) / LOG2E + (subtrahend - subtrahend))
    others = total - tl.exp2(-SHIFT)
    place = exponentials_ptr + row * n_columns + tl.load(targets_ptr + row)
    tl.store(place, (-others).to(exponentials_ptr.dtype.element_ty))
    tl.store(sums_ptr + row, 1 / total)
    channels = tl.arange(0, BLOCK)
    x = tl.load(hidden_ptr + row * n_embd + channels, mask=channels < n_embd, other=0.0).to(tl.float32)
    x = (x / total).to(scaled_ptr.dtype.element_ty)
    tl.store(scaled_ptr + row * n_embd + channels, x, mask=channels < n_embd)


def fits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether losses_and_exponentials takes these: bfloat16, fitting sizes, on Hopper, with quack-kernels."""
    return (
        hidden.dtype == torch.bfloat16
        and hidden.shape[1] % 8 == 0
        and any(weight.shape[0] % width == 0 for width in WIDTHS)
        and hopper.is_hopper(hidden.device)
        and is_installed()
    )


def padding_mask(n_columns: int, vocab_size: int, device: torch.device) -> Tensor:
    """(V',) float32: 0 for columns of tokens, minus infinity for padding."""
    mask = torch.zeros(n_columns, dtype=torch.float32, device=device)
    mask[vocab_size:] = float("-inf")
    return mask


def losses_and_exponentials(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, losses: Tensor, exponentials: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes losses, and gradients of logits but for a factor per row; returns hidden times it, and these.

    hidden: (N, C), weight: (V', C), and exponentials: (N, V'), which receives the gradients, are bfloat16 and
    contiguous. mask: from padding_mask. losses and the returned factors: (N,) float32.
    """
    n_rows, n_embd = hidden.shape
    subtrahends, scaled = torch.empty_like(losses), torch.empty_like(hidden)
    block = triton.next_power_of_2(n_embd)
    _subtrahend_kernel[(n_rows,)](
        hidden, weight, targets, subtrahends, n_embd, BLOCK=block, num_warps=NUM_WARPS
    )
    width = next(width for width in WIDTHS if weight.shape[0] % width == 0)
    factors = epilogues().mm_exp2_and_sum(hidden, weight.T, subtrahends, mask, exponentials, width)
    _row_kernel[(n_rows,)](
        exponentials, targets, hidden, subtrahends, factors, losses, scaled,
        exponentials.shape[1], n_embd, BLOCK=block, num_warps=NUM_WARPS,
    )  # fmt: skip
    return scaled, factors
