"""What the processes of a run must have in common, whichever hosts they are on: their code and settings."""

from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from train.config import Config
from train.distributed import Processes
from train.results import triton_version

ROOT = Path(__file__).resolve().parent.parent
# the code of a run; its commit is not compared: a host without git cannot tell it, and it hides local changes
ROOMS = ("kernels", "model", "data", "train")
# may differ: a host may keep its text elsewhere (train/loop.py compares its tokens); only rank 0 uses wandb
OWN = ("data", "wandb")


def refuse_other_code(processes: Processes) -> None:
    """Raises ValueError, on every rank, if any runs other code than rank 0, a library's or ours.

    One host that an update has missed is enough: its weights drift apart from the others'.
    """
    # numpy draws the order of the sequences
    versions = {"torch": str(torch.__version__), "triton": triton_version(), "numpy": np.__version__}
    _refuse_others(versions, processes, "install the same versions on every host")
    digests = {f"the digest of {path.relative_to(ROOT)}": _digest(path) for path in _code()}
    _refuse_others(digests, processes, "give every host the same commit, with the same changes to it")


def refuse_other_settings(config: Config, processes: Processes) -> None:
    """Raises ValueError, on every rank, if any has other settings than rank 0.

    An edit in one host's conf/ is enough: weights drift apart, or processes wait for each other forever.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in OWN}
    way_out = "start every process with the same command and the same conf/"
    _refuse_others(dict(_flat(settings)), processes, way_out)


def _refuse_others(own: dict[str, object], processes: Processes, way_out: str) -> None:
    """Raises ValueError, on every rank, naming a key whose value on some rank differs from rank 0's."""
    first, *others = processes.from_all(own)
    for rank, theirs in enumerate(others, 1):
        differing = [key for key in first | theirs if first.get(key) != theirs.get(key)]
        if differing:
            # name the key `name` last: by default it is made of others
            key = min(differing, key="name".__eq__)
            more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
            raise ValueError(
                f"{key} is {first.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}{more}: {way_out}"
            )


def _code() -> Iterator[Path]:
    """The Python files of a run, always in the same order."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            # an editor's files: .#loop.py, a dangling link by which Emacs locks a file; .ipynb_checkpoints/
            hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
            if path.is_file() and not hidden:
                yield path


def _digest(path: Path) -> str:
    """A digest of a file's content, 8 hexadecimal digits."""
    return blake2b(path.read_bytes(), digest_size=4).hexdigest()


def _flat(settings: dict, group: str = "") -> Iterator[tuple[str, object]]:
    """Every value by its key, such as optim.learning_rate."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{group}{key}.")
        else:
            yield group + key, value
