"""Faults for training runs: real processes of a small run, killed, stopped, or given a slow or full disk.

Processes are forked from one that has imported everything, so that an attempt takes half a second.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch._dynamo  # noqa: F401, the optimizer imports it, in every attempt if not here
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from together import IMPORTED

import data.loader
import model.gpt
import train.checkpoint
import train.distributed
import train.loop
import train.saving
import train.state
from tests import garbage
from train.checkpoint import list_checkpoints, read_checkpoint
from train.config import Config, parse
from train.interruption import EXIT_INTERRUPTED, Interrupted
from train.logger import read_metrics

ROOT = Path(__file__).resolve().parent.parent
# a model of one layer on bytes: five milliseconds a step; dropout, to show that its draws are repeated
SMALL = [
    "experiment=laptop", "data=text", "data.paths=[corpus]", "data.tokenizer=bytes",
    "data.validation_fraction=0.2", "data.workers=1", "model.vocab_size=257", "model.n_layer=1",
    "model.n_head=2", "model.n_embd=32", "model.dropout=0.1", "seq_len=32", "tokens_per_step=512",
    "tokens_per_microbatch=128", "evaluation.tokens=1024", "evaluation.every_steps=20",
    "checkpoint.every_steps=5", "logging.every_steps=3", "wandb.mode=disabled", "sample.tokens=0",
    "optim.warmup_steps=2", "spikes.action=log", "spikes.window=16",
]  # fmt: skip
# metrics with these words in their names may differ between two equal runs
TIMES = ("seconds", "per_second", "mfu", "memory")


def write_corpus(folder: Path) -> None:
    """A folder of forty small text files."""
    (folder / "corpus").mkdir()
    for index in range(40):
        lines = [f"the number after {n} is {n + 1}" for n in range(index * 20, index * 20 + 20)]
        (folder / "corpus" / f"{index:02}.txt").write_text("\n".join(lines))


def small_config(name: str, steps: int, *overrides: str) -> Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        given = [*SMALL, f"name={name}", f"total_tokens={steps * 512}", *overrides]
        return parse(compose("config", given))


def no_fault(rank: int) -> None:
    pass


def run_training(config: Config) -> float:
    """Trains in this process, without garbage collection of what is imported; the last validation loss."""
    # as conftest.py does; the end of an earlier run has undone it
    garbage.leave_out()
    return train.loop.train(config)


class Attempt:
    """One launch of a run on `world_size` processes; each calls `fault(rank)` before it trains.

    Their output is appended to <name>.<rank>.log in the working directory.
    """

    _started: ClassVar[list["Attempt"]] = []

    def __init__(self, config: Config, world_size: int = 1, fault=no_fault):
        self.config = config
        # as torchrun does: the store outlives the workers
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        # the server that forks the processes has imported this file, and has run nothing else
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(IMPORTED)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
        self.processes = [
            forks.Process(target=_attempt, args=(config, rank, world_size, port, fault, os.getcwd()))
            for rank in range(world_size)
        ]
        # where this attempt's output begins in the logs
        self._starts = [len(self._whole_log(rank)) for rank in range(world_size)]
        for process in self.processes:
            process.start()
        Attempt._started.append(self)

    @classmethod
    def kill_all(cls) -> None:
        """Kills the processes of all attempts, so that none is left behind."""
        while cls._started:
            cls._started.pop().kill()

    def signal(self, number: int, rank: int = 0) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """Ends all processes as a power cut would."""
        for process in self.processes:
            process.kill()
        self.wait()

    def wait(self, seconds: float = 150.0) -> list[int]:
        """The exit code of each rank, minus the signal's number for one that a signal ended."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        assert None not in codes, f"exit codes {codes} after {seconds} s: {self.logs()}"
        return codes

    def log(self, rank: int = 0) -> str:
        """What a rank has printed in this attempt."""
        return self._whole_log(rank)[self._starts[rank] :]

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(len(self.processes)))

    def _whole_log(self, rank: int) -> str:
        path = Path(f"{self.config.name}.{rank}.log")
        return path.read_text() if path.exists() else ""

    def wait_for(self, sign, seconds: float = 150.0) -> None:
        """Waits until sign() is true."""
        wait_for(sign, self.logs, seconds)


