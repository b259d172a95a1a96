"""What a run reports while it trains: a progress line, metrics.jsonl, and wandb."""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from train.overrides import at_least, one_of
from train.strict_json import from_json, to_json
from train.terminal import warn
from train.whole_file import write_whole

WANDB_MODES = ("offline", "online", "disabled")
# a file in the run's folder
WANDB_ID = "wandb_id"


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    # steps between two lines of progress and of metrics.jsonl
    every_steps: int

    def __post_init__(self):
        at_least("logging.every_steps", self.every_steps, 1)


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    # offline: to files beside the run, `wandb sync` uploads them later; online; disabled
    mode: str
    project: str

    def __post_init__(self):
        one_of("wandb.mode", self.mode, WANDB_MODES)


class RunLogger:
    """Writes one run's metrics; only the main process has one. What fails here never stops the training.

    start_step: steps finished at the start; lines of later steps, from an earlier attempt, are dropped.
    """

    def __init__(
        self, folder: Path, name: str, steps: int, start_step: int, config: dict, settings: WandbConfig
    ):
        self._steps = steps
        path = folder / "metrics.jsonl"
        found = read_metrics(path) if start_step and path.exists() else []
        kept = [line for line in found if line["step"] <= start_step]
        write_whole(path, "".join(to_json(line) + "\n" for line in kept))
        # the step of the last line, 0 before there is one
        self.newest_step = max((line["step"] for line in kept), default=0)
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._unwritten = b""
        self._wandb = None
        with self._wandb_may_fail():
            self._wandb = _start_wandb(folder, name, config, settings)

    def log(self, metrics: dict) -> None:
        """Adds one line of metrics, to the file and to wandb, under the same keys.

        Numbers that are not finite are null in the file; wandb can show them.
        """
        self._append(to_json(metrics) + "\n")
        self.newest_step = metrics["step"]
        given = {key: value for key, value in metrics.items() if value is not None}
        with self._wandb_may_fail():
            if self._wandb:
                self._wandb.log(given, step=metrics["step"])

    def sync(self) -> None:
        """Brings what is written to the disk, where the checkpoint that follows will be too."""
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, *error) -> None:
        self._append("")
        with suppress(OSError):
            self._file.close()
        if self._unwritten:
            lost = counted(self._unwritten.count(b"\n"), "line")
            warn(f"{self._file.name} lacks its last {lost}, which did not fit on the disk")
        with self._wandb_may_fail():
            if self._wandb:
                self._wandb.finish()

    def _append(self, text: str) -> None:
        """Adds whole lines; those that a full disk refuses are written with the next ones."""
        is_first_failure = not self._unwritten
        self._unwritten += text.encode()
        try:
            if not is_first_failure:
                self._file.truncate(self._size)
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # leave no half lines; a file system that is away refuses even this
            with suppress(OSError):
                self._file.truncate(self._size)
            if is_first_failure:
                warn(f"metrics.jsonl cannot be written ({error}): its lines are kept for later")
            return
        self._size += len(self._unwritten)
        self._unwritten = b""

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        try:
            yield
        # whatever wandb's client raises, the run is worth more than its mirror
        except Exception as error:
            self._wandb = None
            warn(f"wandb failed ({type(error).__name__}: {error}): going on with metrics.jsonl alone")

    def progress(self, metrics: dict, seconds_left: float) -> None:
        """Prints one line of progress."""
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


def _start_wandb(folder: Path, name: str, config: dict, settings: WandbConfig):
    """A wandb run, or None if wandb is disabled; a resumed run folder continues its own."""
    if settings.mode == "disabled":
        return None
    import wandb

    return wandb.init(
        project=settings.project,
        id=_wandb_id(folder),
        resume="allow",
        name=name,
        dir=folder,
        mode=settings.mode,
        config=config,
        settings=wandb.Settings(silent=settings.mode != "online", console="off"),
    )


def _wandb_id(folder: Path) -> str:
    """The id of a run folder's wandb run, kept in it with the folder's name; a new one if there is none.

    A renamed folder goes on as the same run. A copy beside its original becomes another run: its lines would
    be mixed with those of the first.
    """
    path = folder / WANDB_ID
    known, origin = _read_wandb_id(path)
    has_moved = origin not in ("", folder.name)
    is_copy = has_moved and _read_wandb_id(folder.with_name(origin) / WANDB_ID)[0] == known
    # a disk that was once full may have left it empty
    wandb_id = secrets.token_hex(4) if is_copy or not known else known
    if (wandb_id, folder.name) != (known, origin):
        write_whole(path, f"{wandb_id}\n{folder.name}\n")
    return wandb_id


def _read_wandb_id(path: Path) -> tuple[str, str]:
    """The id, and the folder's name when it was last used, which older files do not tell; "" for none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    known, _, origin = text.partition("\n")
    return known.strip(), origin.removesuffix("\n")


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl; a half line that a crash left at the end is skipped.

    A loss or norm that was not finite is None. Raises ValueError, naming the line, for any other that lacks
    the numbers of its step and tokens, or has a loss that is no number.
    """
    metrics = []
    # bytes that are not text are also reported by their line
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = from_json(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is not JSON: {line[:80]!r}; take the line out, whose step is lost"
                ) from None
            continue
        # somebody may have edited the file
        if not _is_of_a_step(found):
            raise ValueError(
                f"{path}, line {number} must be an object with integers step and tokens, and losses that are "
                f"numbers, got {line[:80]!r}: take the line out"
            )
        metrics.append(found)
    return metrics


def _is_of_a_step(found) -> bool:
    if not isinstance(found, dict):
        return False
    counts, losses = ("step", "tokens"), ("train_loss", "val_loss")
    return all(isinstance(found.get(key), int) for key in counts) and all(
        isinstance(found.get(key), int | float | None) for key in losses
    )


def readable(value: float) -> str:
    """Three digits and a unit: 987, 12.3K, 4.56M."""
    # from 999.5 on, three digits would print as 1e+03
    for unit in ("", "K", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G" if value < 999.5 else f"{value:.0f}G"


def counted(number: int, noun: str) -> str:
    """1 process, 2 processes, 1,000 steps."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """42s, 3m05s, 2h07m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
