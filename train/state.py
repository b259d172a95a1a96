"""What training steps change, and so what a checkpoint holds: the start of an attempt, new or saved."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model import GPT
from train.bad_steps import StepGuard, take_over_left_out
from train.build import build_weights, set_arithmetic
from train.checkpoint import check_fits, is_saved_by, lies_in, load_tensors, read_checkpoint, run_tensors
from train.config import Config
from train.distributed import Processes
from train.optim import build_optimizer
from train.parallel import shard
from train.report import tell_lost_metrics, tell_other_steps
from train.weights import locate


@dataclass
class TrainingState:
    """Everything that a step changes."""

    weights: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    guard: StepGuard
    # how many steps are behind it
    first_step: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that they have in a checkpoint."""
        return run_tensors(self.weights, self.optimizer)

    def rest(self) -> dict:
        """What is no tensor, as read_checkpoint returns it."""
        return {
            "scaler": self.scaler.state_dict(),
            "guard": self.guard.state(),
            "left_out": self.guard.left_out,
        }

    def restore(self, path: Path, info: dict) -> None:
        """Takes everything from a checkpoint; info: what read_checkpoint returned for it."""
        load_tensors(path, self.weights, self.optimizer)
        if info["scaler"]:
            # empty if the checkpoint's precision needed no loss scale
            self.scaler.load_state_dict(info["scaler"])
        self.guard.load_state(info["guard"])


def build_state(
    config: Config,
    processes: Processes,
    saved: Path | None,
    resume: str,
    left_out: list[int] | None,
    corpus: str,
) -> TrainingState:
    """The state that an attempt begins with, sharded if the configuration says so.

    saved: the checkpoint, None for a new run. resume: as checkpoint.resume. left_out: numbers of the batches
    to leave out; None: those of the checkpoint. corpus: the digest of the text. Raises ValueError for a
    checkpoint of another model, text or place in the schedule.
    """
    set_arithmetic(config)
    start = None
    if config.start.weights and not saved:
        start = processes.from_main(lambda: str(locate(config.start.weights)))
    weights = build_weights(config, processes.device, start, empty=saved is not None)
    if config.distributed == "fsdp" and processes.world_size > 1:
        shard(
            weights,
            processes,
            config.shard_processes,
            compiled=config.compile,
            reshard_after_forward=config.reshard_after_forward,
        )
    optimizer = build_optimizer(weights, config.optim)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=config.precision == "fp16")
    first_step, info = 0, read_checkpoint(saved) if saved else None
    if info:
        # a run that began with another run's checkpoint goes on from its own later ones
        same_run = resume == "auto" or is_saved_by(info, resume)
        # hosts may keep their text in different places: the settings of rank 0 are the run's
        processes.from_main(lambda: check_fits(info, saved, asdict(config), same_run=same_run, corpus=corpus))
        # step * tokens_per_step are the tokens trained: a run counts all its steps in one size
        first_step = config.step_after(info["step"], info["config"]["tokens_per_step"])
        # resolved: checkpoint.resume may name the run's own checkpoint by an absolute path
        is_own = lies_in(saved, config.folder / "checkpoints")
        config.check_first_step(first_step, is_own=is_own)
    if left_out is None:
        left_out = processes.from_main(
            lambda: take_over_left_out(config.folder, saved, info, asdict(config), corpus) if info else []
        )
    guard = StepGuard(
        config.on_bad_step,
        config.spikes,
        has_scaler=scaler.is_enabled(),
        left_out=left_out,
        rank=processes.rank,
    )
    state = TrainingState(weights, optimizer, scaler, guard, first_step)
    if info:
        state.restore(saved, info)
        processes.step = first_step
        processes.from_main(lambda: _tell_of(info, config, first_step, corpus, is_own=is_own))
    return state


def _tell_of(info: dict, config: Config, first_step: int, corpus: str, *, is_own: bool) -> None:
    """Prints what a run that goes on from a checkpoint does otherwise than before."""
    tell_other_steps(config, info, first_step, corpus)
    if is_own:
        tell_lost_metrics(config.folder, info)