def wait_for(sign, log, seconds: float = 150.0) -> None:
    """Waits until sign() is true, or fails with what log() returns."""
    deadline = time.monotonic() + seconds
    while not sign():
        assert time.monotonic() < deadline, f"no sign of it: {log()}"
        time.sleep(0.002)


def two_hosts() -> tuple[tuple[str, int], tuple[str, ...]]:
    """The address at which two agents of torchrun meet, and the options of each, which starts one process.

    Launches that run beside them, as of a second copy of the tests, have another id.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    meeting = (
        "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={secrets.token_hex(8)}"
    )  # fmt: skip
    return (host, port), (*meeting, "--nnodes=2", "--nproc-per-node=1")


def complete(config: Config, world_size: int = 1, fault=no_fault, seconds: float = 120) -> Attempt:
    """Runs to the end, and asserts that every rank succeeds."""
    attempt = Attempt(config, world_size, fault)
    codes = attempt.wait(seconds)
    assert codes == [0] * world_size, f"exit codes {codes}: {attempt.logs()}"
    return attempt


def kill_at_random(config: Config, kills: int, seed: int, world_size: int = 1, fault=no_fault) -> int:
    """Kills a run `kills` times at random moments, then lets it end without the fault.

    Every fourth kill may come while it starts or reads its checkpoint, the others after a first step.
    Returns how many of the kills came in the middle of a save.
    """
    draw = random.Random(seed)
    checkpoints = Path("runs") / config.name / "checkpoints"
    in_a_save = 0
    for kill in range(kills):
        attempt = Attempt(config, world_size, fault)
        # a fast machine must not reach the end: at most four lines of progress, twelve steps, before a kill
        lines = draw.randrange(1, 5)
        latest = time.monotonic() + (draw.uniform(0.0, 1.0) if kill % 4 == 3 else 60.0)
        while attempt.log().count("\nstep ") < lines and time.monotonic() < latest:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.03))
        attempt.kill()
        assert newest_step(config) < config.steps, "it ended before it was killed: give it more steps"
        finished = list_checkpoints(checkpoints)
        in_a_save += any(path not in finished for path in checkpoints.glob("step_*"))
    complete(config, world_size, seconds=600)
    return in_a_save


def _attempt(config: Config, rank: int, world_size: int, port: int, fault, folder: str) -> None:
    os.chdir(folder)
    log = os.open(f"{config.name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(1)
    fault(rank)
    # no clean-up, as in train/__main__.py: nothing may depend on it
    try:
        run_training(config)
        os._exit(0)
    except Interrupted as interrupted:
        print(interrupted)
        os._exit(EXIT_INTERRUPTED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def newest_step(config: Config) -> int:
    found = list_checkpoints(Path("runs") / config.name / "checkpoints")
    return int(found[-1].name.removeprefix("step_")) if found else 0


def final_state(name: str, step: int) -> tuple[dict, dict]:
    """Every tensor of a checkpoint, by key and shard, and its other state."""
    path = Path("runs", name, "checkpoints", f"step_{step:08d}")
    info = read_checkpoint(path)
    tensors = {}
    for shard in info["shards"]:
        for key, value in load_file(path / shard).items():
            tensors[key, shard] = value
    return tensors, {key: info[key] for key in ("step", "val_loss", "scaler", "guard")}


def numbers(name: str) -> list[dict]:
    """The lines of metrics.jsonl without the values that depend on the clock and the machine."""
    lines = read_metrics(Path("runs", name, "metrics.jsonl"))
    return [{k: v for k, v in line.items() if not any(word in k for word in TIMES)} for line in lines]


def assert_same_run(name: str, other: str, step: int) -> None:
    """Asserts that weights, optimizer state, the guard's history and metrics are the same bit for bit."""
    tensors, state = final_state(name, step)
    other_tensors, other_state = final_state(other, step)
    assert tensors.keys() == other_tensors.keys()
    different = [key for key, value in tensors.items() if not torch.equal(value, other_tensors[key])]
    assert not different, f"{len(different)} of {len(tensors)} tensors differ: {different[:5]}"
    assert state == other_state
    assert numbers(name) == numbers(other)


def slow_disk(rank: int) -> None:
    """Each piece of a file takes 20 milliseconds more: a run is nearly always in the middle of a save."""
    write = train.saving._write

    def slowly(file, content, checksum):
        time.sleep(0.02)
        return write(file, content, checksum)

    train.saving._write = slowly


