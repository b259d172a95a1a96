"""LoRA (Hu et al., arXiv:2106.09685): small matrices are trained beside the weights, which stay as they are.

peft puts them beside every matrix of the layers, and merges them into it at the end: what leaves a run (its
sample, its export, and what scripts read from its checkpoints) is a model like any other.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec

from torch import nn

from model import GPT, ModelConfig
from model.config import layer_matrices
from train.overrides import at_least

# the version of peft that the tests run with
VERSION = "0.21.2"


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    # columns of the small matrices; 0: no adapters, all weights are trained
    rank: int
    # what the adapters add is scaled by alpha / rank
    alpha: float
    # also train embeddings, norms and the head, which a longer context needs (LongLoRA, arXiv:2309.12307)
    embeddings_and_norms: bool

    def __post_init__(self):
        at_least("lora.rank", self.rank, 0)
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be above 0 and finite, got {self.alpha}")

    def check_rank(self, model: ModelConfig) -> None:
        """Raises ValueError for adapters as large as the matrices beside them."""
        smallest = min(side for sides in layer_matrices(model).values() for side in sides)
        if self.rank >= smallest:
            raise ValueError(f"lora.rank must be below the {smallest} channels of the model, got {self.rank}")

    def check(self, weights: str | None, algorithm: str) -> None:
        """Raises ValueError for settings of start and optim that adapters cannot be combined with."""
        if self.rank == 0:
            return
        if weights is None:
            raise ValueError(
                f"lora.rank={self.rank} trains beside weights that are there: give start.weights, or use "
                "lora.rank=0"
            )
        if algorithm != "adamw":
            raise ValueError(
                f"lora.rank={self.rank} has no matrix that optim.algorithm={algorithm} is made for: use "
                "optim=adamw"
            )
        self.check_installed()

    def check_installed(self) -> None:
        """Raises ValueError if peft is not installed."""
        if find_spec("peft") is None:
            raise ValueError(f"adapters (lora.rank={self.rank}) need peft: pip install peft=={VERSION}")


def add_adapters(model: GPT, config: LoraConfig) -> None:
    """Freezes the weights and puts adapters, which add nothing yet, beside the matrices of the layers.

    Raises ValueError if peft is not installed.
    """
    config.check_installed()
    # this import takes six seconds, because it imports transformers
    import peft

    # not embeddings, norms or the head
    matrices = [
        name for name, part in model.blocks.named_modules(prefix="blocks") if isinstance(part, nn.Linear)
    ]
    adapters = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=matrices)
    peft.inject_adapter_in_model(adapters, model)
    if config.embeddings_and_norms:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".base_layer." not in name)


def merge_adapters(model: GPT) -> None:
    """Adds the adapters to their matrices: the model is as before `add_adapters`, with other weights."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model.requires_grad_(True)
