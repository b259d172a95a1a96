"""Attention of a few new queries to a long cache of keys, for generation; it may append the newest key.

For the kernels, and how they split the work of one query, see portable/decode.py.
"""

import torch
from torch import Tensor

from kernels import checks
from kernels.block_mask import BlockMask
from kernels.portable.decode import MAX_ROWS, can_overlap, launch_decode
from kernels.problem import MOST_HEADS
from kernels.registration import on_its_gpu, refuse_forward_derivatives

__all__ = ["append_and_decode", "can_overlap", "decode_attention", "split_heads"]


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_mask: BlockMask | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Causal attention of the last Tq tokens of each sequence to all of its keys, (B, Tq, H, D) in q's dtype.

    q: (B, Tq, H, D), Tq H / Hkv at most 128; k, v: (B, capacity, Hkv, D), channels contiguous, of which the
    first lengths[b] are filled, those of the new tokens included; with Tq = 1 and no block mask it may exceed
    capacity, and all are filled. lengths: (B,) int32 or int64 on q's device. A sequence of length 0 gives
    zeros. block_mask: of capacity queries and keys, one for all batches and heads, with Tq = 1. Not
    differentiable. Raises ValueError for other shapes. Source: Flash-Decoding.
    """
    _check({"q": q}, q, k, v, lengths, block_mask)
    return _decode(q, k, v, lengths, _lists(block_mask), _scale(softmax_scale, q))


def append_and_decode(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    turn: tuple[Tensor, Tensor] | None = None,
    block_mask: BlockMask | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Appends each sequence's newest key and value to the cache; returns the token's attention, (B, 1, H, D).

    qkv: (B, 1, H + 2 Hkv, D), the token's queries, key and value in one tensor, as one product gives them: a
    compiler would copy the parts. Key and value are attended to, and written to place
    (lengths[b] - 1) % capacity of k and v if lengths[b] is at least 1. turn: cos and sin, (B, 1, 1, D / 2)
    float32, contiguous, by which queries and key are rotated first, channels i and i + D / 2 as a pair
    (RoFormer, arXiv:2104.09864). k, v, lengths, block_mask and softmax_scale: as in decode_attention. The
    result has qkv's dtype. Raises ValueError for other shapes, an expanded cache, and one of a single tensor.
    """
    for name, x in (("qkv", qkv), ("k", k)):
        checks.check_is_tensor(name, x)
    n_kv_head = k.shape[2] if k.ndim == 4 else 0
    n_head = qkv.shape[2] - 2 * n_kv_head if qkv.ndim == 4 else 0
    if n_kv_head < 1 or n_head < 1 or n_head % n_kv_head or qkv.shape[1] != 1:
        raise ValueError(
            "qkv must be (B, 1, H + 2 Hkv, D), one token, H a multiple of Hkv, and k (B, capacity, Hkv, D), "
            f"got {tuple(qkv.shape)} and {tuple(k.shape)}"
        )
    _check({"qkv": qkv}, split_heads(qkv, n_kv_head)[0], k, v, lengths, block_mask)
    for name, x in (("k", k), ("v", v)):
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"{name} must have memory of its own for every key, to write to, got shape {tuple(x.shape)} "
                f"with strides {x.stride()}: keep {name}.contiguous() in its place"
            )
    if k is v or (k.numel() and checks.may_read(k) and k.data_ptr() == v.data_ptr()):
        raise ValueError("k and v must be two tensors, got one for both, in which values would replace keys")
    if turn is not None:
        _check_turn(turn, qkv)
    # a tensor of both serves too, and has no truth value
    turn = [] if turn is None else list(turn)
    return _append_and_decode(qkv, k, v, turn, lengths, _lists(block_mask), _scale(softmax_scale, qkv))


def split_heads(qkv: Tensor, n_kv_head: int) -> tuple[Tensor, ...]:
    """Views of qkv (B, T, H + 2 Hkv, D): queries (B, T, H, D), keys and values (B, T, Hkv, D)."""
    return qkv.split((qkv.shape[2] - 2 * n_kv_head, n_kv_head, n_kv_head), dim=2)


def _lists(block_mask: BlockMask | None) -> list[Tensor]:
    return [] if block_mask is None else [*block_mask.tensors()[:2], block_mask.bits]


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    checks.check_is_number("softmax_scale", softmax_scale)
    if not abs(softmax_scale) <= checks.SCALES[1]:
        raise ValueError(
            f"softmax_scale must be finite, got {softmax_scale}: scale q instead (the kernels take up to "
            f"{checks.SCALES[1]})"
        )
    return softmax_scale


