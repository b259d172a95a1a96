"""Whole training runs, each `python -m train` in a process of its own, and their losses."""

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.paper.memory import free_memory
from train.logger import read_metrics


def train(name: str, overrides: list[str]) -> Path:
    """Runs `python -m train name=NAME ...` anew and returns its run folder. Raises ValueError if it fails."""
    command = [sys.executable, "-m", "train", f"name={name}", "checkpoint.resume=never", *overrides]
    folder = Path("runs", name)
    # of an earlier or an interrupted reproduction: nobody else gives a run this name
    shutil.rmtree(folder, ignore_errors=True)
    # the run needs the memory that this process has kept
    free_memory()
    done = subprocess.run(command)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}")
    return folder


def train_losses(folder: Path) -> dict[int, float]:
    """step -> training loss in nats per token."""
    lines = read_metrics(folder / "metrics.jsonl")
    return {line["step"]: line["train_loss"] for line in lines if line.get("train_loss") is not None}


def validation_loss(folder: Path) -> float:
    """The last one, in nats per token."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["val_loss"] for line in lines if line.get("val_loss") is not None][-1]
