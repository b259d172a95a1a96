"""Result files: measured rows with the card, versions, command and date that they came from."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from train.strict_json import to_json
from train.whole_file import write_whole


def write_result(path: Path, rows: list[dict], n_gpus: int = 1, **facts) -> dict:
    """Writes and returns the rows under "rows", with their provenance.

    facts: what else holds for all rows. Numbers that are not finite are null in the file.
    Call it after each row is measured: a run that is ended early keeps what it has.
    """
    result = {**origin(n_gpus), **facts, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(result, indent=1) + "\n")
    return result


def provenance(n_gpus: int) -> dict:
    """What one needs to repeat a measurement; fields that this machine cannot tell are None.

    n_gpus: that were measured on, 0 if it was a CPU.
    """
    on_gpu = n_gpus > 0 and torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "n_gpus": n_gpus if on_gpu else 0,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        # without the path of Python, which is the machine's own
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        # with -dirty if the tree has changed since; GIT_COMMIT is for a tree copied without its history
        "commit": os.environ.get("GIT_COMMIT")
        or _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"
        ),
    }


@cache
def origin(n_gpus: int) -> dict:
    """The provenance of all results of a process, taken once: writing the first may change the tree."""
    return provenance(n_gpus)


def machine(result: dict) -> str:
    """What a result of write_result was measured on, for a picture or a report."""
    return f"{result['gpu'] or 'CPU'}, torch {result['torch']}, triton {result['triton']}"


def triton_version() -> str | None:
    """Triton's version; None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _output(*command: str) -> str | None:
    """The first line that a command prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
