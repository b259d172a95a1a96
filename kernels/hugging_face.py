"""Hugging Face models on these kernels: attn_implementation="nanoflash", after register().

Supported are padding masks, (B, Tk) or over the filled slots of a static cache, packed position_ids or
cu_seq_lens, sliding windows, grouped heads, values narrower than keys, dropout and the learned sinks of
GPT-OSS. What these kernels do not compute (soft caps, attention weights where a model asks its layers for
them, windows that look ahead, images that see all of themselves, the paged cache of continuous batching) is
refused, and so are models for which transformers supports no flash attention. Inside torch.compile packed
position_ids are found only by layers that are given them. Only `register` imports transformers.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kernels.checks import may_read
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.hugging_face_masks import filled_slots, read_rules, window_of

NAME = "nanoflash"
# version of transformers; before, functions of flash attention were loaded in another way
OLDEST = (5, 4)
# models of transformers that support flash attention, but would be wrong, or would not run on these kernels
UNFIT = {
    # some only where they are given a mask
    "tells flash attention that it is not causal, which it is": (
        "pegasus_x",
        "aimv2_text_model",
        "moonshine",
        "moonshine_streaming",
    ),
    "tells flash attention that it is causal, which it is not": ("lightglue", "phi4_multimodal_vision"),
    "calls transformers' flash attention itself, past what is registered": (
        "gpt_neo",
        "gptj",
        "falcon",
        "bark",
        "semantic",
        "coarse_acoustics",
        "fine_acoustics",
    ),
}
# of a mask that holds the numbers of packed sequences: nobody's padding has it
DOCUMENTS = torch.uint32
# mask or positions -> the version and sizes for which they were read, the last layer that asked, the result
READ = WeakIdKeyDictionary()


def register() -> None:
    """Makes "nanoflash" an attention implementation of transformers; a second call changes nothing.

    Raises ImportError if transformers is too old.
    """
    from transformers import __version__ as found

    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"nanoflash needs transformers {oldest} or newer, got {found}: upgrade it")
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedModel,
        modeling_flash_attention_utils,
    )
    from transformers.masking_utils import flash_attention_mask

    if NAME in AttentionInterface():
        return
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_interface(flash_attention_mask))
    load_without_a_package(modeling_flash_attention_utils)
    support_sinks(PreTrainedModel)
    refuse_unfit_models(PreTrainedModel)


def mask_interface(flash_attention_mask: Callable) -> Callable:
    """What makes a mask for our attention: flash_attention_mask, or document numbers for packed sequences."""

    def mask_or_documents(
        *, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function, attention_mask=None,
        device=None, config=None, use_vmap=False, **_,
    ):  # fmt: skip
        # as Gemma's layers read it; other values leave text causal
        are_causal = getattr(config, "use_bidirectional_attention", None) not in (True, "all")
        documents = read_rules(mask_function, kv_length, are_causal=are_causal, is_own=use_vmap)
        if attention_mask is None:
            n_filled = filled_slots(mask_function, q_length, kv_length, q_offset, kv_offset)
            if n_filled < kv_length:
                attention_mask = torch.ones(batch_size, n_filled, dtype=torch.bool, device=device)
        padding = flash_attention_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
        )
        # older versions leave out a mask of ones that is shorter than a static cache, too
        if padding is None and attention_mask is not None and attention_mask.shape[1] < kv_length:
            padding = attention_mask
        if documents is None:
            return padding
        # transformers itself packs only where there is no padding
        if padding is not None:
            raise ValueError(
                "the mask of this model has padding beside packed sequences, which nanoflash does not "
                "compute: use attn_implementation='eager'"
            )
        # not all models give their layers position_ids, but all give them the mask
        return documents.int().view(DOCUMENTS)

    return mask_or_documents


def load_without_a_package(utils: ModuleType) -> None:
    # transformers takes every name that contains "flash" for one of its packages, and loads the functions of
    # that package before it looks at what is registered: give it functions under our name
    load = utils._lazy_imports

    def load_ours_too(implementation, *args, **kwargs):
        if implementation != NAME:
            return load(implementation, *args, **kwargs)
        return flash_attention, flash_attention_varlen, None, utils._pad_input, utils._unpad_input

    utils._lazy_imports = load_ours_too


def support_sinks(models: type) -> None:
    # models with sinks list the packages that support them, and would load the first of these instead of ours
    check = models._check_and_adjust_attn_implementation

    def check_with_ours(self, implementation, *args, **kwargs):
        listed = self._compatible_flash_implementations or ()
        if implementation == NAME and "flash_attention_4" in listed and NAME not in listed:
            self._compatible_flash_implementations = [*listed, NAME]
        return check(self, implementation, *args, **kwargs)

    models._check_and_adjust_attn_implementation = check_with_ours


def refuse_unfit_models(models: type) -> None:
    # transformers checks whether a model supports flash attention only for its own packages. A model without
    # that support would run its own attention with our masks, which leave causality to the kernel
    choose = models.get_correct_attn_implementation

    def choose_if_taken(self, implementation, *args, **kwargs):
        for what_it_does, model_types in UNFIT.items():
            if implementation == NAME and self.config.model_type in model_types:
                raise ValueError(
                    f"{type(self).__name__} {what_it_does}: use attn_implementation='eager', got {NAME!r}"
                )
        if implementation == NAME and not self._supports_flash_attn:
            raise ValueError(
                f"{type(self).__name__} does not support flash attention (_supports_flash_attn is False): "
                f"use attn_implementation='eager', got {NAME!r}"
            )
        return choose(self, implementation, *args, **kwargs)

    models.get_correct_attn_implementation = choose_if_taken


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, Tq, D), key and value (B, Hkv, Tk, D); out (B, Tq, H, D).

    s_aux: (H,), the score of one more key that every query sees, with value 0 (a learned sink).
    """
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        given, missing = ("q", "k") if cu_seq_lens_k is None else ("k", "q")
        raise ValueError(f"cu_seq_lens_{missing} must be given with cu_seq_lens_{given}, got None: pass both")
    options = options_of(module, key.shape[2], is_causal, kwargs)
    options |= {"softmax_scale": scaling, "dropout_p": dropout}
    causal = options["causal"]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    n_missing = q.shape[-1] - v.shape[-1]
    if n_missing > 0:
        # values of DeepSeek's heads are narrower than their keys
        v = torch.nn.functional.pad(v, (0, n_missing))
    starts, ids = None, None
    if attention_mask is not None and attention_mask.dtype == DOCUMENTS:
        ids = once(module, attention_mask, of_documents, q, k)
    elif attention_mask is not None and causal:
        if attention_mask.dim() == 2:
            length = attention_mask.shape[1]
            if length < q.shape[1]:
                raise ValueError(
                    f"attention_mask must be as long as the tokens so far, got length {length} for "
                    f"{q.shape[1]} queries and {k.shape[1]} keys: pass one of shape (B, tokens so far)"
                )
            # a static cache's slots beyond the mask are empty
            k, v = (x[:, :length] for x in (k, v))
        ids = once(module, attention_mask, of_mask, q, k)
    elif attention_mask is not None:
        starts = once(module, attention_mask, of_text, q, k)
    elif cu_seq_lens_q is not None:
        # sequences one after the other, in a batch of one
        starts = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    elif position_ids is not None:
        ids = once(module, position_ids, of_causal_positions if causal else of_positions, q, k)
    if starts is None:
        out, lse = flash_attention(q, k, v, document_ids=ids, **options)
    else:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = flash_attention_varlen(*packed, starts[0], cu_seqlens_k=starts[1], **options)
    if s_aux is not None:
        out = beside_sinks(out, lse, s_aux)
    out = out.view(q.shape)
    return out if n_missing == 0 else out[..., : value.shape[-1]].contiguous(), None


