"""Bad steps: a loss or gradient norm that is not finite, or far above those of the last steps."""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from torch import Tensor

from train.checkpoint import folders_of, lies_in, reads_on
from train.overrides import one_of
from train.step import record_event
from train.whole_file import write_whole

BAD_STEP_ACTIONS = ("stop", "skip")
LEFT_OUT = "left_out.json"
WAY_OUT = (
    "Lower optim.learning_rate, or with precision=fp16 use bf16, and resume from the last checkpoint, "
    "or use on_bad_step=skip"
)
# rollbacks in a row, without one good step in between
MAX_ROLLBACKS = 10
# steps in a row; fp16 halves its loss scale in each, from 2^16, and 2^-84 is too small for any gradient
MAX_NOT_FINITE = 100
# limits two lists in each checkpoint
LONGEST_WINDOW = 2**20
SPIKE_ACTIONS = ("ignore", "log", "skip", "rollback")


@dataclass(kw_only=True, slots=True)
class SpikeConfig:
    # ignore; log; skip: keep the weights; rollback: return to the last checkpoint, and leave out this batch
    action: str
    # how many standard deviations above the mean of the last `window` steps a loss or norm is a spike
    z_score: float
    window: int

    def __post_init__(self):
        one_of("spikes.action", self.action, SPIKE_ACTIONS)
        if not self.z_score > 0:
            raise ValueError(f"spikes.z_score must be above 0, got {self.z_score}")
        if not 2 <= self.window <= LONGEST_WINDOW:
            raise ValueError(f"spikes.window must be from 2 to {LONGEST_WINDOW}, got {self.window}")


class RollBack(Exception):  # noqa: N818, no error
    """The run must return to its last checkpoint and leave out these batches, the newest last."""

    def __init__(self, left_out: list[int]):
        super().__init__(f"batch {left_out[-1]} is to be left out")
        self.left_out = left_out


class Rollbacks:
    """Counts how often a run went back without a good step in between."""

    def __init__(self):
        self._furthest, self._count = -1, 0

    def add(self, step: int) -> None:
        """Counts a rollback after `step` good steps. Raises ValueError when no end is in sight."""
        self._count = self._count + 1 if step <= self._furthest else 1
        self._furthest = max(self._furthest, step)
        if self._count > MAX_ROLLBACKS:
            raise ValueError(
                f"spikes.action=rollback has left out {self._count} batches without a good step after step "
                f"{self._furthest}: losses have risen for good. Use spikes.action=log or skip, or a larger "
                f"spikes.z_score; {LEFT_OUT} in the run's folder names the batches: of those behind the last "
                "checkpoint remove the ones that are to be read after all"
            )


class StepGuard:
    """Decides which steps may change the weights. Every process decides the same.

    The loss of a step is known before its update; the norm of its gradients only while the next step runs,
    since waiting for it would leave the GPU idle. So the update itself compares the norm with a limit on
    the device (train/step.py, update), and `settle` learns later what it did. Source of the z-score:
    llm.c's outlier detector.
    on_bad_step: "stop" or "skip", for what is not finite. has_scaler: fp16, whose overflows are normal.
    left_out: numbers of the batches that the run leaves out.
    """

    def __init__(
        self, on_bad_step: str, spikes: SpikeConfig, *, has_scaler: bool, left_out: list[int], rank: int
    ):
        self._on_bad_step = on_bad_step
        self._spikes = spikes
        self._has_scaler = has_scaler
        self.left_out = sorted(left_out)
        self._rank = rank
        self._losses: deque[float] = deque(maxlen=spikes.window)
        self._norms: deque[float] = deque(maxlen=spikes.window)
        self._pending: tuple[int, Tensor, Callable, float] | None = None
        self._skipped = 0
        # steps in a row whose gradients were not finite
        self._not_finite = 0

    @property
    def skipped_steps(self) -> int:
        """Steps so far that left the weights as they were."""
        self.settle()
        return self._skipped

    def state(self) -> dict:
        """For a checkpoint: what the next steps' decisions depend on."""
        self.settle()
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skipped": self._skipped,
            "not_finite": self._not_finite,
        }

    def load_state(self, state: dict) -> None:
        # a window shorter than the saved one keeps the newest values
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._skipped = state["skipped"]
        # older checkpoints did not count them
        self._not_finite = state.get("not_finite", 0)

    def batch_number(self, step: int) -> int:
        """The batch of a step: the step's own number, moved past the batches that are left out."""
        return number_of_batch(step, self.left_out)

    def norm_limit(self, step: int, own_loss: float, loss: float) -> float:
        """The gradient norm from which on this step must not change the weights; -inf: it never may.

        own_loss: of this process's part of the batch; loss: the mean over all processes.
        """
        self.settle()
        if not math.isfinite(loss):
            if self._on_bad_step == "stop":
                raise FloatingPointError(
                    f"the loss is {own_loss} on rank {self._rank} ({loss} over all ranks) at step "
                    f"{step + 1}, in batch {self.batch_number(step)}; the weights were not changed. {WAY_OUT}"
                )
            return -math.inf
        limit = self._limit(self._losses)
        self._losses.append(loss)
        if loss >= limit and self._is_refused(step, "loss", loss, limit):
            return -math.inf
        return self._limit(self._norms) if self._spikes.action in ("skip", "rollback") else math.inf

    def add_norm(self, step: int, norm: Tensor, limit: float) -> None:
        """Takes the norm () of the step's gradients, to be read later, and the limit it was compared with."""
        on_host = norm.detach().to("cpu", non_blocking=True)
        self._pending = (step, on_host, record_event(norm.device), limit)

    def settle(self) -> None:
        """Waits for the last norm and judges it."""
        if self._pending is None:
            return
        (step, tensor, arrived, limit), self._pending = self._pending, None
        arrived()
        norm = float(tensor)
        # as the update compared them
        self._skipped += not norm < limit
        self._not_finite = 0 if math.isfinite(norm) else self._not_finite + 1
        if self._not_finite >= MAX_NOT_FINITE:
            raise FloatingPointError(
                f"the gradients of {MAX_NOT_FINITE} steps in a row, up to step {step + 1}, were not finite: "
                "the weights have stood still since. Lower optim.learning_rate, or use precision=bf16 or "
                "fp32, and resume from the last checkpoint"
            )
        if limit == -math.inf:
            return
        if not math.isfinite(norm):
            if self._on_bad_step == "stop" and not self._has_scaler:
                raise FloatingPointError(
                    f"the gradients' norm is {norm} at step {step + 1}, in batch {self.batch_number(step)}; "
                    f"the weights were not changed. {WAY_OUT}"
                )
            return
        usual = self._limit(self._norms)
        self._norms.append(norm)
        if norm >= usual:
            self._is_refused(step, "gradient norm", norm, usual)

    def _limit(self, history: deque[float]) -> float:
        """The value from which on the next one is a spike; infinite until the window is full and varies."""
        if self._spikes.action == "ignore" or len(history) < self._spikes.window:
            return math.inf
        deviation = pstdev(history)
        return fmean(history) + self._spikes.z_score * deviation if deviation else math.inf

    def _is_refused(self, step: int, name: str, value: float, limit: float) -> bool:
        """Reports a spike; True if it must not change the weights. Raises RollBack if that is the action."""
        action, batch = self._spikes.action, self.batch_number(step)
        if self._rank == 0:
            what = f"{name} {value:.4g}, the limit is {limit:.4g}"
            print(f"spike at step {step + 1}, batch {batch}: {what}: {action}", flush=True)
        if action == "rollback":
            raise RollBack([*self.left_out, batch])
        return action == "skip"


