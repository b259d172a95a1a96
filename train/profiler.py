"""profile=true: the time and memory of a few steps after warm-up, in files for the usual viewers."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from train.terminal import warn

# steps for compilation and filling caches, for the profiler's own warm-up, and to record
SKIPPED, WARMUP, RECORDED = 2, 1, 3
NEEDED = SKIPPED + WARMUP + RECORDED
# allocations and releases in the memory snapshot; three steps of 124M have some 10,000
MEMORY_EVENTS = 1_000_000
# for ui.perfetto.dev or chrome://tracing; for pytorch.org/memory_viz
TRACE, MEMORY = "trace.json.gz", "memory_snapshot.pickle"


class Profiler:
    """While entered, records steps of this process to folder/TRACE, and on a GPU also to folder/MEMORY.

    Call step() at the end of each. Does nothing unless enabled.
    """

    def __init__(self, folder: Path, device: torch.device, *, enabled: bool):
        self._folder = folder
        self._on_gpu = device.type == "cuda"
        self._done = 0
        self._profile = None
        if enabled:
            gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *gpu],
                schedule=schedule(skip_first=SKIPPED, wait=0, warmup=WARMUP, active=RECORDED, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> "Profiler":
        if self._profile:
            self._profile.start()
        return self

    def step(self) -> None:
        if self._profile is None:
            return
        self._done += 1
        if self._on_gpu and self._done == SKIPPED + WARMUP:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
        self._profile.step()

    def __exit__(self, *error) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        if self._done < NEEDED:
            print(f"profile=true: no whole trace, which needs {NEEDED} steps of a launch, got {self._done}")

    def _write(self, finished: profile) -> None:
        # also called when a launch ends during these steps
        if self._done < NEEDED:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
            return
        trace, memory, first = self._folder / TRACE, self._folder / MEMORY, SKIPPED + WARMUP + 1
        with _may_fail(trace):
            finished.export_chrome_trace(str(trace))
            # on a full disk PyTorch's profiler complains, and raises nothing
            with gzip.open(trace) as file:
                if not file.read(1):
                    raise OSError("there was no room")
            print(f"steps {first} to {first + RECORDED - 1} of this launch are in {trace}", flush=True)
        if not self._on_gpu:
            print("there is no memory snapshot of a CPU", flush=True)
            return
        with _may_fail(memory):
            torch.cuda.memory._dump_snapshot(str(memory))
            print(f"their allocations are in {memory}", flush=True)
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _may_fail(path: Path) -> Iterator[None]:
    """While entered, a file that cannot be written is removed and told of, and ends nothing."""
    try:
        yield
    # an archive that was cut short is an EOFError
    except (OSError, EOFError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        warn(f"{path} was not written ({error}): the run goes on without")
