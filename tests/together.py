"""Runs a function on several processes that can talk to each other, forked from one that imported torch."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent
# what the server imports before it forks processes, in each of which it would take seconds
IMPORTED = ["faults", "peft", "train.plot", "frozen"]
# an import may ask whether there is a GPU, as transformers does beside flash-attn-4: answer by NVML, since
# no fork survives CUDA
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def run_together(function: Callable, size: int, meeting: Path, *arguments, on_gpus: bool = False) -> None:
    """Calls function(rank, *arguments) on `size` processes of one group; raises if any of them fails.

    meeting: a file that does not exist yet, where they find each other. on_gpus: with NCCL, a GPU for each.
    """
    # this process has a single server, whichever function starts it
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    torch.multiprocessing.start_processes(
        _join, (function, size, str(meeting), arguments, on_gpus), nprocs=size, start_method="forkserver"
    )


def _join(rank: int, function: Callable, size: int, meeting: str, arguments: tuple, on_gpus: bool) -> None:
    torch.set_num_threads(1)
    device_id = torch.device("cuda", rank) if on_gpus else None
    if on_gpus:
        torch.cuda.set_device(device_id)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        device_id=device_id,
    )
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
