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

# functions of transformers.masking_utils, and the closures that its other functions return
REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
EITHER = "or_masks.<locals>.or_mask"
COMPOSED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    EITHER: "mask_functions",
    REMAPPED: "mask_function",
}
KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    # layers are given the window too, or window_of finds it
    "sliding_window_overlay.<locals>.inner_mask",
    # transformers refuses lengths at which it would hide anything
    "chunked_overlay.<locals>.inner_mask",
}
PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
BLOCKS = "blockwise_overlay.<locals>.inner_mask"
LOOKS_AHEAD = "sliding_window_bidirectional_overlay.<locals>.inner_mask"


def read_rules(mask_function: Callable, kv_length: int, *, is_own: bool) -> Tensor | None:
    """The number of the packed sequence of each token, (B, T) int64 ascending; None if none are packed.

    mask_function: what transformers passes to a mask interface. is_own: whether the model has added rules of
    its own (transformers' use_vmap). Inside torch.compile the answer is None: there position_ids tell, if the
    layers are given them. Raises ValueError for a rule that would be lost.
    """
    if torch.compiler.is_compiling():
        # a compiler does not see what closures have captured
        if is_own or mask_function.__qualname__ == EITHER:
            raise ValueError(
                "the mask of this model follows rules that cannot be looked at inside torch.compile: leave "
                "torch.compile out, or use attn_implementation='eager'"
            )
        return None
    rules, documents = take_apart(mask_function)
    for rule in rules:
        name, numbers = name_of(rule), captured(rule)
        if name in KNOWN:
            continue
        if name == LOOKS_AHEAD and kv_length <= numbers["sliding_window"] + 1:
            continue
        if name == BLOCKS and holds(numbers["block_sequence_ids"], lambda ids: ids < 0):
            continue
        if name == PACKED and holds(numbers["packed_sequence_mask"], lambda ids: ids == ids[:, :1]):
            continue
        raise ValueError(
            f"the mask of this model follows {name.split('.')[0]}, which nanoflash does not compute: use "
            "attn_implementation='eager'"
        )
    return documents


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


def take_apart(mask_function: Callable) -> tuple[list[Callable], Tensor | None]:
    """The rules of which a mask is composed, and the numbers of the sequences that its position_ids pack."""
    name = name_of(mask_function)
    if name not in COMPOSED:
        return [mask_function], None
    parts = captured(mask_function)[COMPOSED[name]]
    parts = parts if isinstance(parts, tuple) else (parts,)
    documents, rules = None, []
    if [name_of(part) for part in parts] == [PACKED, REMAPPED]:
        documents = captured(parts[0])["packed_sequence_mask"]
        parts = parts[1:]
    for part in parts:
        more, found = take_apart(part)
        rules += more
        documents = found if documents is None else documents
    return rules, documents


def name_of(rule: Callable) -> str:
    return getattr(rule, "__qualname__", type(rule).__name__)


def captured(rule: Callable) -> dict[str, Any]:
    """What a closure has captured, by name."""
    if getattr(rule, "__closure__", None) is None:
        return {}
    cells = zip(rule.__code__.co_freevars, rule.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def holds(numbers: Tensor, condition: Callable[[Tensor], Tensor]) -> bool:
    """Whether all numbers can be read and fulfil the condition."""
    return may_read(numbers) and bool(condition(numbers).all())