def slow_reading(rank: int, seconds: float) -> None:
    """Each piece of a checkpoint takes so long to verify."""

    def checksum(*given):
        time.sleep(seconds)
        return zlib.crc32(*given)

    train.checkpoint.zlib = SimpleNamespace(crc32=checksum)


def full_disk(rank: int, limit: int) -> None:
    """No file can grow beyond `limit` bytes; the write that would fails like one to a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def own_disk(rank: int) -> None:
    """Each process has its own folder, like a host of its own, whose text differs from the others'."""
    folder = Path(f"host_{rank}")
    folder.mkdir()
    os.chdir(folder)
    write_corpus(Path())
    Path("corpus", "00.txt").write_text(f"this is host {rank}\n" * 20)


def own_copy(rank: int) -> None:
    """Each process reads a copy of the text of its own, like a host without a shared disk."""
    read = train.loop.train

    def read_copy(config: Config) -> float:
        folder = f"corpus_of_{rank}"
        shutil.copytree("corpus", folder, dirs_exist_ok=True)
        data = replace(config.data, paths=[folder], folder=f"prepared_{rank}")
        return read(replace(config, data=data))

    train.loop.train = read_copy


def signal_in_evaluation(rank: int, who: int, which: int) -> None:
    """Rank `who` is asked to stop in the middle of evaluation number `which`, counted from 1."""
    evaluate, count = train.loop.evaluate, itertools.count(1)

    def interrupted(*given):
        if rank == who and next(count) == which:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given)

    train.loop.evaluate = interrupted


def other_seed(rank: int, who: int) -> None:
    """Rank `who` starts with another seed than the others."""
    if rank == who:
        begin = train.loop.train
        train.loop.train = lambda config: begin(replace(config, seed=config.seed + 1))


def absent(rank: int, who: int) -> None:
    """Rank `who` never joins the others, which wait for two seconds."""
    train.distributed.JOIN_SECONDS = 2.0
    if rank == who:
        time.sleep(1000)


def hang_at_the_end(rank: int) -> None:
    """What rank 0 alone does behind the last step takes forever."""
    train.loop.finish_run = lambda *given, **options: time.sleep(1000)


def hang(rank: int, who: int, step: int) -> None:
    """Rank `who` hangs while it fetches the batch of a step."""

    def stuck(number, rows):
        if rank == who and number == step:
            print("stuck from here on")
            # a signal that comes just before a sleep does not end it
            for _ in range(10_000):
                time.sleep(0.1)

    _at_each_batch(stuck)


def slow_model(rank: int, seconds: float) -> None:
    """Each pass through the model takes `seconds` longer, not counting time while it is stopped."""
    hidden_states = model.gpt.GPT.hidden_states

    def slowly(self, *given, **options):
        for _ in range(round(seconds / 0.05)):
            time.sleep(0.05)
        return hidden_states(self, *given, **options)

    model.gpt.GPT.hidden_states = slowly


def tell_seeds(rank: int) -> None:
    """Prints what seeds the random draws of each step."""
    seed_of = train.loop.seed_of

    def told(*place: int) -> int:
        print(f"draws of {place}", flush=True)
        return seed_of(*place)

    train.loop.seed_of = told


def record_tokens(rank: int) -> None:
    """Each process appends the hash of every sequence that it takes to tokens.<rank>.jsonl."""

    def record(number, rows):
        hashes = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows.numpy()]
        with open(f"tokens.{rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": number, "sequences": hashes}) + "\n")

    _at_each_batch(record)


