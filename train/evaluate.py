"""Validation loss over a fixed set of tokens, shared by all processes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.loader import TokenLoader
from model.modes import evaluating
from train.distributed import Processes
from train.overrides import at_least


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    # validation tokens, the same each time and on any number of processes: as many whole sequences as fit
    # into this number and into the validation split, at least one
    tokens: int
    # steps between evaluations; every launch begins with one, and the run's last step is always evaluated; 0
    # for these alone
    every_steps: int

    def __post_init__(self):
        at_least("evaluation.tokens", self.tokens, 1)
        at_least("evaluation.every_steps", self.every_steps, 0)


@torch.no_grad()
def evaluate(model, loader: TokenLoader, sequences: int, processes: Processes, autocast) -> float:
    """The mean cross-entropy in nats over the first `sequences` sequences of the loader, on all ranks.

    Every micro-batch has the loader's shape, so that a compiled model sees no other: one that extends beyond
    the last sequence is padded with copies of it, whose loss is subtracted afterwards. Every rank calls the
    model equally often, even without a sequence of its own, because all ranks gather sharded weights.
    autocast: a context manager factory, the training step's own. The model's mode is restored at the end.
    """
    device = processes.device

    def total_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            loss = model(tokens.to(device), targets.to(device))
        processes.mark()
        return loss.double() * len(tokens)

    rows = loader.sequences_per_step // loader.world_size
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for index in range(math.ceil(sequences / loader.sequences_per_step)):
            tokens, targets = loader.batch(index)
            left = sequences - index * loader.sequences_per_step - loader.rank * rows
            own = min(max(left, 0), rows)
            if 0 < own < rows:
                tokens[own:], targets[own:] = tokens[own - 1], targets[own - 1]
            loss = total_loss(tokens, targets)
            if own:
                total += loss
        if sequences % rows:
            # those of the last round
            copies = total_loss(tokens[-1:].repeat(rows, 1), targets[-1:].repeat(rows, 1))
            if own:
                total -= copies * (rows - own) / rows
    # ranks that share a sequence add the losses of its parts, each a mean over as many tokens
    return processes.mean(total).item() * loader.world_size / sequences
