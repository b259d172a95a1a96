"""Real runs under real signals, full disks, damaged files and dead processes, against runs without any."""

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import faults
import pytest
from faults import (
    ROOT,
    SMALL,
    Attempt,
    assert_same_run,
    complete,
    kill_at_random,
    newest_step,
    numbers,
    small_config,
    wait_for,
)

from train.checkpoint import list_checkpoints, read_checkpoint
from train.config import Config
from train.interruption import ECHO_SECONDS, EXIT_INTERRUPTED, Interruption
from train.logger import read_metrics
from train.watchdog import EXIT_HANGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    yield
    Attempt.kill_all()


def checkpoint(name: str, step: int) -> Path:
    return Path("runs", name, "checkpoints", f"step_{step:08d}")


def run_until(config, step: int, world_size: int = 1) -> Attempt:
    attempt = Attempt(config, world_size)
    attempt.wait_for(lambda: newest_step(config) >= step)
    return attempt


@pytest.mark.parametrize(
    ("world_size", "kills", "fault", "distributed"),
    [
        (1, 4, faults.no_fault, "ddp"),
        (1, 4, faults.slow_disk, "ddp"),
        (2, 4, faults.slow_disk, "ddp"),
        (2, 2, faults.no_fault, "fsdp"),
    ],
    ids=["1-process", "1-process-in-saves", "2-processes-in-saves", "2-processes-fsdp"],
)
def test_a_run_killed_at_random_moments_ends_bit_for_bit_like_one_that_was_not(
    world_size, kills, fault, distributed
):
    given = f"distributed={distributed}"
    whole, killed = (small_config(name, 100, given) for name in ("whole", "killed"))
    complete(whole, world_size)
    in_a_save = kill_at_random(killed, kills, 1, world_size, fault)
    if fault is faults.slow_disk:
        assert in_a_save > 0, "none of the kills came in the middle of a save"
    assert_same_run("whole", "killed", 100)


def test_four_processes_resume_bit_for_bit_although_ddp_reorders_its_buckets():
    whole, killed = (small_config(name, 12) for name in ("whole", "killed"))
    complete(whole, 4)
    run_until(killed, 5, 4).kill()
    complete(killed, 4)
    assert_same_run("whole", "killed", 12)


def test_other_numbers_of_processes_and_micro_batches_take_the_same_tokens_along_the_same_curve():
    parts = [(1, 512, "ddp"), (2, 128, "fsdp"), (4, 64, "ddp"), (2, 256, "fsdp"), (1, 256, "ddp")]
    faults.assert_elastic(parts, apart=1e-5)


@pytest.mark.parametrize(
    ("number", "world_size"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)]
)
def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(number, world_size):
    whole, stopped = (small_config(name, 60, "checkpoint.every_steps=20") for name in ("whole", "stopped"))
    complete(whole, world_size)
    attempt = run_until(stopped, 20, world_size)
    # one process is told, all stop
    attempt.signal(number, rank=world_size - 1)
    assert attempt.wait() == [EXIT_INTERRUPTED] * world_size
    step = newest_step(stopped)
    assert 20 < step < 60
    assert f"{signal.Signals(number).name}: finishing the step" in attempt.log(world_size - 1)
    assert f"continues after step {step}" in complete(stopped, world_size).log()
    assert_same_run("whole", "stopped", 60)


@pytest.mark.parametrize(
    ("which", "step", "words"),
    [
        (1, 0, "stopped before a step was done; the same command st"),
        (2, 20, "stopped after step 20; the same"),
    ],
)
def test_a_signal_during_an_evaluation_costs_no_step_more(which, step, words):
    config = small_config("run", 30, "checkpoint.every_steps=30")
    attempt = Attempt(config, 2, partial(faults.signal_in_evaluation, who=1, which=which))
    assert attempt.wait() == [EXIT_INTERRUPTED] * 2
    assert newest_step(config) == step
    assert words in attempt.log()
    assert ("continues after step 20" in complete(config, 2).log()) == (step == 20)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_asks_to_save_but_not_behind_nohup(ignored, capfd):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.requested is not ignored
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ("SIGHUP: finishing the step and saving" in capfd.readouterr().err) is not ignored


