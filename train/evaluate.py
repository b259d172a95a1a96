"""Validation loss over a fixed set of tokens, shared by all processes."""

from dataclasses import dataclass

import torch

from data.loader import TokenLoader
from train.distributed import Processes


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    # validation tokens, the same ones each time: as many whole micro-batches of all processes as fit into
    # this number and into the validation split, at least one
    tokens: int
    # steps between evaluations; the run's last step is always evaluated; 0 for the last one only
    every_steps: int

    def __post_init__(self):
        if self.tokens < 1:
            raise ValueError(f"evaluation.tokens must be at least 1, got {self.tokens}")
        if self.every_steps < 0:
            raise ValueError(f"evaluation.every_steps must be at least 0, got {self.every_steps}")


@torch.no_grad()
def evaluate(model, loader: TokenLoader, batches: int, processes: Processes, autocast) -> float:
    """The mean cross-entropy in nats over the first `batches` batches of the loader, on all ranks.

    autocast: a context manager factory, the training step's own.
    """
    device = processes.device
    was_training = model.training
    model.eval()
    total = torch.zeros((), device=device)
    for index in range(batches):
        tokens, targets = loader.batch(index)
        with autocast():
            total += model(tokens.to(device), targets.to(device)).float()
        processes.mark()
    model.train(was_training)
    return processes.mean(total / batches).item()
