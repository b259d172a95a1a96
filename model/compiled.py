"""torch.compile of a GPT: as one graph for training, by its parts for evaluation."""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from model.gpt import GPT


class CompiledModel(nn.Module):
    """A GPT that is one compiled graph where gradients are wanted, and else one of each kind of part.

    One graph fuses more, which makes a training step 1.5% shorter (docs/training_speed.md), but the compiler
    works through as many layers as the model has. Evaluation is too short to earn that back.
    """

    def __init__(self, weights: "GPT"):
        super().__init__()
        self.weights = weights
        self.whole = torch.compile(weights)

    def forward(self, *inputs, **named_inputs) -> Tensor:
        """What GPT.forward returns for these."""
        if torch.is_grad_enabled():
            return self.whole(*inputs, **named_inputs)
        return self.weights(*inputs, **named_inputs, part=compiled)


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
