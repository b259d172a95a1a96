"""Hugging Face models on these kernels: attn_implementation="nanoflash", after register().

Padding masks of shape (B, T), packed position_ids or cu_seq_lens, sliding windows, grouped heads and dropout
are taken over; what these kernels do not compute (soft caps, sinks, attention weights, windows that look
ahead) is refused. Only `register` imports transformers.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kernels.checks import may_read
from kernels.flash_attention import flash_attention, flash_attention_varlen

NAME = "nanoflash"
# mask or positions -> the version and sizes that they were read for, the last layer that asked, and the
# documents found
DOCUMENTS = WeakIdKeyDictionary()


def register() -> None:
    """Makes "nanoflash" an attention implementation of transformers; a second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
    from transformers.masking_utils import flash_attention_mask

    if NAME in AttentionInterface():
        return
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)

    # transformers takes every name with "flash" in it for a package of its own, and loads that package's
    # functions before it looks at what is registered: give it functions under our name
    load = modeling_flash_attention_utils._lazy_imports

    def load_ours_too(implementation, *args, **kwargs):
        if implementation != NAME:
            return load(implementation, *args, **kwargs)
        utils = modeling_flash_attention_utils
        return flash_attention, flash_attention_varlen, None, utils._pad_input, utils._unpad_input

    modeling_flash_attention_utils._lazy_imports = load_ours_too


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, Tq, D), key and value (B, Hkv, Tk, D); out (B, Tq, H, D)."""
    for refused in ("softcap", "s_aux", "position_bias", "output_attentions"):
        if kwargs.get(refused) is not None and kwargs[refused] is not False:
            raise ValueError(f"{refused} is not computed by nanoflash: use attn_implementation='eager'")
    causal = module.is_causal if is_causal is None else is_causal
    # a window as long as the keys hides nothing
    window = sliding_window if sliding_window and sliding_window < key.shape[2] else None
    if window is not None and not causal:
        raise ValueError(
            f"sliding_window looks back only, got {window} without a causal mask: use "
            "attn_implementation='eager'"
        )
    options = {
        "causal": causal,
        "softmax_scale": scaling,
        "window": window,
        "dropout_p": dropout,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None and cu_seq_lens_q is not None:
        # sequences one behind the other, in a batch of one
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attention_varlen(
            *packed, cu_seq_lens_q.int(), cu_seqlens_k=cu_seq_lens_k.int(), **options
        ).view(q.shape)
    else:
        out = flash_attention(
            q, k, v, document_ids=documents_of(module, attention_mask, position_ids, key), **options
        )
    return out, None


def documents_of(
    module: torch.nn.Module, attention_mask: Tensor | None, position_ids: Tensor | None, key: Tensor
) -> Tensor | None:
    """Documents that hide padding or keep packed sequences apart; None where there is nothing to hide.

    Every layer of a model gets the same mask or positions: they are read by the first, for reading waits for
    the GPU. A layer that does not follow the one before belongs to another pass, in whose buffer there may be
    other values: a broadcast, for one, changes no version.
    """
    source, find = (position_ids, of_positions) if attention_mask is None else (attention_mask, of_mask)
    if source is None:
        return None
    layer = getattr(module, "layer_idx", None)
    # what inference_mode makes counts no versions, and fits nowhere else
    if layer is None or not may_read(source) or source.is_inference() or torch.is_inference_mode_enabled():
        return find(source, key)
    made_for = source._version, key.shape[0], key.shape[2]
    known_for, last_layer, documents = DOCUMENTS.get(source, (None, None, None))
    if known_for != made_for or layer <= last_layer:
        documents = find(source, key)
    DOCUMENTS[source] = made_for, layer, documents
    return documents


def of_mask(attention_mask: Tensor, key: Tensor) -> Tensor:
    """Documents (B, T) int32 of a mask (B, T); ValueError if a row's text is not one unbroken run."""
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (B, T), got {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    # text and padding take turns: each run is a document
    ids = (mask[:, 1:] != mask[:, :-1]).cumsum(1)
    if may_read(ids) and bool((ids + mask[:, :1] > 2).any()):
        raise ValueError("attention_mask must keep one unbroken run of tokens in each row")
    return torch.nn.functional.pad(ids, (1, 0)).int()


def of_positions(position_ids: Tensor, key: Tensor) -> Tensor | None:
    """Documents (B, T) int32 of positions that start anew; None where they do not, or are not of the keys."""
    if position_ids.dim() != 2 or position_ids.shape[1] != key.shape[2]:
        return None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if may_read(starts) and not bool(starts.any()):
        return None
    ids = torch.nn.functional.pad(starts.cumsum(1), (1, 0)).int()
    return ids.expand(key.shape[0], -1)
