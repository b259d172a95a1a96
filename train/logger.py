"""What a run says of itself: a progress line, metrics.jsonl, and wandb."""

import json
from dataclasses import dataclass
from pathlib import Path

import wandb

WANDB_MODES = ("offline", "online", "disabled")


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    # steps between two lines of progress and of metrics.jsonl
    every_steps: int

    def __post_init__(self):
        if self.every_steps < 1:
            raise ValueError(f"logging.every_steps must be at least 1, got {self.every_steps}")


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    # offline: to files beside the run, `wandb sync` uploads them later; online; disabled
    mode: str
    project: str

    def __post_init__(self):
        if self.mode not in WANDB_MODES:
            raise ValueError(f"wandb.mode must be one of {', '.join(WANDB_MODES)}, got {self.mode!r}")


class RunLogger:
    """Writes one run's metrics; only the main process has one.

    start_step: finished steps at the start; later lines of an earlier attempt at them are dropped.
    """

    def __init__(
        self, folder: Path, name: str, steps: int, start_step: int, config: dict, settings: WandbConfig
    ):
        self._steps = steps
        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= start_step] if path.exists() else []
        # rewritten under another name first: a crash leaves the old file or the new one
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
        self._file = path.open("a", buffering=1)
        self._wandb = wandb.init(
            project=settings.project,
            name=name,
            dir=folder,
            mode=settings.mode,
            config=config,
            settings=wandb.Settings(silent=settings.mode != "online", console="off"),
        )

    def log(self, metrics: dict) -> None:
        """Adds one line of metrics, to the file and to wandb, under the same keys."""
        self._file.write(json.dumps(metrics) + "\n")
        self._wandb.log(
            {key: value for key, value in metrics.items() if value is not None}, step=metrics["step"]
        )

    def progress(self, metrics: dict, seconds_left: float) -> None:
        """Prints one line for a person."""
        width = len(str(self._steps))
        parts = [
            f"step {metrics['step']:>{width}}/{self._steps}",
            f"loss {metrics['train_loss']:.4f}",
            f"lr {metrics['learning_rate']:.2e}",
            f"grad {metrics['grad_norm']:.2f}",
            f"{readable(metrics['tokens_per_second'])} tokens/s",
            f"MFU {metrics['mfu']:.1%}" if metrics["mfu"] is not None else "MFU -",
            f"{metrics['peak_memory_allocated_bytes'] / 2**30:.1f} GiB",
            f"{duration(seconds_left)} left",
        ]
        print("  ".join(parts), flush=True)

    def close(self) -> None:
        self._file.close()
        self._wandb.finish()


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl; a half line that a crash left at the end is passed over."""
    metrics = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from None
    return metrics


def readable(value: float) -> str:
    """Three digits and a unit: 987, 12.3K, 4.56M."""
    for unit in ("", "K", "M", "G"):
        if value < 1000 or unit == "G":
            return f"{value:.3g}{unit}" if value < 1000 else f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """42s, 3m05s, 2h07m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
