"""Figure 4: the loss of a model in training is the same with exact attention of any kind."""

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch

from scripts.paper.report import rows_table
from scripts.paper.runs import train, train_losses, validation_loss
from scripts.paper.verdict import Verdict, value

TITLE = "Figure 4: the curves of training coincide"
PAPER = """
Validation perplexity of GPT-2 small and medium over 400K steps, Hugging Face and flash: the curves lie on
each other.
"""
HERE = """
GPT-2 small, no dropout, bf16, the same seed and the same real source code in every run, by `python -m train
experiment=same_curve`: flash, PyTorch's fused attention, and plain PyTorch. Two runs that differ in
rounding alone drift apart; so the yardstick is how far PyTorch's two are from each other.
"""
# the first steps are alike in any case
FIRST_STEP = 100


@dataclass
class Sizes:
    implementations: list[str] = field(default_factory=lambda: ["flash", "sdpa", "reference"])
    first_step: int = FIRST_STEP
    # of `python -m train`
    overrides: list[str] = field(default_factory=lambda: ["experiment=same_curve"])


QUICK = {
    "implementations": ["sdpa", "reference"],
    "first_step": 1,
    "overrides": [
        "experiment=laptop",
        "data=text",
        "data.paths=[kernels]",
        "seq_len=32",
        "tokens_per_step=32",
        "tokens_per_microbatch=32",
        "total_tokens=160",
        "evaluation.tokens=32",
        "logging.every_steps=1",
        "wandb.mode=disabled",
        "sample.tokens=0",
    ],
}


def measure(sizes: Sizes, device: torch.device) -> list[dict]:
    """A row for each run with its curve, and one for each pair of runs with their difference."""
    curves, rows = {}, []
    for name in sizes.implementations:
        folder = train(f"paper-figure4-{name}", [*sizes.overrides, f"attention={name}"])
        curves[name] = train_losses(folder)
        rows.append({"run": name, "val_loss": validation_loss(folder), "losses": curves[name]})
    for a, b in combinations(sizes.implementations, 2):
        steps = sorted(step for step in curves[a].keys() & curves[b].keys() if step >= sizes.first_step)
        apart = [abs(curves[a][step] - curves[b][step]) for step in steps]
        row = {"pair": sorted((a, b)), "first_step": sizes.first_step, "steps": len(steps)}
        rows.append({**row, "mean_difference": mean(apart), "largest_difference": max(apart)})
    return rows


def judge(rows: list[dict]) -> list[Verdict]:
    rows = [row for row in rows if row.get("first_step", FIRST_STEP) == FIRST_STEP]

    def apart(*pair: str) -> float | None:
        return value(rows, "mean_difference", pair=sorted(pair))

    flash, yardstick = apart("flash", "reference"), apart("sdpa", "reference")
    losses = {name: value(rows, "val_loss", run=name) for name in ("flash", "reference")}
    unit = {"unit": " nats", "at_most": True}
    return [
        Verdict(
            claim="flash and plain PyTorch: mean difference of training loss from step 100 on",
            paper="none seen",
            gate=0.01,
            ours=flash,
            **unit,
        ),
        Verdict(
            claim="the same over the difference of PyTorch's two attentions",
            paper="not in the paper",
            gate=2.0,
            at_most=True,
            ours=None if flash is None or yardstick is None else flash / yardstick,
        ),
        Verdict(
            claim="flash and plain PyTorch: final validation loss, difference",
            paper="none",
            gate=0.005,
            ours=None
            if None in losses.values() or flash is None
            else abs(losses["flash"] - losses["reference"]),
            **unit,
        ),
    ]


def describe(rows: list[dict]) -> str:
    runs = [row for row in rows if "run" in row]
    pairs = [{**row, "pair": " and ".join(row["pair"])} for row in rows if "pair" in row]
    columns = ("pair", "first_step", "steps", "mean_difference", "largest_difference")
    return f"{rows_table(runs, ('run', 'val_loss'))}\n\n{rows_table(pairs, columns)}"


def draw(rows: list[dict], path: Path) -> None:
    """Training loss over the steps, the runs on each other."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        if "run" in row:
            steps, losses = zip(*((int(step), loss) for step, loss in row["losses"].items()), strict=True)
            axis.plot(steps, losses, linewidth=1, label=row["run"])
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per token")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
