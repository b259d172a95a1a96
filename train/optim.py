"""The optimizer of each parameter, which parameters decay, and the learning-rate schedule."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from train.logger import counted
from train.muon import MuonAdamW
from train.overrides import one_of

ALGORITHMS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    # adamw; muon: Muon for the matrices of the layers, AdamW for the rest
    algorithm: str
    learning_rate: float
    # the schedule ends at this share of learning_rate
    final_learning_rate_ratio: float
    # cosine: half a cosine down to the end; wsd: warm-up, stable, then linear decay
    schedule: str
    warmup_steps: int
    # wsd only: the share of the steps, at the end, that decays; 0 for none
    decay_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    # Muon only
    momentum: float
    # largest global norm of all gradients; 0 switches clipping off
    gradient_clip: float

    def __post_init__(self):
        one_of("optim.algorithm", self.algorithm, ALGORITHMS)
        one_of("optim.schedule", self.schedule, SCHEDULES)
        for name in ("learning_rate", "weight_decay", "gradient_clip", "warmup_steps"):
            # written so that nan, which fails every comparison, is refused too
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name in ("final_learning_rate_ratio", "decay_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"optim.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("beta1", "beta2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optim.{name} must be in [0, 1), got {getattr(self, name)}")

    def decay_steps(self, steps: int) -> int:
        """How many of the last of `steps` steps decay under wsd."""
        return max(1, round(steps * self.decay_fraction)) if self.decay_fraction else 0

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if wsd would decay before its warm-up is over: the rate would jump."""
        stable_until = steps - self.decay_steps(steps)
        if self.schedule == "wsd" and self.decay_fraction and self.warmup_steps > stable_until:
            fits = f"optim.warmup_steps={stable_until}" + (" or fewer" if stable_until else "")
            raise ValueError(
                f"optim.schedule=wsd: of {counted(steps, 'step')} optim.warmup_steps={self.warmup_steps} "
                f"warm up, and optim.decay_fraction={self.decay_fraction} decays from step "
                f"{stable_until + 1} on: use {fits}, a smaller optim.decay_fraction, or a larger total_tokens"
            )


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer | MuonAdamW:
    """The optimizer of the model's parameters; matrices and embeddings decay, biases and norms do not.

    muon takes the matrices of model.blocks; embeddings, head, biases and norms stay with AdamW, as Muon's
    authors recommend.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = []
    if config.algorithm == "muon":
        matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.ndim == 2]
    taken = set(matrices)
    decaying = [p for p in trained if p.ndim >= 2 and p not in taken]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        # one kernel for all parameters, on the GPU and on the CPU
        "fused": True,
    }
    if not matrices:
        return torch.optim.AdamW(groups, **options)
    group = {
        "params": matrices,
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
    }
    return MuonAdamW(group, groups, **options)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step `step` in 0 .. steps - 1.

    Sources: cosine, Loshchilov and Hutter, arXiv:1608.03983; warmup-stable-decay, Hu et al.,
    arXiv:2404.06395.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_ratio
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if config.decay_fraction == 0.0:
        return peak
    decay_steps = config.decay_steps(steps)
    # the first decaying step is already below the peak, the last one is at the end
    progress = (step - (steps - 1 - decay_steps)) / decay_steps
    return peak + (final - peak) * min(1.0, max(0.0, progress))
