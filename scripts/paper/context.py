"""What models gain from longer context: losses of the same held-out tokens, and controls."""

from pathlib import Path

import torch
from torch import Tensor

from data.loader import TokenLoader
from model import GPT
from scripts.context import token_losses
from train.step import autocast_context

# tokens that go through the model at once
TOKENS_AT_ONCE = 32768
RESAMPLES = 2000


def held_out_windows(folder: Path, tokenizer: str, length: int, tokens: int) -> Tensor:
    """(n, length + 1) int64: the first validation tokens of a prepared folder, in consecutive windows."""
    loader = TokenLoader(
        folder, split="val", seq_len=length, sequences_per_step=1, seed=0, tokenizer=tokenizer, shuffle=False
    )
    n = max(1, min(tokens // length, loader.sequences_per_epoch))
    windows = []
    for index in range(n):
        inputs, targets = loader.batch(index)
        windows.append(torch.cat([inputs, targets[:, -1:]], 1))
    return torch.cat(windows)


def window_losses(model: GPT, windows: Tensor) -> Tensor:
    """(n, T) float32 on the CPU: the loss of every token but the first of windows (n, T + 1)."""
    device = model.head_weight.device
    precision = "bf16" if device.type == "cuda" else "fp32"
    losses = []
    for part in windows.split(max(1, TOKENS_AT_ONCE // windows.shape[1])):
        part = part.to(device)
        with autocast_context(device.type, precision):
            losses.append(token_losses(model, part[:, :-1], part[:, 1:]).cpu())
    return torch.cat(losses)


def same_token_losses(model: GPT, windows: Tensor, context: int, first: int) -> Tensor:
    """(n, T - first): the tokens from position first on, each with at least context / 2 tokens before it.

    windows: (n, T + 1). The model reads stretches of `context` tokens, one starting every context / 2 tokens,
    and the second half of each is scored. Raises ValueError if first or T is no multiple of context / 2.
    """
    length, half = windows.shape[1] - 1, context // 2
    if first % half or length % half or first < half:
        raise ValueError(f"first={first} and length={length} must be multiples of half the context, {half}")
    parts = []
    for start in range(first - half, length - half, half):
        parts.append(window_losses(model, windows[:, start : start + context + 1])[:, half:])
    return torch.cat(parts, 1)


def foreign_context_losses(model: GPT, windows: Tensor, near: int) -> tuple[float, float, float]:
    """Mean losses of the last near / 2 tokens of a window, read in three contexts.

    In their whole window; in its last `near` tokens alone; and in these, but preceded by the text of a window
    that is half the text away.
    """
    scored = near // 2
    elsewhere = windows.roll(len(windows) // 2, 0)
    mixed = torch.cat([elsewhere[:, : -near - 1], windows[:, -near - 1 :]], 1)
    readings = (windows, windows[:, -near - 1 :], mixed)
    return tuple(window_losses(model, reading)[:, -scored:].mean().item() for reading in readings)


def bootstrap_interval(differences: Tensor) -> tuple[float, float]:
    """The 95% interval of the mean of differences (n,), by resampling."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(differences), (RESAMPLES, len(differences)), generator=generator)
    low, high = differences[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
