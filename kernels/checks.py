"""Checks of the public functions' arguments: each error names the argument, its value and the rule."""

import os
from collections.abc import Callable
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from kernels.block_mask import BlockMask
from kernels.dropout import MOST_DROPPED
from kernels.intervals import mean_length

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Triton decides whether it interprets kernels when they are defined, and this module is imported with them
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

HEAD_DIMS = "a multiple of 8 from 8 to 256"

# Python's and NumPy's numbers, tensors of one element, and torch.compile's; the first two are Real as well,
# but found faster
NUMBERS = (int, float, Real, Tensor, torch.SymInt, torch.SymFloat)

# float32 holds these, scores times them, and lse over them. The upper limit is lower than that takes, because
# a row whose scores times scale are all below LOWEST of kernels/hopper, -1e30, looks as if it saw nothing:
# with this limit a score may be as low as -1e9
SCALES = 1e-30, 1e20

# the kernels add a window to a position in 32 bits
MOST_TOKENS = 2**30

# the way out where lengths were passed in place of their sums
SUMMED = "F.pad(lengths.cumsum(0), (1, 0)).int() gives it"

# tensor -> the version whose values were checked, for how many tokens, and what was found: a mask is read
# once, not in every layer
CHECKED = WeakIdKeyDictionary()


def autocast(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an active autocast, as PyTorch's own attention casts them."""
    for name, x in tensors.items():
        check_is_tensor(name, x)
    name, x = next(iter(tensors.items()))
    # PyTorch has no autocast for some devices, such as meta
    check_device(name, x)
    return autocast_here(*tensors.values())


def autocast_here(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an active autocast, on a device that has autocast."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    # float64 and integers stay, as in PyTorch's operators: errors name them by their own dtype
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_is_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}: torch.as_tensor makes one")
    # a nested tensor may claim to be strided
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else x.layout
        raise ValueError(
            f"{name} must be dense, got a {kind} tensor: call to_dense(), or pack sequences of different "
            "lengths for flash_attention_varlen"
        )


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: on a GPU, or on the CPU in Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and INTERPRETED)


def check_device(name: str, x: Tensor, instead: str = "attention_reference") -> None:
    """Raises ValueError unless x is where kernels run. instead: what does the same on every device."""
    if not has_kernels(x.device):
        raise ValueError(
            f"{name} must be on a GPU, got {x.device}: move it, use {instead}, "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU"
        )


def is_interpreted_wrongly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's interpreter errs: products of bfloat16 in 3.6 and 3.7, by factors of up to 1e8."""
    return device.type == "cpu" and dtype == torch.bfloat16


def check_scale(name: str, scale: float) -> None:
    if not SCALES[0] <= scale <= SCALES[1]:
        raise ValueError(
            f"{name} must be positive and finite, got {scale}: negate or scale q instead (the kernels take "
            f"{SCALES[0]} to {SCALES[1]})"
        )


def takes_head_dim(head_dim: int) -> bool:
    """Whether the kernels take heads of this many channels, HEAD_DIMS."""
    return head_dim % 8 == 0 and 8 <= head_dim <= 256


