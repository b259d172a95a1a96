"""Runs a function on several processes that can talk to each other, forked from one that imported torch."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent


def run_together(function: Callable, size: int, meeting: Path, *arguments) -> None:
    """Calls function(rank, *arguments) on `size` processes of one gloo group; any failure fails.

    meeting: a file that does not exist yet, where they find each other.
    """
    # the server of tests/faults.py, if that has started it already
    multiprocessing.get_context("forkserver").set_forkserver_preload(["faults"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    torch.multiprocessing.start_processes(
        _join, (function, size, str(meeting), arguments), nprocs=size, start_method="forkserver"
    )


def _join(rank: int, function: Callable, size: int, meeting: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