def options_of(
    module: torch.nn.Module, seq_k: int, is_causal: bool | None, given: dict[str, Any]
) -> dict[str, Any]:
    """What flash_attention is asked for by a layer and transformers' other arguments.

    seq_k: keys. Raises ValueError for what it cannot compute.
    """
    # keys and values of a paged cache, as in continuous batching, would have to be stored in it here
    for refused in ("softcap", "position_bias", "output_attentions", "cache"):
        if given.get(refused) is not None and given[refused] is not False:
            raise ValueError(f"{refused} is not supported by nanoflash: use attn_implementation='eager'")
    causal = module.is_causal if is_causal is None else is_causal
    window = given["sliding_window"] if "sliding_window" in given else window_of(module)
    # as long as the keys, it hides nothing
    window = window if window and window < seq_k else None
    if window is not None and not causal:
        raise ValueError(
            f"sliding_window looks back only, got {window} without a causal mask: use "
            "attn_implementation='eager'"
        )
    return {
        "causal": causal,
        "window": window,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_lse": True,
    }


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention in which each head has one more key, with score `sinks` and value 0.

    out: (..., T, H, D), lse: (..., H, T), those without that key; sinks: (H,).
    """
    kept = torch.sigmoid(lse - sinks[:, None].float())
    return (out * kept.transpose(-1, -2).unsqueeze(-1)).to(out.dtype)


def once(module: torch.nn.Module, source: Tensor, find: Callable, q: Tensor, k: Tensor):
    """find(source, q, k), called once for all layers of a pass.

    Every layer of a model gets the same mask or positions, so only the first reads them, because reading
    waits for the GPU. A layer that does not follow the previous one belongs to another pass, for which the
    same buffer may hold other values: a broadcast, for example, changes no version.
    """
    layer = getattr(module, "layer_idx", None)
    # tensors made under inference_mode have no version
    if layer is None or not may_read(source) or source.is_inference() or torch.is_inference_mode_enabled():
        return find(source, q, k)
    made_for = source._version, find, q.shape[1], *k.shape[:2]
    known_for, last_layer, found = READ.get(source, (None, None, None))
    if known_for != made_for or layer <= last_layer:
        found = find(source, q, k)
    READ[source] = made_for, layer, found
    return found


def of_mask(attention_mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Documents (B, Tk) int32 of a mask (B, Tk), under which text sees text, and padding sees padding.

    Raises ValueError if a row's text is not one unbroken run.
    """
    if attention_mask.shape != k.shape[:2]:
        expected, shape = tuple(k.shape[:2]), tuple(attention_mask.shape)
        raise ValueError(
            f"attention_mask must have shape (B, Tk) = {expected}, got {shape}: pass the tokenizer's own, or "
            "use attn_implementation='eager' for a mask of pairs"
        )
    mask = attention_mask.bool()
    ids = (mask[:, 1:] != mask[:, :-1]).cumsum(1)
    if may_read(ids) and bool((resumes := ids + mask[:, :1] > 2).any()):
        row = int(resumes.nonzero()[0, 0])
        raise ValueError(
            f"attention_mask must keep one unbroken run of tokens in each row, got several in row {row}: use "
            "attn_implementation='eager'"
        )
    return torch.nn.functional.pad(ids, (1, 0)).int()