def check_tensors(q: Tensor, k: Tensor, v: Tensor, n_dims: int) -> None:
    """Raises ValueError unless the kernels take the shapes, dtypes and devices of q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}: cast it")
    check_together(q, k, v, n_dims)
    check_device("q", q)
    if is_interpreted_wrongly(q.device, q.dtype):
        raise ValueError(
            "q, k and v must be float16 or float32 on a CPU, got bfloat16, which Triton's interpreter "
            "multiplies wrongly: cast them, or use attention_reference"
        )
    if not takes_head_dim(q.shape[-1]):
        raise ValueError(f"head_dim must be {HEAD_DIMS}, got {q.shape[-1]}: change n_head or pad")


def check_together(q: Tensor, k: Tensor, v: Tensor, n_dims: int, *, may_lack_tokens: bool = False) -> None:
    """Raises ValueError unless the shapes of q, k and v match, and all have one dtype and device."""
    layout = "(B, T, H, D)" if n_dims == 4 else "(total, H, D)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != n_dims:
            raise ValueError(f"{name} must have {n_dims} dimensions, {layout}, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}: cast one"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}: move one"
            )
        if 0 in x.shape[-2 if may_lack_tokens else 0 :]:
            raise ValueError(f"{name} must not be empty, got shape {tuple(x.shape)}")
    head_dim = q.shape[-1]
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"k must have the head_dim of q, {head_dim}, got {k.shape[-1]}")
    if n_dims == 4 and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the batch of q, {q.shape[0]}, got {k.shape[0]}")
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            f"the {q.shape[-2]} heads of q must be a multiple of those of k and v, got {k.shape[-2]}"
        )


def check_flags(**flags: bool) -> None:
    for name, x in flags.items():
        if isinstance(x, (bool, torch.SymBool)):
            continue
        # NumPy's bools, tensors of one, 0 and 1 pass; PyTorch would take None for False and, with documents,
        # anything else for its truth value
        numel = x.numel() if isinstance(x, Tensor) else getattr(x, "size", 1)
        if numel != 1 or x not in (True, False):
            raise ValueError(f"{name} must be True or False, got {x!r}")


def check_options(
    q: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
) -> None:
    """Checks every number, and the seed; causal has passed check_flags."""
    if isinstance(softmax_scale, Tensor):
        raise ValueError("softmax_scale must be a float, got a tensor: multiply q by it, gradients flow then")
    scale = 1.0 if softmax_scale is None else softmax_scale
    check_is_number("softmax_scale", scale)
    check_is_number("dropout_p", dropout_p)
    check_scale("softmax_scale", scale)
    seed = None if isinstance(dropout_seed, Tensor) else dropout_seed
    for name, x in (("window", window), ("dropout_seed", seed)):
        if x is not None:
            check_is_int(name, x)
    check_window(window, causal)
    check_dropout(dropout_p)
    if isinstance(dropout_seed, Tensor):
        if dropout_seed.dtype != torch.int64 or dropout_seed.numel() != 1 or dropout_seed.device != q.device:
            raise ValueError(
                f"dropout_seed must be an int, or an int64 tensor of one element on {q.device}, got "
                f"{dropout_seed.dtype} of shape {tuple(dropout_seed.shape)} on {dropout_seed.device}"
            )
    elif dropout_seed is not None and not 0 <= dropout_seed < 2**63:
        raise ValueError(f"dropout_seed must be at least 0 and below 2**63, got {dropout_seed}")


def check_is_number(name: str, x: float) -> None:
    if not isinstance(x, NUMBERS) or (isinstance(x, Tensor) and x.numel() != 1):
        raise ValueError(f"{name} must be a number, got {type(x).__name__} {x!r}")


def check_is_int(name: str, x: int) -> None:
    # True would be a window of one key, or a vocabulary of one token
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an int, got {type(x).__name__} {x}: int() makes one")


def check_window(window: int | None, causal: bool) -> None:
    if window is None:
        return
    if not 1 <= window < MOST_TOKENS:
        raise ValueError(
            f"window must be at least 1, the token itself, and below {MOST_TOKENS}, got {window}: "
            "None means no window"
        )
    if not causal:
        raise ValueError(f"window looks back only, got window={window} with causal=False: pass causal=True")


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
    if not 0.0 <= dropout_p <= MOST_DROPPED:
        raise ValueError(f"{name} must be at least 0 and at most {MOST_DROPPED:.4f}, got {dropout_p}")


def check_document_ids(document_ids: Tensor, q: Tensor, k: Tensor) -> float | None:
    """Checks shape and order of document_ids; returns intervals.mean_length if a backward pass may come.

    While compiling or capturing, and for fake tensors, it reads no values and returns None.
    """
    check_is_tensor("document_ids", document_ids)
    expected = (k.shape[0], k.shape[1])
    if tuple(document_ids.shape) != expected:
        raise ValueError(
            f"document_ids must have shape (B, Tk) = {expected}, got {tuple(document_ids.shape)}"
        )
    check_index_tensor("document_ids", document_ids, q)
    check_document_lengths(q.shape[1], k.shape[1])

    def read() -> float | None:
        check_order(document_ids)
        # only the backward pass uses it, and it costs another wait for the GPU
        return mean_length(document_ids) if torch.is_grad_enabled() else None

    return read_once(document_ids, k.shape[1], read)


def check_document_lengths(seq_q: int, seq_k: int) -> None:
    """Checks that every query has a document: queries are the last seq_q of the seq_k tokens."""
    if seq_q > seq_k:
        raise ValueError(
            f"document_ids need Tq <= Tk, got Tq {seq_q} and Tk {seq_k}: the queries are the last Tq tokens, "
            "pass their keys too"
        )


def check_order(document_ids: Tensor) -> None:
    """Checks that documents (B, T) are numbered in their order; reads the values."""
    decreases = document_ids[:, 1:] < document_ids[:, :-1]
    if bool(decreases.any()):
        row, place = decreases.nonzero()[0].tolist()
        before, after = document_ids[row, place : place + 2].tolist()
        raise ValueError(
            f"document_ids must not decrease along a row, got {before} before {after} in row {row}: number "
            "the documents in their order"
        )


def check_is_block_mask(block_mask: BlockMask) -> None:
    if not isinstance(block_mask, BlockMask):
        raise ValueError(
            f"block_mask must be a BlockMask, got {type(block_mask).__name__}: see block_masks.py"
        )
    if not hasattr(block_mask, "rows"):
        raise ValueError("block_mask has no lists, as made under without_lists: call its make_lists() first")


def check_block_mask(block_mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Checks that a block mask is for these lengths, heads and device; (B, T, H, D) or (total, H, D)."""
    check_is_block_mask(block_mask)
    for name, have, x in (("seq_q", block_mask.seq_q, q), ("seq_k", block_mask.seq_k, k)):
        if have != x.shape[-3]:
            raise ValueError(
                f"block_mask was built for {name}={have}, got {x.shape[-3]} tokens: build it for this length"
            )
    check_block_mask_serves(block_mask, q)


