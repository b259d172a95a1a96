"""torch.compile of a GPT, by its parts or whole."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from model.gpt import GPT
    from model.ring import Ring


class CompiledModel(nn.Module):
    """A GPT compiled by its parts, one of each kind however many layers it has; or, for training, whole.

    For training it is cut behind each product of queries, keys and values, so that the end of one layer and
    the beginning of the next are in one part: the compiler makes one kernel of both, and cut between layers
    a step is 1.5% longer (docs/training_speed.md). Evaluation is cut between layers, so that the last is
    like the others, and one layer less is to be compiled; and so are layers that keep only their input.

    whole: training is one graph, which takes the compiler longer by each layer, and Python less to call.
    """

    def __init__(self, weights: "GPT", *, whole: bool = False):
        super().__init__()
        self.weights = weights
        self.whole = torch.compile(weights) if whole else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        ring: "Ring | None" = None,
    ) -> Tensor:
        """The mean cross-entropy in nats, (). The arguments are those of GPT.forward; targets are needed."""
        inputs = tokens, targets, document_ids, positions
        if torch.is_grad_enabled() and self.whole is not None:
            return self.whole(*inputs, ring)
        if torch.is_grad_enabled() and self.weights.recompute != "full" and ring is None:
            return cut_behind_products(self.weights, *inputs)
        return cut_between_layers(self.weights, *inputs, ring)


def cut_behind_products(
    model: "GPT", tokens: Tensor, targets: Tensor, document_ids: Tensor | None, positions: Tensor | None
) -> Tensor:
    """What CompiledModel returns, of sequences that this process has alone."""
    x, turn, product = compiled(model.to_first)(tokens, positions)
    inputs = {"document_ids": document_ids, "rotation": turn}
    *masks, last_mask = model.masks(tokens)
    for mask, (block, following) in zip(masks, pairwise(model.blocks), strict=True):
        x, product = compiled(block.to_next)(following, x, product, **inputs, block_mask=mask)
    return compiled(model.from_last)(x, product, targets, **inputs, block_mask=last_mask)


def cut_between_layers(
    model: "GPT",
    tokens: Tensor,
    targets: Tensor,
    document_ids: Tensor | None,
    positions: Tensor | None,
    ring: "Ring | None",
) -> Tensor:
    """What CompiledModel returns."""
    x, turn = compiled(model.embed)(tokens, positions)
    inputs = {"document_ids": document_ids, "rotation": turn, "ring": ring}
    for mask, block in zip(model.masks(tokens, ring), model.blocks, strict=True):
        x = compiled(block.forward)(x, **inputs, block_mask=mask)
    return compiled(model.end)(x, targets)


# the same as torch.compiler.disable, which would import the compiler here
@torch._disable_dynamo
def compiled(method: Callable) -> Callable:
    """A method of a module, compiled once for all modules that are alike.

    PyTorch keeps whatever torch.compile has made.
    """
    return partial(compiled_once(method.__func__), method.__self__)


@cache
def compiled_once(function: Callable) -> Callable:
    return torch.compile(function)
