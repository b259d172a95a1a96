import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from train import throughput
from train.throughput import (
    RunClock,
    StepTimer,
    Stopwatch,
    begin_launch,
    between,
    flop_utilization,
    peak_flops,
    peak_memory_bytes,
    process_seconds,
    reset_peak_memory,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H800 PCIe", "bf16", 756e12),
        ("NVIDIA H800", "bf16", 989e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "fp16", 362e12),
        ("Tesla T4", "fp16", 65e12),
    ],
)
def test_the_peak_of_a_known_card_is_its_own(name, precision, peak):
    assert peak_flops(name, precision) == peak


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA B9999", "bf16"),
        ("Tesla T4", "bf16"),
        ("", "fp32"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16"),
    ],
)
def test_an_unknown_card_or_rate_and_a_slice_of_a_card_have_no_peak(name, precision):
    assert peak_flops(name, precision) is None


def test_the_timer_splits_a_step_into_its_phases(device):
    timer = StepTimer(device)
    for _ in range(3):
        timer.start()
        timer.finish("data")
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)
        else:
            time.sleep(0.01)
        timer.finish("forward_backward")
        timer.finish("optimizer")
    seconds = timer.seconds()
    assert set(seconds) == {"step_seconds", "data_seconds", "forward_backward_seconds", "optimizer_seconds"}
    assert seconds["forward_backward_seconds"] >= 0.009
    assert seconds["data_seconds"] < 0.005
    parts = seconds["data_seconds"] + seconds["forward_backward_seconds"] + seconds["optimizer_seconds"]
    assert seconds["step_seconds"] == pytest.approx(parts)


def test_the_timer_starts_anew_after_it_was_read(device):
    timer = StepTimer(device)
    for pause in (0.25, 0.0):
        timer.start()
        timer.finish("data")
        time.sleep(pause)
        timer.finish("forward_backward")
        timer.finish("optimizer")
        seconds = timer.seconds()
    # half of the first step's, were it counted again
    assert seconds["step_seconds"] < 0.1


def test_the_stopwatch_counts_the_work_that_was_queued_since_its_start(device):
    watch = Stopwatch(device)
    time.sleep(0.02)
    assert watch.seconds() >= 0.019
    before = time.perf_counter()
    watch.start()
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    else:
        time.sleep(0.01)
    # not those before its start, however slow the machine
    assert 0.009 <= watch.seconds() <= time.perf_counter() - before


def test_a_process_knows_how_long_it_has_run():
    code = "import time; time.sleep(0.2); from train.throughput import process_seconds as f; print(f())"
    before = time.perf_counter()
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    # in ticks of 10 ms
    assert 0.2 <= float(found.stdout) <= time.perf_counter() - before + 0.02


def test_a_launch_is_counted_from_the_start_of_its_process_and_a_later_one_from_its_own(monkeypatch):
    monkeypatch.setattr(throughput, "_has_launched", False)
    time.sleep(0.02)
    seconds = []
    for _ in range(2):
        before = time.perf_counter()
        clock = RunClock(torch.device("cpu"), begin_launch())
        clock.finish_first_step()
        seconds.append(clock.summary()["first_step_seconds"])
    assert seconds[1] <= time.perf_counter() - before
    assert seconds[0] == pytest.approx(process_seconds(), abs=0.5)
    assert seconds[0] > 0.02


def test_the_mean_from_step_to_step_leaves_the_first_out(monkeypatch):
    ends = iter([9.5, 10.0, 14.0, 15.0, 18.0])
    clock = RunClock(torch.device("cpu"), 9.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(ends))
    clock.finish_first_step()
    # an evaluation and a checkpoint may lie in between
    clock.finish_step()
    assert clock.summary()["wall_step_ms"] is None
    for _ in range(3):
        clock.finish_step()
    # the first step of an attempt that goes back to a checkpoint is none of the launch's
    clock.finish_first_step()
    assert clock.summary()["wall_step_ms"] == pytest.approx((18.0 - 10.0) / 3 * 1000)
    assert clock.summary()["first_step_seconds"] == 0.5


def test_peak_memory_covers_a_large_allocation(device):
    block = torch.ones(64 * 2**20 // 4, device=device)
    allocated, reserved = peak_memory_bytes(device)
    assert reserved >= allocated >= block.numel() * 4


def test_peak_memory_of_a_cpu_is_the_process_own_and_that_of_a_run_begins_anew():
    grown = torch.ones(512 * 2**20 // 4)
    peak, _ = peak_memory_bytes(torch.device("cpu"))
    # ru_maxrss of a process is that of the one which started it, if that is larger
    code = "import torch; from train.throughput import peak_memory_bytes; "
    code += "print(peak_memory_bytes(torch.device('cpu'))[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < peak - grown.numel() * 2
    del grown
    reset_peak_memory(torch.device("cpu"))
    assert peak_memory_bytes(torch.device("cpu"))[0] < peak - 256 * 2**20


def test_an_unknown_card_has_no_utilization_and_a_known_one_its_share(monkeypatch):
    device = torch.device("cuda")
    for name, share in (("NVIDIA H200", 0.5), ("NVIDIA B9999", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert flop_utilization(989e6, 0.5e6, "bf16", device) == share
    assert flop_utilization(1e9, 1e6, "bf16", torch.device("cpu")) is None


def test_seconds_are_between_events_that_tell_milliseconds():
    start = SimpleNamespace(elapsed_time=lambda end: 2500.0)
    assert between(start, SimpleNamespace(synchronize=lambda: None)) == 2.5
    assert between(1.0, 3.5) == 2.5
