"""The mode of a model, training or evaluation, which each of its parts has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While entered, no part of the model is in training mode; afterwards each part is as it was before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # not by train(): a part may have another mode than the whole
        for module, was_training in modes.items():
            module.training = was_training
