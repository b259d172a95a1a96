"""How fast a run is: step time by phase, tokens per second, model FLOP utilization, memory."""

import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# dense matrix products without sparsity, FLOP/s, from the vendors' datasheets
PEAK_FLOPS = {
    "H200 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 417e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 378e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 417e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12},
    "H800 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 378e12},
    "H800": {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12},
    "A800": {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 183e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "fp32": 60e12},
    "A10G": {"bf16": 70e12, "fp16": 70e12, "fp32": 35e12},
    "V100 PCIE": {"fp16": 112e12},
    "V100 SXM2": {"fp16": 125e12},
    "V100 SXM3": {"fp16": 125e12},
    "T4": {"fp16": 65e12},
}

PHASES = ("data", "forward_backward", "optimizer")
# of this process on Linux: what it holds, and where a 5 sets its peak back (proc(5))
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# whether this process has already begun a run
_has_launched = False


def peak_flops(device_name: str, precision: str) -> float | None:
    """The card's peak matrix FLOP/s in this precision; None for a MIG slice and for what the table lacks.

    For fp32 it is TF32's rate if the card has it, because train/build.py switches TF32 on.
    """
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        # a slice of the card has fewer matrix units, by a share that the table does not know
        return None
    for card, rates in PEAK_FLOPS.items():
        if all(word in words for word in card.split()):
            return rates.get(precision)
    return None


def flop_utilization(
    flops_per_token: float, tokens_per_second_per_gpu: float, precision: str, device: torch.device
) -> float | None:
    """The share of the card's peak that these FLOPs take; None for a card of unknown peak."""
    peak = peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return None if peak is None else tokens_per_second_per_gpu * flops_per_token / peak


class Stopwatch:
    """Seconds from its creation or the last start() to seconds(); on a GPU until all queued work is done."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.start()

    def start(self) -> None:
        self._start = mark(self._on_gpu)

    def seconds(self) -> float:
        return between(self._start, mark(self._on_gpu))


class RunClock:
    """Wall-clock time that a launch takes beside its steps, for its summary.

    launched: what begin_launch returned. Call finish_first_step() behind the launch's first step, before
    anything else is done, and finish_step() at the end of each. When a run goes back to a checkpoint, the
    clock goes on.
    """

    def __init__(self, device: torch.device, launched: float):
        self._device = device
        self._launched = launched
        self._steps = 0
        self._began = time.perf_counter()
        self._beside = {"evaluation_seconds": 0.0, "checkpoint_seconds": 0.0}
        self._first_step_seconds = self._first_end = self._last_end = None

    def elapsed(self) -> float:
        """Seconds since this clock was created."""
        return time.perf_counter() - self._began

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Adds the seconds that the body takes, on the device's clock, to those of this name."""
        watch = Stopwatch(self._device)
        yield
        self._beside[name] += watch.seconds()

    def finish_first_step(self) -> None:
        """Waits for the device; does nothing for the first step of a later attempt."""
        if self._first_step_seconds is None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._first_step_seconds = time.perf_counter() - self._launched

    def finish_step(self) -> None:
        self._last_end = time.perf_counter()
        if self._steps == 0:
            self._first_end = self._last_end
        self._steps += 1

    def summary(self) -> dict[str, float | None]:
        """The clock's entries of the summary.

        first_step_seconds: from the launch's beginning to the end of its first step, with imports, data, the
        first evaluation and compilation. wall_step_ms: mean from step to step after that, everything
        included; None with fewer than two. evaluation_seconds and checkpoint_seconds: totals, of a checkpoint
        only what training waits for.
        """
        wall = (self._last_end - self._first_end) / (self._steps - 1) * 1000 if self._steps > 1 else None
        return {"first_step_seconds": self._first_step_seconds, "wall_step_ms": wall, **self._beside}


def begin_launch() -> float:
    """When this launch began, by time.perf_counter: with its process, or now for later runs of --multirun."""
    global _has_launched
    now = time.perf_counter()
    began = now if _has_launched else now - process_seconds()
    _has_launched = True
    return began


def process_seconds() -> float:
    """Seconds since this process began, before its first import."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    # the process's start, in clock ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class StepTimer:
    """Splits training steps into phases without waiting for the device.

    Call start() at the beginning of a step and finish(phase) at the end of each phase; seconds() gives
    the mean of each phase and of the step since the last call. On a GPU the marks are events in its
    stream, read only then; on the CPU they are clock readings.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._steps: list[list[torch.cuda.Event | float]] = []

    def start(self) -> None:
        self._steps.append([mark(self._on_gpu)])

    def finish(self, phase: str) -> None:
        marks = self._steps[-1]
        assert phase == PHASES[len(marks) - 1], f"{phase} out of order"
        marks.append(mark(self._on_gpu))

    def seconds(self) -> dict[str, float]:
        """{"step_seconds", "data_seconds", ...}: means over the steps since the last call."""
        steps, self._steps = self._steps, []
        mean = {
            f"{phase}_seconds": sum(between(m[i], m[i + 1]) for m in steps) / len(steps)
            for i, phase in enumerate(PHASES)
        }
        return {"step_seconds": sum(mean.values()), **mean}


def mark(on_gpu: bool) -> torch.cuda.Event | float:
    """Now, on the clock of the device: an event in its stream, or a clock reading."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start, end) -> float:
    """Seconds from one mark to another, for which it waits."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) at their peaks; on the CPU both are the process's peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    resident = peak_resident_bytes()
    return resident, resident


def peak_resident_bytes() -> int:
    """The most memory that this process has held since it began, or since reset_peak_memory."""
    if STATUS.exists():
        (kilobytes,) = re.findall(rb"^VmHWM:\s+(\d+) kB$", STATUS.read_bytes(), re.MULTILINE)
        return int(kilobytes) * 1024
    # without /proc this is all there is; it counts what the process was forked from, in bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Has peak_memory_bytes count from now on: by --multirun an earlier run may have had the same process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # a container may forbid it
    with suppress(OSError):
        RESET.write_bytes(b"5")
