"""The faults of test_faults.py where they differ on GPUs: other kernels, NCCL in place of gloo."""

import signal
from functools import partial

import faults
import pytest
import torch
from faults import Attempt, assert_same_run, complete, kill_at_random, newest_step, small_config

from train.interruption import EXIT_INTERRUPTED
from train.watchdog import EXIT_HANGS

ON_GPUS = [
    "device=cuda", "precision=bf16", "attention=flash", "fused_loss=true", "model.n_embd=128",
    "deterministic=true",
]  # fmt: skip
# of NCCL and the kernels, compiled once
FIRST_SECONDS = 200.0
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    yield
    Attempt.kill_all()


def need_gpus(n: int) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} GPUs")


@pytest.mark.parametrize(("world_size", "distributed"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_run_killed_at_random_moments_ends_bit_for_bit_like_one_that_was_not(world_size, distributed):
    need_gpus(world_size)
    given = [*ON_GPUS, f"distributed={distributed}"]
    whole, killed = (small_config(name, 120, *given) for name in ("whole", "killed"))
    complete(whole, world_size, seconds=FIRST_SECONDS)
    kill_at_random(killed, 4, 1, world_size)
    assert_same_run("whole", "killed", 120)


def test_a_compiled_and_sharded_run_goes_on_after_a_signal_to_one_rank():
    need_gpus(2)
    given = [*ON_GPUS, "distributed=fsdp", "compile=true", "checkpoint.every_steps=40"]
    whole, stopped = (small_config(name, 200, *given) for name in ("whole", "stopped"))
    complete(whole, 2, seconds=FIRST_SECONDS)
    attempt = Attempt(stopped, 2)
    attempt.wait_for(lambda: newest_step(stopped) >= 40, FIRST_SECONDS)
    attempt.signal(signal.SIGTERM, rank=1)
    assert attempt.wait() == [EXIT_INTERRUPTED] * 2
    step = newest_step(stopped)
    assert 40 < step < 200
    assert f"continues after step {step}" in complete(stopped, 2, seconds=FIRST_SECONDS).log()
    assert_same_run("whole", "stopped", 200)


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_numbers_of_gpus_and_micro_batches_take_the_same_tokens_along_the_same_curve(world_size):
    need_gpus(world_size)
    parts = [(1, 512, "ddp"), (world_size, 128, "fsdp"), (world_size, 64, "ddp"), (1, 256, "ddp")]
    # bf16, and sums in another order
    faults.assert_elastic(parts, 0.01, *ON_GPUS, seconds=FIRST_SECONDS)


def test_a_rank_that_hangs_is_named_although_the_others_wait_inside_nccl():
    need_gpus(2)
    config = small_config("run", 100, "hang_seconds=20", *ON_GPUS)
    attempt = Attempt(config, 2, partial(faults.hang, who=1, step=8))
    assert attempt.wait(FIRST_SECONDS) == [EXIT_HANGS, EXIT_HANGS]
    for rank in (0, 1):
        assert "HANGS: rank 1 (last finished step 8): no progress for 20 seconds" in attempt.log(rank)
    assert newest_step(config) == 5


def test_under_torchrun_a_worker_that_dies_is_restarted_and_the_run_goes_on():
    need_gpus(2)
    faults.assert_restarted(1, 40, 150, *ON_GPUS, seconds=FIRST_SECONDS)
