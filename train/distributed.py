"""One code path for one process and for many: which process this is, and how all of them agree."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.restarts import gone, is_of_system, was_refused

Value = TypeVar("Value")

# rank 0 may tokenize a large corpus while the others wait
PREPARATION_TIMEOUT = timedelta(hours=24)
# torchrun starts all processes at once, but one host may import from a slower disk than another
JOIN_SECONDS = 600.0
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(slots=True)
class Processes:
    """The processes of this run, as torchrun numbers them; a single process is rank 0 of 1."""

    rank: int
    world_size: int
    device: torch.device
    # a dictionary in torchrun's own process, which all processes can read and write
    store: dist.Store
    # a CPU group whose timeout outlasts data preparation; None for a single process
    patient_group: dist.ProcessGroup | None
    # signs of progress, for train/watchdog.py: the last finished step, the marks passed, and the pieces done
    # of work that not every process has
    step: int = 0
    marks: int = 0
    pieces: int = 0
    _background_group: dist.ProcessGroup | None = None

    @property
    def background_group(self) -> dist.ProcessGroup | None:
        """A CPU group whose messages cannot mix with those of training; None for a single process.

        The first use creates it, in which every process must take part.
        """
        if self._background_group is None and self.world_size > 1:
            self._background_group = dist.new_group(backend="gloo")
        return self._background_group

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mark(self) -> None:
        """Shows that this process makes progress; every process passes the same marks in the same order."""
        self.marks += 1

    def mark_piece(self) -> None:
        """Shows progress between two marks, such as the next piece of a file that rank 0 alone reads."""
        self.pieces += 1

    def mean(self, value: Tensor) -> Tensor:
        """The average over the processes of a tensor that each of them holds."""
        self.mark()
        if self.world_size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            value = value / self.world_size
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process; the answer is the same on all of them."""
        self.mark()
        if self.world_size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.patient_group)
        return bool(flags)

    def from_main(self, function: Callable[[], Value]) -> Value:
        """What the function returns on rank 0, the only one that calls it.

        Raises, on rank 0, the function's ValueError or OSError, and on the others a ValueError with its text:
        otherwise they would wait for rank 0, and bury its one line under errors about a lost connection.
        """
        if self.world_size == 1:
            return function()
        value = error = None
        if self.is_main:
            try:
                value = function()
            except (ValueError, OSError) as raised:
                error = raised
        # rank 0 behind its work, the others before they wait: the watchdog blames who has passed fewer marks
        self.mark()
        outcome = [value, error and str(error), is_of_system(error)]
        dist.broadcast_object_list(outcome, group=self.patient_group)
        value, reason, of_system = outcome
        if error is not None:
            raise error
        if reason is not None:
            # the cause lets every rank judge alike whether the error would recur
            raise ValueError(reason) from (OSError(reason) if of_system else None)
        return value

    def from_all(self, value: Value) -> list[Value]:
        """What each process holds, in the order of their ranks."""
        self.mark()
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.patient_group)
        return values

    def main_first(self, function: Callable[[], Value]) -> Value:
        """What the function returns, which rank 0 calls first: it does the work, the rest find it done."""
        value = self.from_main(function)
        return value if self.is_main else function()

    def barrier(self) -> None:
        self.mark()
        if self.world_size > 1:
            dist.barrier(group=self.patient_group)


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Joins the process group that torchrun describes in the environment, and leaves it at the end.

    device: "cuda" (NCCL, one GPU per process) or "cpu" (gloo). Raises ValueError if this host starts more
    processes than it has GPUs, or if another process was refused; TimeoutError if processes do not join.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own_device = torch.device(device)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device=cuda, but torch sees no GPU: use device=cpu where it is an argument")
        # every process checks this, not only those without a GPU: the rest would wait for them
        n_here, n_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if n_here > n_gpus:
            raise ValueError(
                f"{n_here} processes on a host with {n_gpus} GPUs: use --nproc-per-node={n_gpus}"
            )
        own_device = torch.device("cuda", local_rank)
        _keep_memory_whole()
        torch.cuda.set_device(own_device)
    if world_size == 1:
        yield Processes(rank, world_size, own_device, dist.HashStore(), None)
        return
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = _fresh_store(store, rank, world_size)
    backend = "nccl" if device == "cuda" else "gloo"
    device_id = own_device if device == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)
    try:
        patient_group = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        own_store = dist.PrefixStore("nanoflash", store)
        yield Processes(rank, world_size, own_device, own_store, patient_group)
    finally:
        dist.destroy_process_group()


def _keep_memory_whole() -> None:
    """Has PyTorch's allocator grow its segments, unless the user set it up; call it before any allocation.

    With segments of fixed sizes a step of 119 GiB ran three times and ran out of 140 GiB at the fourth; with
    growing ones it ran on (docs/long_context.md). They cost no speed.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of torchrun's store that belongs to this start of the processes alone.

    torchrun keeps one store across --max-restarts (torch 2.11 to 2.13; TORCHELASTIC_RESTART_COUNT differs
    between nodes), where restarted processes would find the addresses of dead ones. So rank 0 draws a random
    name and gives it to each process under a key that this process alone has drawn; no process goes on before
    all have it. Raises as join_processes.
    """
    if rank == 0:
        name, unconfirmed = secrets.token_hex(8), set(range(1, world_size))

        def all_confirmed() -> bool:
            for other in list(unconfirmed):
                if store.check([f"ask/{other}"]):
                    # the question may be a dead process's: read it again until the answer is confirmed
                    store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
                if store.check([f"confirmed/{name}/{other}"]):
                    unconfirmed.remove(other)
            return not unconfirmed

        _wait(all_confirmed, lambda: f"rank {', '.join(map(str, sorted(unconfirmed)))} did not join")
        store.set(f"joined/{name}", "")
    else:
        question = secrets.token_hex(8)
        store.set(f"ask/{rank}", question)
        _wait(lambda: store.check([f"answer/{question}"]), lambda: "rank 0 did not join")
        name = store.get(f"answer/{question}").decode()
        store.set(f"confirmed/{name}/{rank}", "")
        _wait(lambda: store.check([f"joined/{name}"]), lambda: "others, which rank 0 names, did not join")
    return dist.PrefixStore(name, store)


def _wait(sign: Callable[[], bool], missing: Callable[[], str]) -> None:
    """Waits until sign() is true. missing: names whom it waits for, for the error.

    Raises ValueError if another process was refused and will never join, TimeoutError after JOIN_SECONDS, and
    ConnectionError if torchrun's store is gone.
    """
    started = looked = time.monotonic()
    try:
        while not sign():
            now = time.monotonic()
            if now - looked > SECONDS_BETWEEN_LOOKS:
                looked = now
                if was_refused():
                    raise ValueError(
                        "another process of this run was refused: make the change that its error asks for, "
                        "on its host, and start torchrun again"
                    )
            if now - started > JOIN_SECONDS:
                raise TimeoutError(
                    f"{missing()} within {JOIN_SECONDS:g} seconds: see what its host says; the same command "
                    "goes on"
                )
            time.sleep(0.01)
    except dist.DistError as error:
        raise gone(error) from error
