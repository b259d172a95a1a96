"""F.scaled_dot_product_attention on these kernels, for code that cannot be changed.

    import kernels.sdpa
    torch.nn.attention.activate_flash_attention_impl("nanoflash")
    torch.nn.attention.restore_flash_attention_impl()

PyTorch then hands us every call that it would give to its flash backend on CUDA: fp16 and bf16, with or
without is_causal and dropout. Dropout draws its seed from PyTorch's generator.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from kernels.checks import check_dropout, check_scale
from kernels.operators import attention_backward, attention_forward


@dataclass
class Registration:
    """What PyTorch keeps while the implementation is active."""

    library: Library | None

    def remove(self) -> None:
        self.library = None


def activate() -> Registration:
    library = Library("aten", "IMPL", "CUDA")
    library.impl("_scaled_dot_product_flash_attention", sdpa_forward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", sdpa_backward, "CUDA")
    return Registration(library)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
):
    """aten::_scaled_dot_product_flash_attention, (B, H, T, D).

    PyTorch keeps two words of generator state for the backward pass; our seed is the first of them.
    """
    if return_debug_mask:
        raise ValueError("return_debug_mask must be False: nanoflash stores no mask")
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"is_causal needs as many queries as keys, got {query.shape[2]} and {key.shape[2]}: "
            "PyTorch aligns their starts and nanoflash their ends; call flash_attention"
        )
    if scale is not None:
        check_scale("scale", scale)
    check_dropout(dropout_p)
    seed = torch.zeros(2, dtype=torch.int64, device=query.device).view(torch.uint64)
    if dropout_p > 0.0:
        seed.view(torch.int64).random_(2**62)
    q, k, v = heads_last(query, key, value)
    out, lse = attention_forward(q, k, v, *options(query, seed, dropout_p, is_causal, scale))
    unused = torch.empty(0, dtype=query.dtype, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    out = laid_out_as(query, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, unused


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
):
    """aten::_scaled_dot_product_flash_attention_backward."""
    dout, q, k, v, out = heads_last(grad_out, query, key, value, out)
    gradients = attention_backward(
        dout, None, q, k, v, out, logsumexp, *options(query, seed, dropout_p, is_causal, scale)
    )
    return tuple(map(laid_out_as, (query, key, value), heads_last(*gradients)))


def options(query: Tensor, seed: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> tuple:
    """The operators' arguments after q, k, v."""
    softmax_scale = query.shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    seed = seed.view(torch.int64)[:1] if dropout_p > 0.0 else None
    return None, None, seed, [], softmax_scale, is_causal, None, dropout_p, deterministic, None


def heads_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, H, T, D) as (B, T, H, D), and back, without a copy."""
    return tuple(x.transpose(1, 2) for x in tensors)


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """x with the strides of torch.empty_like(like), which torch.compile assumes; mostly no copy."""
    strides = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(like).copy_(x)


register_flash_attention_impl("nanoflash", register_fn=activate)
