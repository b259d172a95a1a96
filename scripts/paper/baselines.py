"""The attentions that the paper compares with, as functions of q, k, v (B, T, H, D).

Padding is at the front of a sequence: first_key (B,) int32 says where its text starts. The paper pads at the
end; the work is the same, and `document_ids` of flash_attention requires this order.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from kernels.flash_attention import flash_attention
from scripts.flex import compiled_flex
from scripts.paper.fused_softmax import fused_softmax
from scripts.paper.sparsity import two_blocks
from scripts.sdpa import sdpa

# the paper's dtype
DTYPE = torch.float16
# what the paper's code adds to a hidden score
HIDDEN = -10000.0
SDPA = {
    "sdpa math": SDPBackend.MATH,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# keys in the approximations: the paper's "compressed length 256, or 1/8, whichever is smaller"
COMPRESSED, COMPRESSION = 256, 8


def inputs(
    batch: int, seq_len: int, heads: int, head_dim: int, device: torch.device, requires_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v (B, T, H, D) of DTYPE."""
    torch.manual_seed(0)
    shape = (batch, seq_len, heads, head_dim)
    draws = (torch.randn(shape, device=device, dtype=DTYPE) for _ in range(3))
    return tuple(x.requires_grad_(requires_grad) for x in draws)


def causal_mask(seq_len: int, device: torch.device) -> Tensor:
    """(T, T) to be added to the scores."""
    return torch.full((seq_len, seq_len), HIDDEN, dtype=DTYPE, device=device).triu(1)


def padding_mask(first_key: Tensor, seq_len: int) -> Tensor:
    """(B, 1, 1, T) to be added to the scores."""
    hidden = torch.arange(seq_len, device=first_key.device) < first_key[:, None]
    return hidden.to(DTYPE).mul(HIDDEN)[:, None, None, :]


def eager_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> list[tuple[str, Callable]]:
    """The operations of attention in PyTorch, by name; each takes the result of the previous one.

    Source: attention_pytorch of the authors' benchmarks, github.com/Dao-AILab/flash-attention.
    """
    batch, seq_len, heads, head_dim = q.shape

    def scores(_) -> Tensor:
        queries = q.transpose(1, 2).flatten(0, 1)
        keys = k.transpose(1, 2).flatten(0, 1).mT
        empty = torch.empty(batch * heads, seq_len, k.shape[1], dtype=q.dtype, device=q.device)
        product = torch.baddbmm(empty, queries, keys, beta=0, alpha=head_dim**-0.5)
        return product.unflatten(0, (batch, heads))  # (B, H, T, T)

    def output(probabilities: Tensor) -> Tensor:
        return (probabilities @ v.transpose(1, 2)).transpose(1, 2)  # (B, T, H, D)

    steps = [("matmul q k", scores)]
    if mask is not None:
        steps.append(("mask", lambda scores: scores + mask))
    steps.append(("softmax", lambda scores: scores.softmax(-1)))
    if dropout_p > 0.0:
        steps.append(("dropout", lambda probabilities: dropout(probabilities, dropout_p)))
    return [*steps, ("matmul p v", output)]


def dropout(x: Tensor, dropout_p: float) -> Tensor:
    """F.dropout, on a CPU by the operation that it is on a GPU, so that its bytes count alike."""
    return torch.native_dropout(x, dropout_p, True)[0] if dropout_p > 0.0 else x


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Attention by all of `eager_steps`, which store the (T, T) scores several times."""
    x = None
    for _, operation in eager_steps(q, k, v, mask, dropout_p):
        x = operation(x)
    return x


def hugging_face_2022(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal attention of transformers' GPT-2 in 2022 under autocast, whose softmax runs in float32."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    scores = queries @ keys.mT
    scores = scores / q.shape[-1] ** 0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = torch.where(visible, scores, torch.full((), HIDDEN, dtype=scores.dtype, device=q.device))
    probabilities = scores.float().softmax(-1).to(v.dtype)
    return (dropout(probabilities, dropout_p) @ values).transpose(1, 2)


def megatron(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Scale, mask and softmax in one kernel, as in Megatron-LM; products and dropout are PyTorch's."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    probabilities = fused_softmax(queries @ keys.mT, q.shape[-1] ** -0.5, first_key, causal)
    return (dropout(probabilities, dropout_p) @ values).transpose(1, 2)


def linformer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """Attention to a few projections of keys and values (Wang et al., arXiv:2006.04768); not exact."""
    seq_len = k.shape[1]
    projection = linformer_projection(seq_len, k.dtype, k.device)
    if mask is not None:
        # a hidden key must not enter the sum
        visible = (mask == 0).to(k.dtype).view(k.shape[0], seq_len, 1, 1)
        k, v = k * visible, v * visible
    k, v = (torch.einsum("bthd,ts->bshd", x, projection) for x in (k, v))
    return eager(q, k, v, None, dropout_p)


@cache
def linformer_projection(seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    compressed = min(COMPRESSED, seq_len // COMPRESSION)
    return torch.randn(seq_len, compressed, dtype=dtype, device=device) / seq_len**0.5


def flex(first_key: Tensor | None, seq_len: int) -> Callable:
    """FlexAttention, compiled for this length; it has no dropout."""
    mask = None
    if first_key is not None:

        def visible(b, h, i, j):
            return j >= first_key[b]

        mask = create_block_mask(
            visible, len(first_key), None, seq_len, seq_len, device=first_key.device.type
        )

    return compiled_flex(mask)


def build(
    name: str, seq_len: int, first_key: Tensor | None, dropout_p: float, device: torch.device
) -> Callable:
    """The attention of that name in the reports, with padding or without; all but window are not causal.

    Raises ValueError for an unknown name, and if the implementation lacks what is asked for.
    """
    mask = visible = document_ids = None
    if first_key is not None:
        mask = padding_mask(first_key, seq_len)
        visible = mask == 0
        document_ids = visible.view(-1, seq_len).int() - 1
    options = {"document_ids": document_ids, "dropout_p": dropout_p}
    if name == "ours":
        return partial(flash_attention, causal=False, **options)
    if name == "ours sparse":
        return partial(flash_attention, causal=False, block_mask=two_blocks(seq_len, device), **options)
    if name == "window":
        return partial(flash_attention, causal=True, window=COMPRESSED, **options)
    if name == "eager":
        return partial(eager, mask=mask, dropout_p=dropout_p)
    if name == "megatron":
        return partial(megatron, first_key=first_key, dropout_p=dropout_p)
    if name == "linformer":
        return partial(linformer, mask=mask, dropout_p=dropout_p)
    if name in SDPA:
        return partial(sdpa, backend=SDPA[name], attn_mask=visible, dropout_p=dropout_p)
    if name == "flex":
        if dropout_p > 0.0:
            raise ValueError("flex has no dropout")
        return flex(first_key, seq_len)
    raise ValueError(f"no attention has the name {name!r}")
