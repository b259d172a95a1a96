"""Whole training runs, each `python -m train` in a process of its own, and their losses."""

import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.paper.memory import free_memory
from scripts.side_by_side import places, run_side_by_side
from train.free_name import first_free
from train.logger import read_metrics


def train(runs: dict[str, list[str]]) -> Iterator[tuple[str, Path]]:
    """Runs `python -m train name=NAME ...` afresh with the overrides of each name; yields name and folder.

    A folder of that name, left by an earlier or interrupted reproduction, is set aside. Each run takes one of
    the GPUs that this process sees. Raises ValueError, once all have ended, if any failed.
    """
    folders = {name: Path("runs", name) for name in runs}
    for folder in folders.values():
        if folder.exists():
            set_aside(folder)
    # the runs need the GPU memory that this process still holds
    free_memory()
    start = [sys.executable, "-m", "train", "checkpoint.resume=never"]
    commands = {name: [*start, f"name={name}", *overrides] for name, overrides in runs.items()}
    failed = []
    for name, code, _ in run_side_by_side(commands, places()):
        if code:
            failed.append(f"{' '.join(commands[name])} ended with {code}")
        else:
            yield name, folders[name]
    if failed:
        raise ValueError("; ".join(failed))


def set_aside(folder: Path) -> None:
    """Renames a run's folder to NAME.before-1, or the next free number, and prints the new name."""
    aside = first_free(lambda number: folder.with_name(f"{folder.name}.before-{number}"))
    folder.rename(aside)
    print(f"{folder} is kept as {aside.name}", flush=True)


def train_losses(folder: Path) -> dict[int, float]:
    """step -> training loss in nats per token."""
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["train_loss"] for line in lines if line.get("train_loss") is not None}


def validation_loss(folder: Path) -> float:
    """The last validation loss, in nats per token."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["val_loss"] for line in lines if line.get("val_loss") is not None][-1]
