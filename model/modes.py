"""The mode of a model, training or not, which each of its parts has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from torch import nn

# by model: how many contexts are open, and the modes of its parts from before the first of them
OPEN: dict[nn.Module, tuple[int, dict[nn.Module, bool]]] = {}
# entered again if the collector, within it, ends a stream that was left
LOCK = RLock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which no part of the model is in training mode; afterwards each is as it was found.

    Contexts of one model may overlap, in any order and from any thread: the last to end restores the modes.
    """
    with LOCK:
        n_open, modes = OPEN.get(model) or (0, {module: module.training for module in model.modules()})
        OPEN[model] = n_open + 1, modes
        model.eval()
    try:
        yield
    finally:
        with LOCK:
            n_open, modes = OPEN.pop(model)
            if n_open > 1:
                OPEN[model] = n_open - 1, modes
            else:
                # not with train(): a part may have a different mode than the whole
                for module, was_training in modes.items():
                    module.training = was_training
