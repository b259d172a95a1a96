"""The mode of a model, training or not, which each of its parts has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from torch import nn

# by model: how many contexts are open, and the modes of its parts from before the first of them
OPEN: dict[nn.Module, "Modes"] = {}
# entered again if the collector, within it, ends a stream that was left
LOCK = RLock()


class Modes:
    """The modes of a model's parts, and for how many contexts they are kept."""

    def __init__(self, model: nn.Module):
        self.found = {module: module.training for module in model.modules()}
        self.n_open = 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which no part of the model is in training mode; afterwards each is as it was found.

    Contexts of one model may overlap, in any order and from any thread: the last to end restores the modes.
    If train() was called while some were open, as behind a stream that is only half read, those restore
    nothing any more.
    """
    with LOCK:
        modes = OPEN.get(model)
        if modes is None or any(module.training for module in model.modules()):
            modes = Modes(model)
        modes.n_open += 1
        OPEN[model] = modes
        model.eval()
    try:
        yield
    finally:
        with LOCK:
            modes.n_open -= 1
            if modes.n_open == 0 and OPEN.get(model) is modes:
                del OPEN[model]
                # not with train(): a part may have a different mode than the whole
                for module, was_training in modes.found.items():
                    module.training = was_training
