"""Rules of Hugging Face models' masks that would be lost: read where that is possible, refused elsewhere.

transformers gives its flash attention packages the padding of a mask and nothing more. What else a model puts
into its mask (packed sequences, images that see all of themselves, windows that look ahead) is in a function
of four indices, composed of closures, which these packages never call. Here it is taken apart.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.checks import may_read

# functions of transformers, and the closures that its other functions return
BIDIRECTIONAL = "bidirectional_mask_function"
BOTH, EITHER = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"
# the same mask within each packed sequence
REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
KNOWN = {
    "causal_mask_function",
    BIDIRECTIONAL,
    # layers are given the window too, or window_of finds it
    "sliding_window_overlay.<locals>.inner_mask",
    # transformers refuses lengths at which it would hide anything
    "chunked_overlay.<locals>.inner_mask",
}
# windows to both sides, and the greatest distance that they show beyond their own number
LOOKS_AHEAD = {
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": 0,
    "_bidirectional_window_overlay.<locals>.inner_mask": -1,
}
# under which name they have captured the numbers of images, -1 for text
IMAGES = {
    "blockwise_overlay.<locals>.inner_mask": "block_sequence_ids",
    "token_type_ids_mask_function.<locals>.inner_mask": "group_ids",
}


def read_rules(mask_function: Callable, kv_length: int, *, are_causal: bool, is_own: bool) -> Tensor | None:
    """The number of the packed sequence of each token, (B, T) int64 ascending; None if none are packed.

    mask_function: what transformers passes to a mask interface. are_causal: whether layers hide what follows
    if the mask does. is_own: whether the model has added rules of its own (transformers' use_vmap). Inside
    torch.compile the answer is None: there position_ids tell, if the layers are given them. Raises ValueError
    for a rule that would be lost.
    """
    if not torch.compiler.is_compiling():
        # layers hide what follows, or none of it
        if not are_causal and _shows_all(mask_function, kv_length):
            return None
        return _read(mask_function, kv_length)
    # a compiler does not see what closures have captured
    if is_own or _short_name(mask_function) == EITHER.split(".")[-1]:
        raise ValueError(
            "the mask of this model follows rules that cannot be looked at inside torch.compile: leave "
            "torch.compile out, or use attn_implementation='eager'"
        )
    return None


def filled_slots(
    mask_function: Callable, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> int:
    """How many of the keys there are: a static cache has slots behind them, which only a mask tells apart.

    The arguments are what transformers passes to a mask interface. Raises ValueError where the number is in a
    tensor, as a static cache counts, and may not be read.
    """
    if kv_length <= q_length:
        return kv_length
    # what every query sees is full: the text that a target looks at
    if torch.compiler.is_compiling():
        is_full = _short_name(mask_function) == BIDIRECTIONAL
    else:
        is_full = _shows_all(mask_function, kv_length)
    if is_full:
        return kv_length
    if isinstance(q_offset, Tensor):
        if not may_read(q_offset):
            raise ValueError(
                "attention_mask (a decoder's decoder_attention_mask) must be given with a static cache in "
                "torch.compile or a CUDA graph, got None: pass ones of shape (B, tokens so far)"
            )
        q_offset = int(q_offset)
    return min(q_offset + q_length - kv_offset, kv_length)


def window_of(layer: nn.Module) -> int | None:
    """The window of an attention layer that is given none, though its model's mask has one; None without.

    Qwen2-MoE's and PhiMoE's layers leave it to the mask.
    """
    config = getattr(layer, "config", None)
    if "create_sliding_window_causal_mask" not in vars(sys.modules[type(layer).__module__]):
        return None
    if getattr(config, "layer_types", None) is not None:
        return getattr(layer, "sliding_window", None)
    return getattr(config, "sliding_window", None)


def _read(rule: Callable, kv_length: int) -> Tensor | None:
    name, numbers = _name(rule), _captured(rule)
    if name == EITHER:
        shown = [part for part in numbers["mask_functions"] if not _shows_nothing(part)]
        if len(shown) == 1:
            return _read(shown[0], kv_length)
        rule = shown[-1]
    elif name == BOTH:
        read = [_read(part, kv_length) for part in numbers["mask_functions"]]
        packed = [documents for documents in read if documents is not None]
        if len(packed) < 2:
            return packed[0] if packed else None
    elif name == REMAPPED:
        return _read(numbers["mask_function"], kv_length)
    elif name == PACKED:
        documents = numbers["packed_sequence_mask"]
        if _holds(documents[:, 1:] >= documents[:, :-1]):
            return documents
    elif name in KNOWN or (name in LOOKS_AHEAD and _shows_all(rule, kv_length)):
        return None
    raise ValueError(
        f"the mask of this model follows {_name(rule).split('.')[0]}, which nanoflash does not compute: use "
        "attn_implementation='eager'"
    )


def _shows_all(rule: Callable, kv_length: int) -> bool:
    """Whether every query sees every key."""
    name, numbers = _name(rule), _captured(rule)
    if name in (BOTH, EITHER):
        shown = [_shows_all(part, kv_length) for part in numbers["mask_functions"]]
        return all(shown) if name == BOTH else any(shown)
    if name in LOOKS_AHEAD:
        return kv_length - 1 <= numbers["sliding_window"] + LOOKS_AHEAD[name]
    if (images := _images(rule)) is not None:
        return _holds((images >= 0) & (images == images[:, :1]))
    if name.endswith(".<lambda>"):
        # what has no dimension does not depend on which queries and keys are asked
        index = torch.arange(2)
        answer = rule(index, index, index, index)
        return answer.dim() == 0 and bool(answer)
    return name == BIDIRECTIONAL


def _shows_nothing(rule: Callable) -> bool:
    """Whether a rule that adds to what is seen is that of images, and there are none."""
    images = _images(rule)
    return images is not None and _holds(images < 0)


def _images(rule: Callable) -> Tensor | None:
    """The numbers of images that a rule tells apart, (B, T); None if it is another rule."""
    return _captured(rule).get(IMAGES.get(_name(rule)))


def _name(rule: Callable) -> str:
    return getattr(rule, "__qualname__", type(rule).__name__)


def _short_name(rule: Callable) -> str:
    """The name by which a compiler knows a rule: Dynamo compares others' __qualname__ wrongly."""
    return rule.__name__


def _captured(rule: Callable) -> dict[str, Any]:
    """What a closure has captured, by name."""
    if getattr(rule, "__closure__", None) is None:
        return {}
    cells = zip(rule.__code__.co_freevars, rule.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _holds(condition: Tensor) -> bool:
    return may_read(condition) and bool(condition.all())
