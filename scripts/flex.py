"""FlexAttention as the benchmarks measure it: compiled, on tensors laid out as ours."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def compiled_flex(block_mask: BlockMask | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k, v (B, T, H, D), compiled afresh for the shape of its first call."""
    # without this the ninth shape would run without a kernel, and a backward pass could run only once
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads_first, block_mask=block_mask).transpose(1, 2)

    return attention
