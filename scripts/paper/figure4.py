"""Figure 4: the training loss of a model is the same with exact attention of any kind."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch

from scripts.paper.report import rows_table
from scripts.paper.runs import train, train_losses, validation_loss
from scripts.paper.training import configure
from scripts.paper.verdict import Verdict, value
from train.logger import counted

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
# the steps before this one are alike in any case
FIRST_STEP = 100


@dataclass
class Sizes:
    implementations: list[str] = field(default_factory=lambda: ["flash", "sdpa", "reference"])
    first_step: int = FIRST_STEP
    # overrides for `python -m train`
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


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    """A row for each run with its curve, and one for each pair of runs with their difference.

    Raises ValueError, before any run, for runs that end before the step from which they are compared.
    """
    curves = {}
    runs = {f"paper-figure4-{name}": name for name in sizes.implementations}
    overrides = {run: [*sizes.overrides, f"attention={name}"] for run, name in runs.items()}
    for words in overrides.values():
        steps = configure(*words).steps
        # the last step always has a line in metrics.jsonl, whichever other steps have one
        if steps < sizes.first_step:
            raise ValueError(
                f"sizes.first_step must be at most the {counted(steps, 'step')} that a run has, got "
                f"{sizes.first_step}: lower it, or raise total_tokens in sizes.overrides"
            )
    for run, folder in train(overrides):
        curves[runs[run]] = train_losses(folder)
        yield {"run": runs[run], "val_loss": validation_loss(folder), "losses": curves[runs[run]]}
    for a, b in combinations(sizes.implementations, 2):
        steps = sorted(step for step in curves[a].keys() & curves[b].keys() if step >= sizes.first_step)
        apart = [abs(curves[a][step] - curves[b][step]) for step in steps]
        row = {"pair": sorted((a, b)), "first_step": sizes.first_step, "steps": len(steps)}
        yield {**row, "mean_difference": mean(apart), "largest_difference": max(apart)}


def judge(rows: list[dict]) -> list[Verdict]:
    rows = [row for row in rows if row.get("first_step", FIRST_STEP) == FIRST_STEP]

    def apart(*pair: str) -> float | None:
        return value(rows, "mean_difference", pair=sorted(pair))

    flash, yardstick = apart("flash", "reference"), apart("sdpa", "reference")
    losses = {name: value(rows, "val_loss", run=name) for name in ("flash", "reference", "sdpa")}
    unit = {"unit": " nats", "at_most": True}

    def at_the_end(a: str, b: str) -> float | None:
        return None if None in (losses[a], losses[b]) else abs(losses[a] - losses[b])

    pytorch = at_the_end("sdpa", "reference")
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
            ours=None if flash is None else at_the_end("flash", "reference"),
            note="" if pytorch is None else f"PyTorch's two attentions end {pytorch:.4f} nats apart",
            **unit,
        ),
    ]


def describe(rows: list[dict]) -> str:
    runs = [row for row in rows if "run" in row]
    pairs = [{**row, "pair": " and ".join(row["pair"])} for row in rows if "pair" in row]
    columns = ("pair", "first_step", "steps", "mean_difference", "largest_difference")
    return f"{rows_table(runs, ('run', 'val_loss'))}\n\n{rows_table(pairs, columns)}"


def draw(rows: list[dict], path: Path) -> None:
    """Draws the training loss of all runs over the steps, and how far the others are from plain PyTorch."""
    from train.plot import save, subplots

    figure, (curve, apart) = subplots(1, 2, figsize=(11, 4))
    curves = {row["run"]: {int(step): x for step, x in row["losses"].items()} for row in rows if "run" in row}
    for index, (name, losses) in enumerate(curves.items()):
        style = {"linewidth": 1, "color": f"C{index}", "label": name}
        curve.plot(losses.keys(), losses.values(), **style)
        if name != "reference" and "reference" in curves:
            steps = sorted(losses.keys() & curves["reference"].keys())
            apart.plot(steps, [losses[step] - curves["reference"][step] for step in steps], **style)
    curve.set_ylabel("training loss, nats per token")
    apart.set_ylabel("the same less reference's")
    for axis in (curve, apart):
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend()
    save(figure, path, dpi=120)