def number_of_batch(step: int, left_out: list[int]) -> int:
    """The batch of a step of a run that leaves out these."""
    number = step
    for one in sorted(left_out):
        number += one <= number
    return number


def take_over_left_out(folder: Path, path: Path, info: dict, config: dict, corpus: str) -> list[int]:
    """The numbers of the batches that a run resumed from a checkpoint leaves out; kept in the run's folder.

    They are the checkpoint's if the run continues in its text. If the checkpoint is the run's own, they are
    those in the run's folder, since the run may have gone back to that checkpoint.
    path, info: the checkpoint, and what read_checkpoint returned. corpus: corpus_digest of the text.
    Raises ValueError if steps have another size, in which these batches have no numbers, and if a user has
    changed those that the checkpoint has passed already.
    """
    is_own, left_out = lies_in(path, folder / "checkpoints"), []
    # another run's, if it has left out any
    runs = [folder] if is_own else [place.parent for place in folders_of(path)]
    origin = next((run for run in runs if (run / LEFT_OUT).exists()), runs[0])
    if reads_on(info, config, corpus):
        left_out = info.get("left_out")
        is_own = is_own and (folder / LEFT_OUT).exists()
        # older checkpoints do not record them
        if is_own or left_out is None:
            then, left_out = left_out, read_left_out(origin)
            if then is not None:
                _check_passed(origin / LEFT_OUT, left_out, then, info["step"])
    old, new = info["config"]["tokens_per_step"], config["tokens_per_step"]
    if left_out and old != new:
        raise ValueError(
            f"{path} is of a run that left out the batches {left_out} of {old} tokens, which have no number "
            f"in steps of tokens_per_step={new}: use tokens_per_step={old}, or another seed=, which reads "
            "the text in another order"
        )
    if left_out != read_left_out(folder):
        write_left_out(folder, left_out)
    return left_out


def _check_passed(path: Path, left_out: list[int], then: list[int], step: int) -> None:
    """Raises ValueError unless `left_out` has what `then` has of the batches before the end of step `step`.

    Otherwise each later step would have another batch: some would be read twice and others never.
    """
    first = number_of_batch(step - 1, then) + 1
    passed, passed_then = (sorted(one for one in numbers if one < first) for numbers in (left_out, then))
    if passed != passed_then:
        raise ValueError(
            f"{path} leaves out {passed} of the {first} batches that are behind the checkpoint of step "
            f"{step}, and its run left out {passed_then}: put that back, and change later numbers alone"
        )


def read_left_out(folder: Path) -> list[int]:
    """The numbers of the batches that a run leaves out, from its folder.

    Raises ValueError for a file that holds anything else: a user may have edited it.
    """
    path = folder / LEFT_OUT
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        numbers = json.loads(text)
    except ValueError:
        numbers = None
    if (
        not isinstance(numbers, list)
        or not all(type(number) is int and number >= 0 for number in numbers)
        or len(set(numbers)) < len(numbers)
    ):
        raise ValueError(
            f"{path} must be a list of numbers of batches, each once, such as [7, 3], got "
            f"{text.strip()[:80]!r}: write it so, [] for none"
        )
    return numbers


def write_left_out(folder: Path, left_out: list[int]) -> None:
    """Writes the numbers, whole or not at all: a run that is killed later leaves out the same batches."""
    write_whole(folder / LEFT_OUT, json.dumps(left_out) + "\n")