def of_documents(documents: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Documents (B, T) int32 of a mask that holds their numbers."""
    return documents.view(torch.int32)


def of_text(attention_mask: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens of q and k (3 B + 1,) int32 under which every query sees a row's text, and no padding.

    The keys of each row are padding, text and padding, and all its queries belong to the text. Raises as
    of_mask.
    """
    of_mask(attention_mask, q, k)
    (batch, seq_k), seq_q = attention_mask.shape, q.shape[1]
    mask = attention_mask.bool().int()
    first, n_text = mask.argmax(1), mask.sum(1)
    row = torch.arange(batch, device=mask.device)
    ends_q = torch.stack([row, row + 1, row + 1], 1) * seq_q
    ends_k = row[:, None] * seq_k + torch.stack([first, first + n_text, torch.full_like(first, seq_k)], 1)
    return tuple(torch.nn.functional.pad(ends.flatten(), (1, 0)).int() for ends in (ends_q, ends_k))


def of_positions(position_ids: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """Documents (B, T) int32 of positions that restart; None if they do not, or are not those of the keys."""
    if position_ids.dim() != 2 or position_ids.shape[1] != k.shape[1]:
        return None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if may_read(starts) and not bool(starts.any()):
        return None
    ids = torch.nn.functional.pad(starts.cumsum(1), (1, 0)).int()
    return ids.expand(k.shape[0], -1)


def of_causal_positions(position_ids: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """As of_positions. Raises ValueError if the last query is before the last key, in a half-empty cache."""
    one_each = position_ids.dim() == 2 and position_ids.shape[1] == q.shape[1] < k.shape[1]
    if one_each and may_read(position_ids) and (last := int(position_ids[:, -1].max())) + 1 < k.shape[1]:
        raise ValueError(
            f"position_ids end at {last}, but there are {k.shape[1]} keys: where a static cache is not full, "
            f"pass attention_mask, ones of shape (B, {last + 1}), by which its empty slots are left out"
        )
    return of_positions(position_ids, q, k)
