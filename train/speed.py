"""Predicts how long a training step takes, from a few rates of the card.

A step is matrix products, attention, each layer's small operations beside them, and the memory traffic of
logits and optimizer; the rates of the first three are fitted to measured steps. Communication between
processes is left out. Each sequence counts as one document: other lengths are not known before the data are.
"""

from dataclasses import dataclass

import torch

from model.config import layer_matrices
from model.flops import attended_pairs
from train.config import Config
from train.memory import count_weights, fuses_activation, shard_count

# fitted: bytes moved per logit beside its products, which write its exponential and read it twice; PyTorch's
# loss reads the logits a few times more
LOGIT_BYTES = {True: 4.7, False: 12.5}
# per weight: AdamW reads weight, gradient and two moments and writes three of these; norm and clipping
WEIGHT_BYTES = 40.0
# what a float32 residual stream adds to a layer's small operations, as a share of them
WIDE_STREAM = 0.18
# what an activation fused into the products saves of them
FUSED = {"gelu": 0.30, "swiglu": 0.22}
# the forward pass's share of the time of a layer's small operations and of attention, which recomputation
# repeats
FORWARD_SHARE, ATTENTION_FORWARD_SHARE = 0.33, 2 / 7


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card reaches in a compiled training step."""

    # FLOP/s of the matrix products in bf16 or fp16
    products: float
    # FLOP/s of attention over its pairs (model/flops.py, attended_pairs), forward and backward
    attention: float
    # seconds per layer, token and channel for norms, sums, activations and casts
    layer: float
    # bytes/s of the logits and of the optimizer
    memory: float

    def __str__(self) -> str:
        return (
            f"products {self.products / 1e12:.0f} TFLOP/s, attention {self.attention / 1e12:.0f} TFLOP/s, "
            f"{self.layer * 1e12:.1f} ps a layer, token and channel, memory {self.memory / 1e12:.1f} TB/s"
        )


# docs/training_speed.md says to which rows these are fitted; memory: AdamW's traffic in 1.05 ms
RATES = {"H200": Rates(products=620e12, attention=492e12, layer=27.3e-12, memory=3.3e12)}


def step_seconds(config: Config, rates: Rates, world_size: int = 1) -> float:
    """Seconds of one optimizer step, without evaluation, checkpoints and communication between processes."""
    work = step_work(config, world_size)
    return sum(work[name] / getattr(rates, name) for name in ("products", "attention", "memory")) + (
        work["layer"] * rates.layer
    )


def step_work(config: Config, world_size: int) -> dict[str, float]:
    """What one process does in a step, in the units of Rates: FLOPs, values, bytes."""
    model, tokens = config.model, config.tokens_per_step / world_size
    matrices = sum(rows * columns for rows, columns in layer_matrices(model).values())
    table = model.padded_vocab_size * model.n_embd
    layers = model.n_layer * matrices
    products, attention, small = 6 * (layers + table), 1.0, 1.0
    if not config.low_precision_residual:
        small += WIDE_STREAM
    if config.recompute != "none":
        small += FORWARD_SHARE
    elif fuses_activation(config):
        small -= FUSED[model.mlp]
    if config.recompute == "full":
        products += 2 * (layers - model.n_layer * model.mlp_width * model.n_embd)
        attention += ATTENTION_FORWARD_SHARE
    update = 0
    if config.optim.algorithm == "muon":
        # five iterations of three products with the shorter side
        for sides in layer_matrices(model).values():
            short, long = min(sides), max(sides)
            update += model.n_layer * 5 * (4 * short**2 * long + 2 * short**3)
    pairs = attended_pairs(config.attention, model.n_layer, config.seq_len) / config.seq_len
    return {
        "products": products * tokens + update,
        "attention": attention * 12 * model.n_head * model.head_dim * pairs * tokens,
        "layer": small * model.n_layer * model.n_embd * tokens,
        "memory": LOGIT_BYTES[config.fused_loss] * model.padded_vocab_size * tokens
        + WEIGHT_BYTES * count_weights(model) / shard_count(config, world_size),
    }


def fit_rates(configs: list[Config], seconds: list[float], memory: float) -> Rates:
    """The rates of products, attention and layers that fit these steps with the least relative errors.

    memory: bytes/s over large tensors. Raises ValueError if the steps cannot tell the rates apart.
    """
    names = ("products", "attention", "layer")
    measured = torch.tensor(seconds, dtype=torch.float64)
    work = [step_work(config, 1) for config in configs]
    a = torch.tensor([[row[name] for name in names] for row in work], dtype=torch.float64)
    rest = measured - torch.tensor([row["memory"] / memory for row in work], dtype=torch.float64)
    scale = a.amax(0)
    a = a / scale / measured[:, None]
    if len(configs) < 3 or torch.linalg.matrix_rank(a, rtol=1e-4) < 3:
        raise ValueError(
            "the probe must hold at least two lengths and two models, compiled with flash: measure them as "
            "python -m scripts.plan --help shows, and name all their files in probe"
        )
    x = torch.linalg.lstsq(a, (rest / measured)[:, None]).solution[:, 0] / scale
    if bool((x <= 0).any()):
        raise ValueError(
            f"the probe gives no rates, {dict(zip(names, x.tolist(), strict=True))}: measure more rows, of "
            "other lengths and models"
        )
    return Rates(1 / x[0].item(), 1 / x[1].item(), x[2].item(), memory)
