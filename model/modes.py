"""The mode of a model, training or not, which each of its parts has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which no part of the model is in training mode; afterwards each is as it was found."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # not with train(): a part may have a different mode than the whole
        for module, was_training in modes.items():
            module.training = was_training
