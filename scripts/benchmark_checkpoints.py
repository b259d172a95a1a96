"""Times what a checkpoint costs a training GPU, one row for each save:
python -m scripts.benchmark_checkpoints 'models=[gpt2,gpt2_xl]' out=checkpoints.json"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from model import GPT, AttentionConfig
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.benchmark_training import OPTIM
from scripts.sizes import check_models, read_model
from train.checkpoint import CheckpointConfig, list_checkpoints, run_tensors
from train.config import DEVICES
from train.distributed import join_processes
from train.optim import build_optimizer
from train.overrides import one_of
from train.passes import Passes
from train.results import write_result
from train.saving import CheckpointSaver
from train.step import autocast_context, forward_backward, update

# tokens of a sequence, unless a step has fewer
SEQ_LEN = 1024
SETTINGS = CheckpointConfig(every_steps=1, keep_last=1, keep_every_steps=0, keep_best=False, resume="auto")


@dataclass
class Arguments:
    models: list[str] = argument(["gpt2"], "names of files in conf/model/")
    tokens_per_step: int = argument(8192, f"random tokens a step, in sequences of {SEQ_LEN} or fewer")
    saves: int = argument(3, "saves of each model")
    folder: str = argument(
        "runs", "on the disk to measure; what is written in it is removed at the end", path=True
    )
    device: str = argument("cuda", "cuda or cpu")
    out: str = result_file("", "JSON file for the rows; empty for none")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check_models(arguments.models)
    one_of("device", arguments.device, DEVICES)
    check_some(arguments, "models")
    check_least(arguments, "tokens_per_step", "saves")
    if arguments.tokens_per_step > SEQ_LEN and arguments.tokens_per_step % SEQ_LEN:
        raise ValueError(
            f"tokens_per_step above {SEQ_LEN} must be a multiple of it, got {arguments.tokens_per_step}: use "
            f"{-(-arguments.tokens_per_step // SEQ_LEN) * SEQ_LEN}"
        )
    try:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"folder={arguments.folder} cannot be made ({error.strerror}): name one that is there or can be"
        ) from error
    rows = []
    for name in arguments.models:
        for row in measure(arguments, name):
            rows.append(row)
            print(
                f"{name}  save {row['save']}  {row['bytes'] / 1e9:.2f} GB  stall {row['stall_ms']:.0f} ms  "
                f"written in {row['save_seconds']:.2f} s  step {row['step_ms']:.1f} ms, while writing "
                f"{row['step_while_saving_ms']:.1f} ms  lost {row['lost_share']:.1%} of the save's time",
                flush=True,
            )
            if arguments.out:
                write_result(Path(arguments.out), rows, n_gpus=int(arguments.device == "cuda"))


def measure(arguments: Arguments, name: str):
    """Yields a row for each save; training steps go on while the checkpoint is written."""
    seq_len = min(SEQ_LEN, arguments.tokens_per_step)
    config = read_model(name, seq_len)
    with (
        join_processes(arguments.device) as processes,
        TemporaryDirectory(prefix="benchmark_checkpoints-", dir=arguments.folder) as folder,
        torch.device(processes.device),
    ):
        if processes.world_size > 1:
            raise ValueError(f"one process is timed, got {processes.world_size}: start it without torchrun")
        weights = GPT(config, AttentionConfig(implementation="sdpa"))
        optimizer = build_optimizer(weights, OPTIM)
        scaler = torch.amp.GradScaler(processes.device.type, enabled=False)
        passes = Passes(weights, 1, partial(autocast_context, processes.device.type, "bf16"), scaler)
        text = torch.randint(config.vocab_size, (arguments.tokens_per_step // seq_len, seq_len + 1))

        def step() -> float:
            started = time.perf_counter()
            forward_backward(passes, text[:, :-1], text[:, 1:], processes)
            update(optimizer, scaler, OPTIM.learning_rate, OPTIM.gradient_clip, float("inf"))
            _synchronize(processes.device)
            return time.perf_counter() - started

        usual = median([step() for _ in range(8)][3:])
        with CheckpointSaver(Path(folder), SETTINGS, processes) as saver:
            started = time.perf_counter()
            saver.prepare(run_tensors(weights, optimizer))
            steps = [step()]
            while saver.is_busy():
                steps.append(step())
            prepare = {
                "prepare_seconds": time.perf_counter() - started,
                "prepare_lost_seconds": sum(steps) - usual * len(steps),
            }
            print(
                f"{name}  host copies in {prepare['prepare_seconds']:.2f} s, which cost training "
                f"{prepare['prepare_lost_seconds']:.2f} s",
                flush=True,
            )
            for save in range(1, arguments.saves + 1):
                started = time.perf_counter()
                tensors = run_tensors(weights, optimizer)
                saver.save(tensors, {"step": save, "val_loss": None})
                stall = time.perf_counter() - started
                steps = [step()]
                while saver.is_busy():
                    steps.append(step())
                saver.wait()
                seconds = time.perf_counter() - started
                lost = stall + sum(elapsed - usual for elapsed in steps)
                path = list_checkpoints(Path(folder))[-1]
                yield {
                    "model": name,
                    "save": save,
                    "bytes": sum(file.stat().st_size for file in path.iterdir()),
                    "n_gpus": int(processes.device.type == "cuda"),
                    **prepare,
                    "stall_ms": stall * 1000,
                    "save_seconds": seconds,
                    "step_ms": usual * 1000,
                    "step_while_saving_ms": median(steps) * 1000,
                    "lost_seconds": lost,
                    "lost_share": lost / seconds,
                }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
