"""What an attempt at training holds: its state, new or from a checkpoint, and all that its steps use."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import nn

from data.loader import TokenLoader
from data.manifest import corpus_digest
from data.tokenizer import load_tokenizer, shard_mark
from train.build import build_passes, build_step_model, open_text
from train.config import Config
from train.context_parallel import ContextGroups
from train.distributed import Processes
from train.interruption import Interruption
from train.logger import RunLogger
from train.passes import Passes
from train.report import open_run, run_flops
from train.saving import CheckpointSaver, take_checkpoint
from train.state import TrainingState, build_state
from train.step import autocast_context
from train.throughput import RunClock, StepTimer


@dataclass(kw_only=True, slots=True)
class Launch:
    """What all attempts of a launch share."""

    config: Config
    processes: Processes
    # created once: process groups are never freed
    context: ContextGroups
    interruption: Interruption
    clock: RunClock
    # the folder of the prepared text
    text: Path
    # whether the model was compiled while that was prepared
    compiled_ahead: bool


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What one attempt holds from its first step to its last."""

    state: TrainingState
    train_data: TokenLoader
    val_data: TokenLoader
    # how many of them an evaluation reads
    val_sequences: int
    # what runs the weights; autocast: a context manager factory
    model: nn.Module
    passes: Passes
    autocast: Callable
    timer: StepTimer
    # what run_flops returned
    flops: dict[str, float]
    saver: CheckpointSaver
    # of the main process only
    logger: RunLogger | None
    # what each checkpoint of the attempt says of where it comes from
    origin: dict


def begin_attempt(launch: Launch, resume: str, left_out: list[int] | None) -> Attempt:
    """Everything that an attempt needs before its first evaluation. Every process must call it.

    resume: as checkpoint.resume. left_out: numbers of the batches to leave out; None: those of the
    checkpoint. Raises ValueError for a checkpoint that does not fit the configuration.
    """
    config, processes, context = launch.config, launch.processes, launch.context
    corpus = corpus_digest(launch.text)
    checkpoints = config.folder / "checkpoints"
    saved = processes.from_main(lambda: take_checkpoint(checkpoints, resume, processes.mark_piece))
    if processes.is_main and processes.step:
        # only the rollback after a spike starts an attempt at a later step than 0
        print(f"goes back to {saved or 'the start: no checkpoint was saved yet'}", flush=True)
    train_data, val_data, val_sequences = open_text(config, launch.text, context.data_rank, context.data_size)
    state = build_state(config, processes, saved, resume, left_out, corpus)
    origin = {
        "resume": resume,
        "config": asdict(config),
        "corpus": corpus,
        "tokenizer": shard_mark(config.data.tokenizer),
        "end_of_text": load_tokenizer(config.data.tokenizer).end_of_text,
    }
    model = build_step_model(state.weights, config, processes, context)
    autocast = partial(autocast_context, processes.device.type, config.precision)
    passes = build_passes(model, config, processes, autocast, state.scaler)
    timer, flops = StepTimer(processes.device), run_flops(config, train_data)
    saver = CheckpointSaver(checkpoints, config.checkpoint, processes)
    logger = None

    def open_logger() -> None:
        nonlocal logger
        logger = open_run(config, state.first_step, processes, state.weights, train_data, val_data)
        if config.compile and not launch.compiled_ahead:
            print("compiling the model: the first step takes up to a minute on an H200", flush=True)

    processes.from_main(open_logger)
    return Attempt(
        state=state,
        train_data=train_data,
        val_data=val_data,
        val_sequences=val_sequences,
        model=model,
        passes=passes,
        autocast=autocast,
        timer=timer,
        flops=flops,
        saver=saver,
        logger=logger,
        origin=origin,
    )
