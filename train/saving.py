"""Saves checkpoints while training goes on: a copy to host memory, then files written in the background.

Tensors go through torch.distributed.checkpoint, which plans what each process writes and reassembles shards
of any layout; its own file formats are not used, because they hold pickles. See train/checkpoint.py.
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from data.shards import sync_folder
from train.checkpoint import (
    FORMAT_VERSION,
    MARKER,
    PIECE,
    CheckpointConfig,
    find_checkpoint,
    list_checkpoints,
    readable_checkpoints,
    step_folder,
    step_folders,
)
from train.distributed import Processes
from train.free_name import first_free
from train.page_locked import lock_pages, unlock_pages
from train.strict_json import to_json
from train.terminal import warn
from train.whole_file import write_whole

# names of dtypes in safetensors headers
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class CheckpointSaver:
    """Writes a run's checkpoints and removes those that the settings do not keep.

    A save that fails, say on a full disk, is reported: training goes on, and the older checkpoints stay.
    """

    def __init__(self, folder: Path, settings: CheckpointConfig, processes: Processes):
        self._folder = folder
        self._settings = settings
        self._processes = processes
        # copies of the tensors in host memory, reused by each save
        self._host: dict[str, Tensor] = {}
        self._locked: list[int] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._group = processes.background_group
        self._writing: Future | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocates host copies of these tensors in the background, before the first save needs them.

        Creating their pages takes longer than filling them.
        """
        share = _own_share(tensors, self._processes)
        self._writing = self._thread.submit(self._allocate, share)

    def save(self, tensors: dict[str, Tensor], info: dict) -> None:
        """Saves these tensors and info, plain values with the keys "step" and "val_loss", in the background.

        First waits for a previous save that is still running; returns when the tensors may change again.
        Every process must call it.
        """
        self.wait()
        share = _own_share(tensors, self._processes)
        # on the thread that also prepares: an error of the driver then stays with that thread
        has_room = self._thread.submit(self._allocate, share).result()
        # decided together: the others would wait for the part of a process that has no memory
        if self._processes.any(not has_room):
            self._writing = Future()
            self._writing.set_result(False)
            self._report(info["step"], "no memory for a copy on the host, as told above")
            return
        staged = self._stage(share)
        self._writing = self._thread.submit(self._write, staged, {"format": FORMAT_VERSION, **info})

    def wait(self) -> bool:
        """Waits until the last save or preparation is over; True unless it failed."""
        return self._writing is None or self._writing.result()

    def is_busy(self) -> bool:
        """Whether a save or the preparation is still running."""
        return self._writing is not None and not self._writing.done()

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, *error) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            unlock_pages(self._locked)
            self._host, self._locked = {}, []

    def _allocate(self, tensors: dict[str, Tensor]) -> bool:
        """Allocates the copies that are missing; False, with a warning, if there is no memory for them."""
        # torch's own stager (DefaultStager of 2.11) would page-lock the memory again for each save
        missing = {name: tensor for name, tensor in tensors.items() if name not in self._host}
        try:
            copies = {
                name: torch.empty_like(tensor.detach(), device="cpu") for name, tensor in missing.items()
            }
        except RuntimeError as error:
            warn(f"rank {self._processes.rank}: no copies for checkpoints, to be tried again ({error})")
            return False
        if missing and self._processes.device.type == "cuda":
            try:
                # a new thread starts on device 0; only without autograd does to_local give the piece itself
                with torch.cuda.device(self._processes.device), torch.no_grad():
                    self._locked += lock_pages([_local(copy) for copy in copies.values()])
            except (RuntimeError, OSError) as error:
                warn(
                    f"rank {self._processes.rank}: host memory for checkpoints is not locked ({error}), and "
                    "each save will stop training for longer; ulimit -l may be the limit"
                )
        self._host |= copies
        return True

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            _local(self._host[name]).copy_(_local(tensor.detach()), non_blocking=True)
        if self._processes.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return {name: self._host[name] for name in tensors}

    def _write(self, tensors: dict[str, Tensor], info: dict) -> bool:
        path = step_folder(self._folder, info["step"])
        try:
            dcp.save(
                tensors,
                storage_writer=ShardWriter(path, info),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            if not all(isinstance(cause, OSError) for cause in causes.values()):
                raise
            self._report(info["step"], "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))
            if self._processes.is_main and not (path / MARKER).exists():
                # the next save may need its space
                shutil.rmtree(path, ignore_errors=True)
            return False
        if self._processes.is_main:
            self._remove_superfluous(info["step"])
        return True

    def _remove_superfluous(self, step: int) -> None:
        """Removes the checkpoints that are not kept beside that of `step`; warns of those that stay."""
        try:
            found = superfluous_checkpoints(self._folder, self._settings, step)
        # a disk that fails for a moment must not end a run whose newest checkpoint is whole
        except OSError as error:
            warn(f"{self._folder} cannot be read ({error}): older checkpoints stay until the next save")
            return
        for old in found:
            try:
                if old.is_symlink():
                    # somebody has moved the checkpoint and left a link: the copy there is theirs
                    old.unlink()
                    continue
                # the marker first: without it this is no checkpoint, however far the removal gets
                (old / MARKER).unlink()
                shutil.rmtree(old)
            except OSError as error:
                warn(f"{old} was not removed ({error})")

    def _report(self, step: int, reasons: str) -> None:
        """Warns, on rank 0, that a checkpoint was not written."""
        if self._processes.is_main:
            kept = [found.name for found in list_checkpoints(self._folder)]
            warn(
                f"the checkpoint of step {step} was not written ({reasons}); "
                f"{f'the newest checkpoint is {kept[-1]}' if kept else 'there is none yet'}"
            )


class ShardWriter(StorageWriter):
    """Writes each process's part as one safetensors file, and checkpoint.json after all of them.

    safetensors' own writer first copies a whole shard while it holds Python's GIL, which would stop the
    training thread for seconds; here tensors go to the file piece by piece, without the GIL.
    Format: https://huggingface.co/docs/safetensors/index#format, with torch's key for a shard's offsets.
    """

    def __init__(self, path: Path, info: dict):
        self._path = path
        self._info = info

    def prepare_global_plan(self, plans):
        # runs on one process, before any of them writes; a link may lead to a disk that is not mounted
        if (self._path / MARKER).exists() or self._path.is_symlink():
            _set_aside(self._path)
        elif self._path.exists():
            print(f"{self._path} was never finished: writing it again", file=sys.stderr, flush=True)
            shutil.rmtree(self._path)
        self._path.mkdir(parents=True)
        return plans

    def write_data(self, plan, planner) -> torch.futures.Future:
        future = torch.futures.Future()
        if not plan.items:
            future.set_result([])
            return future
        items = {item.index.fqn: item for item in plan.items}
        assert len(items) == len(plan.items), "a process holds one piece of each tensor"
        tensors = {name: planner.resolve_data(item).detach() for name, item in items.items()}
        places = {
            name: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for name, item in items.items()
        }
        header, end = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}}, 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            shape = list(tensor.shape)
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)

        name = f"shard-{self._rank:05d}.safetensors"
        with (self._path / name).open("xb", buffering=0) as file:
            checksum = _write(file, len(text).to_bytes(8, "little") + text, 0)
            for tensor in tensors.values():
                checksum = _write(file, tensor.contiguous().view(-1).view(torch.uint8).numpy(), checksum)
            os.fsync(file.fileno())
            shard = (name, {"bytes": file.tell(), "crc32": checksum})
        future.set_result(
            [WriteResult(item.index, tensors[name].nbytes, shard) for name, item in items.items()]
        )
        return future

    def finish(self, metadata, results: list[list[WriteResult]]) -> None:
        # runs on one process, after all of them have written
        shards = dict(result.storage_data for part in results for result in part)
        write_whole(self._path / MARKER, to_json({**self._info, "shards": shards}, indent=1))
        for folder in (self._path, self._path.parent):
            sync_folder(folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def prepare_local_plan(self, plan):
        return plan

    def reset(self, checkpoint_id=None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


def take_checkpoint(folder: Path, resume: str, mark: Callable[[], None] | None = None) -> Path | None:
    """find_checkpoint for the run that saves in this folder; renames the damaged checkpoints that it skips.

    Under their own names they would be kept in place of intact ones, and be removed in time.
    """
    skipped: list[Path] = []
    found = find_checkpoint(folder, resume, skipped, mark)
    for path in skipped:
        _set_aside(path)
    return found


def superfluous_checkpoints(folder: Path, settings: CheckpointConfig, step: int) -> list[Path]:
    """The checkpoints that the settings do not keep once that of `step` is written.

    Those that cannot be read always stay. So do later ones: the run found them damaged, and went on from an
    earlier one.
    """
    infos = readable_checkpoints(folder)
    found = [path for path, info in infos.items() if info["step"] <= step]
    kept = set(found[-settings.keep_last :])
    if settings.keep_every_steps:
        kept |= {path for path in found if infos[path]["step"] % settings.keep_every_steps == 0}
    rated = [path for path in found if infos[path]["val_loss"] is not None]
    if settings.keep_best:
        # losses compare only on the same tokens, and a resumed run may evaluate on others
        for measured in {_measured_on(infos[path]) for path in rated}:
            alike = [path for path in rated if _measured_on(infos[path]) == measured]
            kept.add(min(alike, key=lambda path: infos[path]["val_loss"]))
    return [path for path in found if path not in kept]


def _measured_on(info: dict) -> tuple:
    """What decides which tokens a checkpoint's validation loss is measured on, and how they are cut."""
    config = info["config"]
    return info.get("corpus"), config.get("seq_len"), config.get("evaluation", {}).get("tokens")


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished checkpoints of interrupted saves, and names them; no save may be running."""
    for path in step_folders(folder):
        # a link is not made by a save, and may lead to a disk that is not mounted
        if not (path / MARKER).exists() and not path.is_symlink():
            shutil.rmtree(path)
            print(f"{path} was never finished: removed", file=sys.stderr, flush=True)


def _own_share(tensors: dict[str, Tensor], processes: Processes) -> dict[str, Tensor]:
    """What this process saves: its pieces of sharded tensors, its share of those that every process holds."""
    whole = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    # deal them out in turn, the largest first
    whole.sort(key=lambda name: (-tensors[name].numel(), name))
    own = set(whole[processes.rank :: processes.world_size])
    return {name: x for name, x in tensors.items() if isinstance(x, DTensor) or name in own}


def _local(tensor: Tensor) -> Tensor:
    """This process's piece of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _write(file, data, checksum: int) -> int:
    """Writes bytes piece by piece; returns their CRC-32, continued from `checksum`."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        checksum = zlib.crc32(piece, checksum)
        # a disk that fills up first takes a part, and then refuses the rest
        while piece:
            piece = piece[file.write(piece) :]
    return checksum


def _set_aside(path: Path) -> None:
    """Renames a finished checkpoint that is damaged, or whose step is saved again, or a link to one."""
    aside = first_free(lambda number: path.with_name(f"{path.name}.damaged-{number}"))
    path.rename(aside)
    print(f"{path} is kept as {aside.name}", file=sys.stderr, flush=True)
