"""One code path for one process and for many: who am I, and how do the processes agree."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# rank 0 may tokenize a large corpus while the others wait
PREPARATION_TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this run, as torchrun numbers them; a single process is rank 0 of 1."""

    rank: int
    world_size: int
    device: torch.device
    # a group whose patience outlasts data preparation; None for a single process
    patient_group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The average over the processes of a tensor that each of them holds."""
        if self.world_size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            value = value / self.world_size
        return value

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the body, then the others do: the first to come writes, the rest find it done."""
        if not self.is_main:
            dist.barrier(group=self.patient_group)
        yield
        if self.is_main and self.world_size > 1:
            dist.barrier(group=self.patient_group)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.patient_group)


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Joins the process group that torchrun describes in the environment, and leaves it at the end.

    device: "cuda" (NCCL, one GPU a process) or "cpu" (gloo). Raises ValueError if this host starts more
    processes than it has GPUs.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own_device = torch.device(device)
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU, this host has {torch.cuda.device_count()}: "
                f"use --nproc-per-node={torch.cuda.device_count()}"
            )
        own_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(own_device)
    if world_size == 1:
        yield Processes(rank, world_size, own_device, None)
        return
    if device == "cuda":
        dist.init_process_group("nccl", device_id=own_device)
    else:
        dist.init_process_group("gloo")
    try:
        patient_group = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        yield Processes(rank, world_size, own_device, patient_group)
    finally:
        dist.destroy_process_group()
