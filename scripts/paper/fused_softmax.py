"""Scale, mask and softmax of stored scores in one kernel each way, after Megatron-LM's fused softmax.

One program owns a row of the scores and holds it whole, so a row has at most LONGEST keys (Megatron's own
kernel stopped at 2048). It is a baseline: it saves passes over the (T, T) scores, while flash attention makes
none.

    p = softmax(scale s) over the visible keys        ds = scale p (dp - sum_j p_j dp_j)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 16384


@triton.jit
def forward_kernel(
    scores_ptr, p_ptr, first_key_ptr, n_head, seq_q, seq_k, scale,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    visible = j < seq_k
    if PADDED:
        visible &= j >= tl.load(first_key_ptr + row // (n_head * seq_q))
    if CAUSAL:
        visible &= j <= row % seq_q
    scores = tl.load(scores_ptr + row * seq_k + j, mask=visible, other=0.0).to(tl.float32)  # (BLOCK,)
    # finite, as in Megatron, so that a row that sees nothing gives numbers
    scores = tl.where(visible, scores * scale, -10000.0)
    p = tl.where(j < seq_k, tl.exp(scores - tl.max(scores, 0)), 0.0)
    p = p / tl.sum(p, 0)
    tl.store(p_ptr + row * seq_k + j, p.to(p_ptr.dtype.element_ty), mask=j < seq_k)


@triton.jit
def backward_kernel(p_ptr, dp_ptr, ds_ptr, seq_k, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    p = tl.load(p_ptr + row * seq_k + j, mask=j < seq_k, other=0.0).to(tl.float32)  # (BLOCK,)
    dp = tl.load(dp_ptr + row * seq_k + j, mask=j < seq_k, other=0.0).to(tl.float32)  # (BLOCK,)
    ds = scale * p * (dp - tl.sum(p * dp, 0))
    tl.store(ds_ptr + row * seq_k + j, ds.to(ds_ptr.dtype.element_ty), mask=j < seq_k)


class FusedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, scale: float, first_key: Tensor | None, causal: bool) -> Tensor:
        _, n_head, seq_q, seq_k = scores.shape
        scores = scores.contiguous()
        p = torch.empty_like(scores)
        forward_kernel[scores.numel() // seq_k,](
            scores, p, first_key, n_head, seq_q, seq_k, scale,
            PADDED=first_key is not None, CAUSAL=causal, **launch_options(seq_k),
        )  # fmt: skip
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx, dp: Tensor):
        (p,) = ctx.saved_tensors
        dp, seq_k = dp.contiguous(), p.shape[-1]
        ds = torch.empty_like(p)
        backward_kernel[p.numel() // seq_k,](p, dp, ds, seq_k, ctx.scale, **launch_options(seq_k))
        return ds, None, None, None


def launch_options(seq_k: int) -> dict[str, int]:
    block = triton.next_power_of_2(seq_k)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def fused_softmax(scores: Tensor, scale: float, first_key: Tensor | None, causal: bool) -> Tensor:
    """softmax(scale * scores) over the visible keys, (B, H, Tq, Tk), in the dtype of scores.

    first_key: (B,) int32, keys before it are padding. causal: query i sees keys up to i, Tq = Tk.
    Raises ValueError for rows longer than LONGEST.
    """
    if scores.shape[-1] > LONGEST:
        raise ValueError(f"fused_softmax takes at most {LONGEST} keys, got {scores.shape[-1]}")
    return FusedSoftmax.apply(scores, scale, first_key, causal)
