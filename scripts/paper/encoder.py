"""A classifier of sequences: our GPT's layers without a causal mask, the mean over tokens, a linear head."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.flash_attention import flash_attention
from scripts.paper import baselines
from scripts.paper.sparsity import two_blocks
from scripts.paper.tasks import draw_in_parallel
from scripts.paper.training import configure, gpt_with
from train.config import Config
from train.optim import build_optimizer
from train.step import autocast_context


class Encoder(nn.Module):
    """attention: takes q, k, v (B, T, H, D) and dropout_p, returns (B, T, H, D).

    order: (T,) int64, the order in which the tokens are read, each with the embedding of its own position.
    """

    def __init__(self, config: Config, attention: Callable, n_classes: int):
        super().__init__()
        self.layers = gpt_with(attention, config)
        self.head = nn.Linear(config.model.n_embd, n_classes)
        self.order: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, n_classes) logits of (B, T) int64 tokens."""
        if self.order is not None:
            tokens = tokens[:, self.order]
        return self.head(self.layers.hidden_states(tokens, positions=self.order).mean(1))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, (); targets: (B,) int64."""
        return F.cross_entropy(self(tokens).float(), targets)


def encoder_config(
    seq_len: int, n_layer: int, n_head: int, n_embd: int, vocab_size: int, dropout: float
) -> Config:
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size}
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    # the budgets are not used here, but must be multiples of seq_len
    budgets = [f"tokens_per_step={seq_len}", f"tokens_per_microbatch={seq_len}"]
    return configure(f"seq_len={seq_len}", f"model.dropout={dropout}", *overrides, *budgets)


def attention_function(name: str, seq_len: int, device: torch.device) -> Callable:
    """Full attention by its name in the reports: eager, ours, ours sparse."""
    if name == "eager":
        return partial(baselines.eager, mask=None)
    if name == "ours":
        return partial(flash_attention, causal=False)
    if name == "ours sparse":
        return partial(flash_attention, causal=False, block_mask=two_blocks(seq_len, device))
    raise ValueError(f"attention must be eager, ours or ours sparse, got {name!r}")


def train_classifier(
    model: Encoder,
    config: Config,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    vary: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> dict:
    """Accuracy on test, in percent, and the last loss, after `steps` steps of `optimize`.

    vary: a function of tokens (B, T) and a generator that gives the tokens to train on in their place.
    """

    def batches(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        picks = torch.randint(len(train[1]), (batch,), generator=generator).to(train[1].device)
        tokens = train[0][picks].long()
        return (tokens if vary is None else vary(tokens, generator)), train[1][picks]

    final_loss = optimize(model, config, batches, steps, learning_rate)
    return {"accuracy": accuracy(model, *test, batch), "final_loss": final_loss}


def optimize(
    model: nn.Module,
    config: Config,
    batches: Callable[[torch.Generator], tuple[Tensor, Tensor]],
    steps: int,
    learning_rate: float,
) -> float | None:
    """The last value of model.loss after `steps` steps of AdamW with warm-up and cosine; None after none.

    batches: draws the arguments of model.loss by a generator, whose seed is fixed.
    """
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, config.optim)
    # the schedule divides by the number of its warm-up steps minus one
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=max(11, steps), pct_start=0.1, cycle_momentum=False
    )
    loss = None
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        inputs = batches(generator)
        with autocast(device):
            loss = model.loss(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return None if loss is None else loss.item()


@torch.no_grad()
def accuracy(model: Encoder, tokens: Tensor, targets: Tensor, batch: int) -> float:
    """Percent of the sequences, tokens (n, T), whose likeliest class is their target."""
    model.eval()
    right = 0
    for part, wanted in zip(tokens.split(batch), targets.split(batch), strict=True):
        with autocast(targets.device):
            right += (model(part.long()).argmax(1) == wanted).sum().item()
    return 100 * right / len(targets)


def autocast(device: torch.device):
    """The precision in which accuracies are measured: bf16 on a GPU, float32 on a CPU."""
    return autocast_context(device.type, "bf16" if device.type == "cuda" else "fp32")


def draw_examples(
    task: Callable, examples: int, test_examples: int, device: torch.device
) -> list[list[Tensor]]:
    """Tokens (n, T) and targets (n,) to train on, and others to test on.

    task: as tasks.draw_in_parallel takes it.
    """
    return [
        [torch.from_numpy(x).to(device) for x in draw_in_parallel(task, n, seed)]
        for n, seed in ((examples, 1), (test_examples, 2))
    ]
