"""torch.compile of a GPT by its parts, one of each kind however many layers it has."""

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
    """A GPT, compiled.

    For training it is cut behind each product of queries, keys and values, so that the end of one layer and
    the beginning of the next are in one part: the compiler makes one kernel of both, and cut between layers
    a step is 1.5% longer (docs/training_speed.md). Evaluation is cut between layers, which makes fewer kinds
    of parts; so are layers that keep nothing but their input, and shared sequences.

    whole: for training the model is one graph, which takes the compiler longer by each layer, and Python
    less to call.
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
        """The mean cross-entropy in nats, (); the arguments are those of GPT.forward."""
        inputs = tokens, targets, document_ids, positions
        if torch.is_grad_enabled():
            if self.whole is not None:
                return self.whole(*inputs, ring)
            if self.weights.recompute != "full" and ring is None:
                return cut_behind_products(self.weights, *inputs)
        return self.weights(*inputs, ring, part=compiled)


def cut_behind_products(
    model: "GPT", tokens: Tensor, targets: Tensor, document_ids: Tensor | None, positions: Tensor | None
) -> Tensor:
    """The mean cross-entropy in nats, (), by compiled parts."""
    x, turn, product = compiled(model.to_first)(tokens, positions)
    inputs = {"document_ids": document_ids, "rotation": turn}
    *masks, last_mask = model.masks(tokens)
    for mask, (block, following) in zip(masks, pairwise(model.blocks), strict=True):
        x, product = compiled(block.to_next)(following, x, product, **inputs, block_mask=mask)
    return compiled(model.from_last)(x, product, targets, **inputs, block_mask=last_mask)


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