def assert_elastic(
    parts: list[tuple[int, int, str]], apart: float, *overrides: str, seconds: float = 120
) -> None:
    """Asserts that a run in parts of five steps has the tokens and losses of one on a single process.

    parts: processes, tokens of a micro-batch, and distributed, of each part; apart: the most that losses may
    differ; seconds: the most that a part may take.
    """
    # without dropout, whose draws belong to the ranks; with a constant schedule, since each part ends as a
    # finished run and the next one raises the budget
    given = ["model.dropout=0.0", "optim.final_learning_rate_ratio=1.0", *overrides]
    steps = 5 * len(parts)
    complete(small_config("whole", steps, *given), 1, record_tokens, seconds)
    whole = tokens_by_step(1)
    assert len(whole) == steps
    most = max(world_size for world_size, *_ in parts)
    for rank in range(most):
        Path(f"tokens.{rank}.jsonl").unlink(missing_ok=True)
    for number, (world_size, microbatch, distributed) in enumerate(parts, 1):
        of_part = [*given, f"tokens_per_microbatch={microbatch}", f"distributed={distributed}"]
        complete(small_config("elastic", 5 * number, *of_part), world_size, record_tokens, seconds)
    assert tokens_by_step(most) == whole
    losses = {line["step"]: line["train_loss"] for line in numbers("whole") if "train_loss" in line}
    compared = [
        (line["train_loss"], losses[line["step"]]) for line in numbers("elastic") if line["step"] in losses
    ]
    assert len(compared) > len(parts)
    for mine, theirs in compared:
        assert abs(mine - theirs) <= apart, f"{mine} is not {theirs}"


def assert_restarted(who: int, step: int, steps: int, *overrides: str, seconds: float = 120) -> None:
    """Asserts that torchrun restarts a run of two ranks whose rank `who` is killed after `step`."""
    complete(small_config("whole", steps, *overrides), 2, seconds=seconds)
    given = [*SMALL, *overrides, "name=restarted", f"total_tokens={steps * 512}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join((str(ROOT), *sys.path))
    process = subprocess.Popen(
        [*launcher, "--max-restarts=3", "-m", "train", *given],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines, killed = [], False
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step and not killed:
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(workers[who]), signal.SIGKILL)
            killed = True
    assert process.wait(150) == 0, "".join(lines)
    assert "".join(lines).count("continues after step") == 1
    assert_same_run("whole", "restarted", steps)


def tokens_by_step(world_size: int) -> dict[int, list[str]]:
    """The sequences of each step, of all ranks in rank order."""
    steps: dict[int, list[str]] = {}
    for rank in range(world_size):
        path = Path(f"tokens.{rank}.jsonl")
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            steps.setdefault(entry["step"], []).extend(entry["sequences"])
    return steps


def poison(
    rank: int, batches: tuple[int, ...], factor: float, gradient_only: bool = False, who: int = 0
) -> None:
    """The loss of rank `who` in some batches, or only its gradient, is multiplied by a factor."""
    forward = model.gpt.GPT.forward
    now = {"batch": -1}
    _at_each_batch(lambda number, rows: now.update(batch=number))

    def poisoned(self, tokens, targets=None, *more, **options):
        loss = forward(self, tokens, targets, *more, **options)
        if rank != who or now["batch"] not in batches or not loss.requires_grad:
            return loss
        if gradient_only:
            loss.register_hook(lambda gradient: gradient * factor)
            return loss
        return loss * factor

    model.gpt.GPT.forward = poisoned


def watch_weights(rank: int, fault) -> None:
    """Calls fault(rank); when the run builds its weights again, prints whether the old ones are gone."""
    fault(rank)
    build, before = train.state.build_weights, []

    def watched(*given, **options):
        if before:
            print("the old weights are", "here" if before[-1]() else "gone")
        weights = build(*given, **options)
        before.append(weakref.ref(weights))
        return weights

    train.state.build_weights = watched


def slow_evaluation(rank: int, seconds: float, fault) -> None:
    """Calls fault(rank); each evaluation takes `seconds` longer."""
    fault(rank)
    evaluate = train.loop.evaluate

    def slowly(*given):
        time.sleep(seconds)
        return evaluate(*given)

    train.loop.evaluate = slowly


def slow_rollbacks(rank: int, fault) -> None:
    """Calls fault(rank); each new start of a run, after a rollback, takes longer."""
    fault(rank)
    build = train.state.build_weights

    def slowly(*given, **options):
        time.sleep(0.5)
        return build(*given, **options)

    train.state.build_weights = slowly


def _at_each_batch(function) -> None:
    """Calls function(number, sequences) for every batch of training."""
    batch = data.loader.TokenLoader.batch

    def watched(self, step):
        tokens, targets = batch(self, step)
        if self.shuffle:
            function(step, tokens)
        return tokens, targets

    data.loader.TokenLoader.batch = watched
