"""Checkpoints: written whole or not at all, read without running code."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

FORMAT_VERSION = 1
# what a run may not change while it goes on: the weights' shapes, then the stream of tokens
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "vocab_size", "max_seq_len")
STREAM_KEYS = ("seed", "seq_len", "tokens_per_step")
# these two change how data is prepared, not what it is
FREE_DATA_KEYS = ("workers", "folder")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    # steps between checkpoints; the last step is always saved; 0 for the last one only
    every_steps: int
    # older checkpoints of this run are removed, the newest `keep` stay
    keep: int
    # auto: continue from the run's newest checkpoint if there is one; never: start anew, refuse a folder
    # that holds a run; otherwise the path of a checkpoint to continue from
    resume: str

    def __post_init__(self):
        if self.every_steps < 0:
            raise ValueError(f"checkpoint.every_steps must be at least 0, got {self.every_steps}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")
        if self.resume not in ("auto", "never") and not Path(self.resume).is_file():
            raise ValueError(
                f"checkpoint.resume must be auto, never or a checkpoint file, got {self.resume!r}: "
                "no such file"
            )


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: dict,
    keep: int,
) -> Path:
    """Writes folder/step_<step>.pt after `step` finished steps, then removes all but the newest `keep`.

    config: the run's configuration as nested dictionaries of plain values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    temporary = path.with_suffix(".partial")
    state = {
        "format": FORMAT_VERSION,
        "step": step,
        "config": config,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(folder.glob("step_*.pt"))


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint to continue from, or None for a new run.

    Raises ValueError for resume=never in a folder that holds a run.
    """
    if resume not in ("auto", "never"):
        return Path(resume)
    found = list_checkpoints(folder)
    if found and resume == "never":
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds {len(found)} checkpoints: "
            "choose another name=, or checkpoint.resume=auto to continue"
        )
    return found[-1] if found else None


def read_checkpoint(path: Path) -> dict:
    """The state that save_checkpoint wrote, on the CPU. Raises ValueError for anything else."""
    try:
        # mapped: weights are copied once, to where they go
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such checkpoint") from None
    except Exception as error:
        raise ValueError(
            f"{path} is not a readable checkpoint ({type(error).__name__}): it may be truncated or of "
            "another program; remove it to continue from the one before"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a nanoflash checkpoint of format {FORMAT_VERSION}")
    return state


def check_fits(state: dict, path: Path, config: dict, *, same_run: bool) -> None:
    """Raises ValueError that names each key in which a checkpoint differs from the configuration.

    Always compared: the weights' shapes and the tokenizer. same_run compares what fixes the stream of
    tokens too: a run that goes on by itself must not change it unnoticed.
    """
    saved = state["config"]
    compared = [("model", key) for key in MODEL_KEYS] + [("data", "tokenizer")]
    if same_run:
        compared += [("", key) for key in STREAM_KEYS]
        compared += [("data", key) for key in config["data"] if key not in (*FREE_DATA_KEYS, "tokenizer")]
    differences = []
    for group, key in compared:
        old = (saved[group] if group else saved).get(key)
        new = (config[group] if group else config)[key]
        if old != new:
            name = f"{group}.{key}" if group else key
            differences.append(f"{name} is {old} in the checkpoint and {new} in the configuration")
    if differences:
        way_out = "choose another name= for a new run, or the checkpoint's own values"
        if same_run:
            way_out += f", or checkpoint.resume={path} to go on with other data on purpose"
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences)}: {way_out}")