@torch.library.custom_op("nanoflash::decode_attention", mutates_args=())
@on_its_gpu
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    blocks: list[Tensor],
    softmax_scale: float,
) -> Tensor:
    """blocks: spans, entries and bits of the rows of a block mask, or nothing."""
    return launch_decode(q, k, v, (None,) * 4, lengths, blocks, softmax_scale)


@torch.library.custom_op("nanoflash::append_and_decode", mutates_args=("k", "v"))
@on_its_gpu
def _append_and_decode(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    turn: list[Tensor],
    lengths: Tensor,
    blocks: list[Tensor],
    softmax_scale: float,
) -> Tensor:
    """turn: cos and sin, or nothing."""
    q, *new = split_heads(qkv, k.shape[2])
    return launch_decode(q, k, v, (*new, *(turn or (None, None))), lengths, blocks, softmax_scale)


@_decode.register_fake
def _(q, *options):
    return q.new_empty(q.shape)


@_append_and_decode.register_fake
def _(qkv, k, *options):
    return qkv.new_empty(split_heads(qkv, k.shape[2])[0].shape)


def _check_turn(turn: tuple[Tensor, Tensor], qkv: Tensor) -> None:
    shape = (len(qkv), 1, 1, qkv.shape[3] // 2)
    if not isinstance(turn, tuple | list | Tensor) or (isinstance(turn, Tensor) and turn.dim() == 0):
        raise ValueError(f"turn must be (cos, sin), got {type(turn).__name__}")
    if len(turn) != 2:
        raise ValueError(f"turn must be (cos, sin), got {len(turn)} tensors")
    for name, x in zip(("cos", "sin"), turn, strict=True):
        checks.check_is_tensor(f"turn's {name}", x)
        if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(
                f"turn's {name} must be {shape} float32 and contiguous, got {tuple(x.shape)} {x.dtype} with "
                f"strides {x.stride()}"
            )
        if x.device != qkv.device:
            raise ValueError(f"turn's {name} must be on {qkv.device}, as qkv, got {x.device}: move it")


def _check(
    given: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_mask: BlockMask | None
) -> None:
    """given: the tensor that q is, or is part of, by name."""
    for name, x in {**given, "k": k, "v": v, "lengths": lengths}.items():
        checks.check_is_tensor(name, x)
    if block_mask is not None:
        checks.check_is_block_mask(block_mask)
    checks.check_tensors(q, k, v, n_dims=4)
    refuse_forward_derivatives("attention to a cache", "use attention_reference", q, k, v)
    batch, n_query, n_head, _ = q.shape
    for name, x in {**given, "k": k, "v": v}.items():
        if x.stride(3) != 1:
            # a cache that were copied in each call would lose what is appended
            way_out = (
                f"call {name}.contiguous()" if name in given else f"keep {name}.contiguous() in its place"
            )
            raise ValueError(f"{name} must have contiguous channels, got strides {x.stride()}: {way_out}")
    if n_query * (n_head // k.shape[2]) > MAX_ROWS:
        raise ValueError(
            f"q has {n_query} queries for each of {n_head // k.shape[2]} heads that share keys, at most "
            f"{MAX_ROWS} together: use flash_attention for so many"
        )
    if batch * k.shape[2] > MOST_HEADS:
        raise ValueError(
            f"k must have at most {MOST_HEADS} heads over all batches, got {batch * k.shape[2]}: split the "
            "batch"
        )
    if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths must be ({batch},) int32 or int64, got {tuple(lengths.shape)} {lengths.dtype}"
        )
    for name, x in (("lengths", lengths), ("block_mask", None if block_mask is None else block_mask.bits)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, as q, got {x.device}: move it or build it there")
    if block_mask is None:
        return
    capacity = k.shape[1]
    if (block_mask.seq_q, block_mask.seq_k) != (capacity, capacity):
        raise ValueError(
            f"block_mask must be of {capacity} queries and keys, the capacity of k, got {block_mask.seq_q} "
            f"and {block_mask.seq_k}: build it for {capacity}"
        )
    if (block_mask.n_batch, block_mask.n_head) != (1, 1):
        raise ValueError(
            f"block_mask must be one for all batches and heads, got {block_mask.n_batch} batches and "
            f"{block_mask.n_head} heads: build one for all"
        )
    if n_query != 1:
        raise ValueError(f"q must have one query with block_mask, got {n_query}: pass one token at a time")
