"""Activation recomputation: the backward pass recomputes a layer's intermediate results from its input.

Source: Chen et al., arXiv:1604.06174; the selective form, Korthikanti et al., arXiv:2205.05198.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# registers both of our operators
import kernels.packed  # noqa: F401

RECOMPUTE = ("none", "selective", "full")

aten, ours = torch.ops.aten, torch.ops.nanoflash
# what costs more to recompute than to keep: matrix products and attention
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    ours.attention_forward.default,
    ours.packed_attention_forward.default,
}


def recomputed(layer: Callable, kind: str) -> Callable:
    """The layer, with a backward pass that repeats its forward, or with kind="selective" the cheap part.

    Gradients are the same, and dropout draws the same numbers. The layer must not change its arguments.
    """
    if kind == "none" or not torch.is_grad_enabled():
        return layer
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    options = {"context_fn": contexts} if kind == "selective" else {}
    return partial(checkpoint, layer, use_reentrant=False, **options)


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    # what draws random numbers runs again, or later dropout would not draw the same numbers as before
    is_kept = operator in KEPT and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether an operator draws from PyTorch's generator, as PyTorch's fused attention with dropout does."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = (argument.name for argument in operator._schema.arguments)
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) > 0.0