def check_block_mask_serves(block_mask: BlockMask, q: Tensor) -> None:
    """Checks that a block mask serves q's batches, heads and device; (B, T, H, D) or (total, H, D)."""
    n_batch = q.shape[0] if q.dim() == 4 else 1
    for one, many, have, need in (
        ("batch", "batches", block_mask.n_batch, n_batch),
        ("head", "heads", block_mask.n_head, q.shape[-2]),
    ):
        if have not in (1, need):
            served = f"1 {one}" if need == 1 else f"1 or {need} {many}"
            raise ValueError(f"block_mask must have {served}, as q, got {have}")
    if block_mask.device != q.device:
        raise ValueError(
            f"block_mask must be on {q.device}, got {block_mask.device}: build it with device={q.device}"
        )


def check_may_be_saved(
    block_mask: BlockMask | None, dropout_seed: int | Tensor | None, *wanted: Tensor
) -> None:
    """Raises ValueError for tensors made under inference_mode that gradients of `wanted` would need."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    of_mask = None if block_mask is None else block_mask.bits
    for name, x in (("block_mask", of_mask), ("dropout_seed", dropout_seed)):
        if isinstance(x, Tensor) and x.is_inference() and any(y.requires_grad for y in wanted):
            raise ValueError(
                f"{name} was made under inference_mode, and cannot be saved for a backward pass: make it "
                "under torch.inference_mode(False), or call attention under torch.no_grad()"
            )


def check_cu_seqlens(name: str, cu_seqlens: Tensor, x: Tensor) -> float | None:
    """Checks shape and values of cu_seqlens; returns the length of a token's sequence, averaged over tokens.

    While compiling or capturing, and for fake tensors, it reads no values and returns None.
    """
    check_is_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must have shape (n_sequences + 1,), got {tuple(cu_seqlens.shape)}")
    check_index_tensor(name, cu_seqlens, x)

    def read() -> float:
        starts = cu_seqlens.tolist()
        if starts[0] != 0:
            raise ValueError(f"{name} must start at 0, got {starts[0]}: {SUMMED}")
        if starts[-1] != x.shape[0]:
            raise ValueError(f"{name} must end at the total number of tokens, {x.shape[0]}, got {starts[-1]}")
        for before, after in pairwise(starts):
            if before > after:
                raise ValueError(f"{name} must not decrease, got {before} before {after}: {SUMMED}")
        return sum((b - a) ** 2 for a, b in pairwise(starts)) / max(1, x.shape[0])

    return read_once(cu_seqlens, x.shape[0], read)


def check_same_total(q: Tensor, k: Tensor) -> None:
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the {q.shape[0]} tokens of q, got {k.shape[0]}: pass cu_seqlens_k")


def check_same_count(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> None:
    if cu_seqlens.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must be as long as cu_seqlens, {cu_seqlens.shape[0]}, got {cu_seqlens_k.shape[0]}"
        )


def check_index_tensor(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {x.dtype}: call .int()")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, got {x.device}: move it")


def may_read(x: Tensor) -> bool:
    """Whether x has values that can be read without breaking a graph (of torch.compile or of CUDA).

    Not inside transforms of torch.func, which the definition goes through: vmap's x has values of many calls.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def read_once(x: Tensor, n_tokens: int, read: Callable[[], float | None]) -> float | None:
    """What read() returns, called once per version of x on a GPU; it raises ValueError for wrong values.

    None if x cannot be read. If read() returned None without gradients, it is called again with them.
    """
    if not may_read(x):
        return None
    # tensors made under inference_mode have no version, and NumPy writes to a CPU's without raising it: they
    # are read every time
    if x.is_inference() or x.device.type == "cpu":
        return read()
    version, found_for, found = CHECKED.get(x, (None, None, None))
    # the call without gradients may have left out what they need
    lacks = found is None and torch.is_grad_enabled()
    if lacks or (version, found_for) != (x._version, n_tokens):
        found = read()
        CHECKED[x] = x._version, n_tokens, found
    return found