def test_ctrl_c_while_the_text_is_prepared_ends_with_one_line_and_leaves_nothing():
    given = ["experiment=laptop", "data=pystdlib", "data.workers=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *given],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # a shell starts what it puts into the background with Ctrl-C ignored, these tests too
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=150)[0]
    assert process.returncode == 130, first + rest
    assert "stopped before training began" in rest
    assert "Traceback" not in rest
    assert not any(path.is_file() for path in Path("datasets").rglob("*"))


def test_a_second_signal_ends_the_run_at_once_but_its_echo_does_not():
    config = small_config("run", 100, "hang_seconds=0")
    attempt = Attempt(config, 1, partial(faults.hang, who=0, step=8))
    attempt.wait_for(lambda: "stuck from here on" in attempt.log())
    attempt.signal(signal.SIGTERM)
    attempt.wait_for(lambda: "finishing the step" in attempt.log())
    attempt.signal(signal.SIGTERM)
    attempt.processes[0].join(ECHO_SECONDS + 0.1)
    assert attempt.processes[0].is_alive(), "torchrun and Slurm repeat a signal"
    attempt.signal(signal.SIGTERM)
    assert attempt.wait(5) == [-signal.SIGTERM]
    assert "SIGTERM again: exiting without saving" in attempt.log()
    assert newest_step(config) == 5


def test_processes_with_other_settings_are_refused_before_a_run_begins():
    config = small_config("run", 20)
    attempt = Attempt(config, 2, partial(faults.other_seed, who=1))
    assert attempt.wait() == [1, 1]
    for rank in (0, 1):
        assert "ValueError: seed is 1 on rank 0 and 2 on rank 1: start every process" in attempt.log(rank)
    assert not Path("runs/run").exists()


def test_a_full_disk_costs_checkpoints_but_not_the_run_nor_the_older_checkpoint():
    whole, full = (small_config(name, 20) for name in ("whole", "full"))
    complete(whole)
    run_until(full, 5).kill()
    oldest = {path.name for path in list_checkpoints(Path("runs/full/checkpoints"))}
    attempt = Attempt(full, 1, partial(faults.full_disk, limit=100_000))
    assert attempt.wait() == [1], "the last checkpoint is missing: that is not a success"
    assert "WARNING: the checkpoint of step 20 was not written (rank 0: [Errno 27]" in attempt.log()
    assert f"); the newest checkpoint is {max(oldest)}\n" in attempt.log()
    assert re.search(r"\nvalidation loss \S+ after 20 steps; ", attempt.log()), "it trained to its end"
    assert {path.name for path in Path("runs/full/checkpoints").iterdir()} == oldest
    complete(full)
    assert_same_run("whole", "full", 20)


def test_a_run_none_of_whose_saves_had_room_starts_over_once_there_is_some():
    config = small_config("full", 10)
    attempt = Attempt(config, 1, partial(faults.full_disk, limit=100_000))
    assert attempt.wait() == [1]
    assert "WARNING: the checkpoint of step 10 was not written" in attempt.log()
    assert "\nmetrics " in attempt.log(), "it trained to its end"
    for nothing_there in ("\nsummary ", "\ncheckpoints ", "\nmore text "):
        assert nothing_there not in attempt.log()
    again = complete(config).log()
    assert "starts over; what an attempt without a checkpoint left is in runs/full/attempt_1" in again
    assert "\nmore text " in again
    assert newest_step(config) == 10


def truncate(path: Path) -> None:
    shard = path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    shard = path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)


def remove_the_shard(path: Path) -> None:
    (path / "shard-00000.safetensors").unlink()


def cut_off(path: Path) -> None:
    (path / "checkpoint.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"step_00000012 is damaged: shard-00000.safetensors has"),
        (flip_a_bit, r"step_00000012 is damaged: shard-00000.safetensors has another checksum"),
        (remove_the_shard, r"step_00000012 is damaged: shard-00000.safetensors is missing"),
        (cut_off, r"step_00000012 was never finished: removed"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_skipped_for_the_one_before_and_kept(damage, message):
    complete(small_config("whole", 12))
    # the same, whose run folder is another
    shutil.copytree("runs/whole", "runs/damaged")
    damage(checkpoint("damaged", 12))
    log = complete(small_config("damaged", 12)).log()
    assert message in log
    assert "continues after step 10" in log
    assert_same_run("whole", "damaged", 12)
    if damage is not cut_off:
        assert checkpoint("damaged", 12).with_name("step_00000012.damaged-1").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_unnoticed():
    config = small_config("run", 12)
    complete(config)
    for path in list_checkpoints(Path("runs/run/checkpoints")):
        truncate(path)
    attempt = Attempt(config)
    assert attempt.wait() == [1]
    assert "checkpoints are damaged (named above): move them away to start over" in attempt.log()


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_dead():
    config = small_config("run", 2000)
    first = run_until(config, 5)
    second = Attempt(config)
    assert second.wait() == [1]
    assert f"runs/run is in use by process {first.processes[0].pid} on" in second.log()
    first.kill()
    third = run_until(config, newest_step(config) + 5)
    third.kill()


def test_a_run_that_is_stopped_and_cannot_save_does_not_say_that_it_did():
    config = small_config("full", 2000, "checkpoint.every_steps=0")
    attempt = Attempt(config, 1, partial(faults.full_disk, limit=100_000))
    attempt.wait_for(lambda: "\nstep " in attempt.log())
    attempt.signal(signal.SIGTERM)
    assert attempt.wait() == [1]
    assert "OSError: the checkpoint of the last step, " in attempt.log()


def test_what_rank_0_finds_wrong_ends_every_rank_with_the_same_words():
    def refused(config: Config, words: str) -> None:
        attempt = Attempt(config, 2)
        assert attempt.wait() == [1, 1]
        assert all(f"ValueError: {words}" in attempt.log(rank) for rank in range(2)), attempt.logs()

    refused(small_config("missing", 5, "data.paths=[missing]"), "data.paths names 'missing', which does not")
    damaged = small_config("damaged", 5)
    complete(damaged)
    for path in list_checkpoints(Path("runs/damaged/checkpoints")):
        truncate(path)
    refused(damaged, "runs/damaged/checkpoints: all 1 checkpoints are damaged")
    with Path("runs/damaged/lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        refused(damaged, "runs/damaged is in use by process")


def test_hosts_whose_folders_hold_other_tokens_are_refused_before_a_run_begins():
    attempt = Attempt(small_config("run", 5), 2, faults.own_disk)
    assert attempt.wait() == [1, 1]
    for rank in range(2):
        assert "holds other tokens on some hosts: copy rank 0's folder there, or share it" in attempt.log(
            rank
        )
    assert not list(Path().glob("host_*/runs"))


def test_hosts_that_keep_the_same_text_in_other_places_train_and_go_on():
    for steps in (8, 12):
        complete(small_config("run", steps), 2, faults.own_copy)
    assert [line["step"] for line in read_metrics(Path("runs/run/metrics.jsonl"))][-1] == 12


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (0, ["", "rank 0 did not join", "rank 0 did not join"]),
        (2, ["rank 2 did not join", "others, which rank 0 names, did not join", ""]),
    ],
)
def test_a_rank_that_never_joins_is_named_and_not_waited_for_without_end(absent, words):
    attempt = Attempt(small_config("run", 5), 3, partial(faults.absent, who=absent))
    for rank, expected in enumerate(words):
        if rank != absent:
            attempt.processes[rank].join(60)
            assert attempt.processes[rank].exitcode == 1
            assert f"TimeoutError: {expected} within 2 seconds" in attempt.log(rank)
    attempt.kill()


def test_a_rank_that_hangs_is_named_with_its_last_step_and_ends_the_run():
    config = small_config("run", 100, "hang_seconds=4")
    attempt = Attempt(config, 2, partial(faults.hang, who=1, step=8))
    assert attempt.wait() == [EXIT_HANGS, EXIT_HANGS]
    for rank in (0, 1):
        assert "HANGS: rank 1 (last finished step 8): no progress for 4 seconds" in attempt.log(rank)
    assert "faults.py" in attempt.log(1), "the stack of the rank that hangs is shown"
    assert newest_step(config) == 5


def test_rank_0_is_named_where_it_hangs_behind_the_last_step_and_the_others_wait():
    attempt = Attempt(small_config("run", 5, "hang_seconds=4"), 2, faults.hang_at_the_end)
    # the other may lose its connection before it is told
    assert attempt.wait()[0] == EXIT_HANGS
    assert "HANGS: rank 0 (last finished step 5): no progress for 4 seconds" in attempt.log(0)


def test_a_step_may_take_longer_than_a_hang_if_its_microbatches_do_not():
    # the loss curve at the end, which marks no progress, takes two seconds where the machine has other work
    config = small_config("run", 1, "hang_seconds=4", "tokens_per_microbatch=64", "evaluation.tokens=64")
    attempt = Attempt(config, 1, partial(faults.slow_model, seconds=0.6))
    assert attempt.wait() == [0], attempt.log()
    assert read_metrics(config.folder / "metrics.jsonl")[-1]["step_seconds"] > 4


def test_a_run_that_was_stopped_as_a_whole_and_goes_on_does_not_count_as_one_that_hangs():
    # a slow machine draws the picture in less
    config = small_config("run", 3, "hang_seconds=6", "tokens_per_microbatch=512", "evaluation.tokens=512")
    attempt = Attempt(config, 1, partial(faults.slow_model, seconds=1.0))
    attempt.wait_for(lambda: "\nstep " in attempt.log())
    # inside of the next step, whose last mark the watchdog has seen
    time.sleep(0.4)
    attempt.signal(signal.SIGSTOP)
    time.sleep(6.5)
    attempt.signal(signal.SIGCONT)
    assert attempt.wait() == [0], attempt.log()


def test_a_checkpoint_may_take_longer_to_verify_than_a_hang():
    complete(small_config("run", 5, "hang_seconds=4"), 2)
    # a piece of each process's shard, one after the other
    assert len(read_checkpoint(Path("runs/run/checkpoints/step_00000005"))["shards"]) == 2
    longer = small_config("run", 6, "hang_seconds=4")
    log = complete(longer, 2, partial(faults.slow_reading, seconds=2.5)).log()
    assert "continues after step 5" in log


def test_a_sample_may_take_longer_than_a_hang():
    config = small_config("run", 1, "hang_seconds=6", "sample.tokens=12", "model.max_seq_len=64")
    attempt = Attempt(config, 1, partial(faults.slow_model, seconds=0.7))
    assert attempt.wait() == [0], attempt.log()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_by_the_others(stopped):
    config = small_config("run", 2000, "hang_seconds=4")
    attempt = run_until(config, 5, 2)
    attempt.signal(signal.SIGSTOP, rank=stopped)
    other = 1 - stopped
    attempt.processes[other].join(20)
    assert attempt.processes[other].exitcode == EXIT_HANGS
    assert f"HANGS: rank {stopped} (last finished step " in attempt.log(other)
    assert "stopped, or its host is gone" in attempt.log(other)
    attempt.kill()


def test_under_torchrun_a_worker_that_dies_is_restarted_and_the_run_goes_on():
    # rank 0; where there are GPUs another one
    faults.assert_restarted(0, 20, 80)


# as Slurm's own it starts the command on each of two nodes, and passes signals on to both
SRUN = """
"$@" & nodes=$!
"$@" & nodes="$nodes $!"
trap 'kill -TERM $nodes' TERM
for node in $nodes; do
	while kill -0 $node 2>/dev/null; do
		wait $node
		code=$?
	done
done
exit $code
"""


def test_the_slurm_script_stops_a_run_on_two_nodes_whose_time_is_up_and_puts_it_back_into_the_queue(tmp_path):
    """With stand-ins for Slurm's two commands, and both nodes on this host."""
    complete(small_config("whole", 120), 2)
    (tmp_path / "bin").mkdir()
    for name, lines in {
        "srun": SRUN,
        "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> requeued',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    environment = {
        **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    given = [*SMALL, "name=queued", f"total_tokens={120 * 512}"]
    command = ["bash", str(ROOT / "scripts" / "slurm.sh"), *given]
    config = small_config("queued", 120)
    with open("slurm.log", "w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(lambda: newest_step(config) >= 20, Path("slurm.log").read_text)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(150) != 0
        finally:
            job.kill()
    assert Path("requeued").read_text() == "requeue 7\n"
    assert 20 <= newest_step(config) < 120
    assert "2 processes x 2 micro-batches x" in Path("slurm.log").read_text()
    assert "SIGTERM: finishing the step and saving" in Path("slurm.log").read_text()
    subprocess.run(command, env=environment, check=True, timeout=150, capture_output=True)
    assert Path("requeued").read_text() == "requeue 7\n", "a run that has ended stays out of the queue"
    assert_same_run("whole", "queued", 120)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_it_reaches_the_weights():
    config = small_config("run", 20)
    attempt = Attempt(config, 2, partial(faults.poison, batches=(7,), factor=math.nan, who=1))
    assert attempt.wait() == [1, 1]
    assert (
        "FloatingPointError: the loss is nan on rank 1 (nan over all ranks) at step 8, in batch 7"
        in attempt.log(1)
    )
    own_loss = r"the loss is \d+\.\d+ on rank 0 \(nan over all ranks\) at step 8"
    assert re.search(own_loss, attempt.log(0)), "it is not rank 0 whose numbers are bad"
    assert newest_step(config) == 5
    # without the cause the run goes on
    complete(config, 2)


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradients"])
def test_a_skipped_step_is_left_out_on_all_ranks_and_counted(gradient_only):
    poison = partial(faults.poison, batches=(6, 11), factor=math.inf, gradient_only=gradient_only, who=1)
    config = small_config("run", 20, "on_bad_step=skip", "logging.every_steps=1")
    complete(config, 2, poison)
    counts = [line["skipped_steps"] for line in numbers("run") if line["step"] > 0]
    assert counts == [0] * 6 + [1] * 5 + [2] * 9


def test_the_old_weights_are_gone_before_a_rollback_makes_new_ones():
    config = small_config("run", 30, "spikes.action=rollback", "spikes.window=8", "distributed=fsdp")
    poison = partial(faults.poison, batches=(22,), factor=50.0)
    log = complete(config, 2, partial(faults.watch_weights, fault=poison)).log()
    assert log.index("spike at step 23") < log.index("the old weights are gone")


def test_the_times_of_a_summary_are_those_of_all_attempts():
    config = small_config("run", 30, "spikes.action=rollback", "spikes.window=8")
    fault = partial(faults.poison, batches=(22,), factor=50.0)
    complete(config, 1, partial(faults.slow_evaluation, seconds=0.5, fault=fault))
    [summary] = json.loads(Path("runs/run/summary.json").read_text())["rows"]
    # after 0 and 20 steps, when it goes back to these, and at the end
    assert summary["evaluation_seconds"] > 4 * 0.5


def test_a_loss_that_has_risen_for_good_ends_a_run_that_would_roll_back_for_ever():
    config = small_config("run", 60, "spikes.action=rollback", "spikes.window=8")
    attempt = Attempt(config, 1, partial(faults.poison, batches=tuple(range(22, 100)), factor=50.0))
    assert attempt.wait() == [1]
    assert "has left out 11 batches without a good step after step 22" in attempt.log()
    assert len(json.loads(Path("runs/run/left_out.json").read_text())) == 11
    assert newest_step(config) == 20


def test_a_rollback_before_the_first_checkpoint_says_that_the_run_starts_over():
    config = small_config("run", 15, "spikes.action=rollback", "spikes.window=8", "checkpoint.every_steps=15")
    log = complete(config, 1, partial(faults.poison, batches=(12,), factor=50.0)).log()
    assert log.index("spike at step 13") < log.index("goes back to the start: no checkpoint was saved yet")


def test_batches_left_out_stay_out_of_a_run_that_goes_on_from_another_ones_checkpoint():
    spikes = ["spikes.action=rollback", "spikes.window=8", "spikes.z_score=20", "logging.every_steps=1"]
    complete(small_config("whole", 40, *spikes), 1, partial(faults.poison, batches=(22,), factor=50.0))
    given = ["checkpoint.resume=runs/whole/checkpoints/step_00000035"]
    complete(small_config("second", 40, *spikes, *given))
    assert json.loads(Path("runs/second/left_out.json").read_text()) == [22]
    steps = {line["step"]: line for line in numbers("whole")}
    assert all(line == steps[line["step"]] for line in numbers("second"))
    # and when it goes on from its own
    complete(small_config("second", 45, *spikes, *given))
    assert json.loads(checkpoint("second", 45).joinpath("checkpoint.json").read_text())["left_out"] == [22]


def test_a_signal_stops_a_run_that_rolls_back():
    # back to the step before: it finishes none
    config = small_config("run", 60, "spikes.action=rollback", "spikes.window=8", "checkpoint.every_steps=1")
    fault = partial(faults.poison, batches=tuple(range(22, 100)), factor=50.0)
    attempt = Attempt(config, 1, partial(faults.slow_rollbacks, fault=fault))
    attempt.wait_for(lambda: "rollback" in attempt.log())
    attempt.signal(signal.SIGTERM)
    assert attempt.wait() == [EXIT_INTERRUPTED]
    assert attempt.log().count("rollback\n") < 10
    assert newest_step(config) == 22


def test_a_run_from_a_named_checkpoint_goes_on_when_that_is_gone():
    complete(small_config("first", 10))
    shutil.copytree("runs/first/checkpoints/step_00000010", "named")
    config = small_config("second", 40, "checkpoint.resume=named/")
    attempt = Attempt(config)
    attempt.wait_for(lambda: newest_step(config) >= 15)
    attempt.signal(signal.SIGTERM)
    assert attempt.wait() == [EXIT_INTERRUPTED]
    step = newest_step(config)
    shutil.rmtree("named")
    assert (
        f"continues after step {step}"
        in complete(small_config("second", 40, "checkpoint.resume=named")).log()
    )
    with pytest.raises(
        ValueError, match="must be auto, never or a checkpoint's folder, got 'named': no such"
    ):
        faults.run_training(small_config("third", 40, "checkpoint.resume=named"))


def test_a_run_goes_on_when_the_weights_that_it_started_from_are_gone():
    complete(small_config("base", 10))
    given = ["start.weights=runs/base"]
    attempt = Attempt(small_config("run", 40, *given))
    attempt.wait_for(lambda: newest_step(attempt.config) >= 5)
    attempt.signal(signal.SIGTERM)
    assert attempt.wait() == [EXIT_INTERRUPTED]
    Path("runs/base").rename("elsewhere")
    assert "continues after step" in complete(small_config("run", 40, *given)).log()


def test_a_checkpoint_that_was_cut_off_is_named_and_removed_by_the_next_start():
    config = small_config("run", 10)
    # a step that is not saved again
    left = checkpoint("run", 3)
    left.mkdir(parents=True)
    (left / "shard-00000.safetensors").write_bytes(b"half")
    assert f"{left} was never finished: removed" in complete(config).log()
    assert not left.exists()


# a line every three steps, and one of the tenth because it was the last
@pytest.mark.parametrize(("kept", "lost"), [(10, None), (9, "10 to 10"), (6, "7 to 10"), (-1, "1 to 10")])
def test_a_run_that_goes_on_without_lines_of_its_metrics_says_which_steps_are_lost(kept, lost):
    complete(small_config("run", 10))
    path = Path("runs/run/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= kept))
    log = complete(small_config("run", 20)).log()
    assert "continues after step 10" in log
    assert log.count("metrics.jsonl lacks") == (lost is not None)
    assert lost is None or f"\n{path} lacks steps {lost}: loss curve and summary leave" in f"\n{log}"


def test_a_finished_run_that_is_started_again_keeps_its_measurement():
    config = small_config("run", 10)
    complete(config)
    before = Path("runs/run/summary.json").read_bytes()
    assert "all 10 steps are done already" in complete(config, 2).log()
    assert Path("runs/run/summary.json").read_bytes() == before


def test_gradients_that_are_not_finite_stop_the_run_and_no_checkpoint_holds_them():
    config = small_config("run", 20, "checkpoint.every_steps=1")
    attempt = Attempt(config, 1, partial(faults.poison, batches=(7,), factor=math.nan, gradient_only=True))
    assert attempt.wait() == [1]
    assert "the gradients' norm is nan at step 8, in batch 7; the weights were not changed" in attempt.log()
    assert newest_step(config) == 7


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradients"])
@pytest.mark.parametrize("action", ["log", "skip", "rollback"])
def test_a_spike_is_logged_skipped_or_rolled_back_to_the_last_checkpoint(action, gradient_only):
    spikes = [f"spikes.action={action}", "spikes.window=8", "spikes.z_score=20", "logging.every_steps=1"]
    config = small_config("run", 30, *spikes)
    poison = partial(faults.poison, batches=(22,), factor=50.0, gradient_only=gradient_only)
    log = complete(config, 1, poison).log()
    what = "gradient norm" if gradient_only else "loss"
    assert f"spike at step 23, batch 22: {what}" in log
    assert numbers("run")[-1]["skipped_steps"] == (1 if action == "skip" else 0)
    left_out = Path("runs/run/left_out.json")
    assert left_out.exists() == (action == "rollback")
    if action == "rollback":
        assert "goes back to runs/run/checkpoints/step_00000020" in log
        assert json.loads(left_out.read_text()) == [22]
        assert "continues after step 20" in log
        # the run never sees that batch again: it is one that had 0 .. 21, 23 .. 30
        steps = [line["step"] for line in numbers("run")]
        assert steps == list(range(31))
