"""The training loop: one code path for a laptop CPU, one GPU, and many."""

import gc
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.background import prepare_beside
from data.manifest import corpus_digest
from data.prepare import prepare
from train.agreement import refuse_other_code, refuse_other_settings
from train.attempt import Attempt, Launch, begin_attempt
from train.bad_steps import RollBack, Rollbacks, write_left_out
from train.build import build_weights, open_text
from train.checkpoint import refuse_other_run
from train.collector import Collector
from train.compile_ahead import compile_ahead, is_compiled_ahead, products_compiled_beside
from train.config import Config, check_machine
from train.context_parallel import join_context_groups
from train.distributed import Processes, join_processes
from train.evaluate import evaluate
from train.export import refuse_to_replace
from train.interruption import Interrupted, Interruption
from train.logger import counted
from train.lora import merge_adapters
from train.optim import learning_rate
from train.out_of_memory import end_out_of_memory, is_out_of_memory
from train.parallel import gather
from train.passes import Passes
from train.profiler import Profiler
from train.report import finish_run, set_aside, step_metrics
from train.run_lock import lock_run
from train.saving import CheckpointSaver, remove_unfinished
from train.step import forward_backward, update
from train.throughput import RunClock, begin_launch, reset_peak_memory
from train.watchdog import Watchdog


class StepResult(NamedTuple):
    """What is reported of a training step."""

    # the mean over all ranks
    loss: float
    learning_rate: float
    # before clipping, (), on the device
    grad_norm: torch.Tensor


def train(config: Config) -> float:
    """Trains as the configuration says and returns the final validation loss, in nats per token.

    Raises ValueError, before any long work, for what this machine, the text or an earlier run of that name
    rules out; FloatingPointError for a loss or gradients that are not finite, before they reach the weights,
    and for a final validation loss that is not finite, after the state is saved; MemoryError for a step that
    does not fit into the GPU, naming one that does; Interrupted after SIGTERM, SIGINT or SIGHUP, once the
    state is saved.
    """
    launched = begin_launch()
    check_machine(config)
    # --multirun trains several runs in one process, and torch stops compiling after a number of shapes; the
    # compiler takes seconds to import, which a run that is refused need not wait for
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    folder = config.folder
    with join_processes(config.device) as processes, products_compiled_beside(config, processes.device):
        reset_peak_memory(processes.device)
        refuse_other_code(processes)
        refuse_other_settings(config, processes)
        config.check_processes(processes.world_size)
        config.accumulation(processes.world_size)
        _refuse_taken_folder(config, processes)
        compiled_ahead = is_compiled_ahead(config, processes)
        text = _prepare_text(config, processes, compiled_ahead=compiled_ahead)
        with (
            lock_run(folder, processes),
            Interruption() as interruption,
            Watchdog(processes, config.hang_seconds),
        ):
            # while the text was prepared, and this run waited for the lock, another may have used the folder
            _refuse_taken_folder(config, processes)
            processes.from_main(lambda: remove_unfinished(folder / "checkpoints"))
            processes.from_main(lambda: set_aside(folder))
            launch = Launch(
                config=config,
                processes=processes,
                context=join_context_groups(processes, config.context_parallel),
                interruption=interruption,
                clock=RunClock(processes.device, launched),
                text=text,
                compiled_ahead=compiled_ahead,
            )
            return _train_with_rollbacks(launch)


def _refuse_taken_folder(config: Config, processes: Processes) -> None:
    """Raises ValueError if the run's folder holds what this run would replace or mix with its own."""
    processes.from_main(
        lambda: refuse_other_run(config.folder / "checkpoints", config.checkpoint.resume, asdict(config))
    )
    if config.export:
        refuse_to_replace(config.folder)


def _prepare_text(config: Config, processes: Processes, *, compiled_ahead: bool) -> Path:
    """The folder of the prepared text; the model is compiled meanwhile if compiled_ahead.

    Raises ValueError for too little text, or other text on some hosts.
    """
    if compiled_ahead:
        text = prepare_beside(config.data, lambda: compile_ahead(config, processes))
    else:
        text = processes.main_first(lambda: prepare(config.data))
    corpus = corpus_digest(text)
    # hosts without a shared disk each prepare their own copy, from files that may differ
    if processes.any(corpus != processes.from_main(lambda: corpus)):
        raise ValueError(f"{text} holds other tokens on some hosts: copy rank 0's folder there, or share it")
    # reports too little text before the run has a folder
    open_text(config, text)
    return text


def _train_with_rollbacks(launch: Launch) -> float:
    """Attempts to train until one gets to the end: after a spike the next one leaves out its batch."""
    config, processes = launch.config, launch.processes
    # left_out None: the batches that the checkpoint leaves out
    resume, left_out, rollbacks = config.checkpoint.resume, None, Rollbacks()
    while True:
        try:
            return _run_attempt(launch, resume, left_out)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            end_out_of_memory(config, processes)
        except RollBack as spike:
            left_out = spike.left_out
            processes.from_main(partial(write_left_out, config.folder, left_out))
            # a run that was new may have saved checkpoints by now
            resume = "auto" if resume == "never" else resume
            rollbacks.add(processes.step)
            if processes.any(launch.interruption.requested):
                raise Interrupted(
                    f"stopped on the way back from step {processes.step}; the same command goes on "
                    "from the last checkpoint"
                ) from None
        # FSDP's modules form reference cycles: free the old weights before new ones are built
        gc.collect()


def _run_attempt(launch: Launch, resume: str, left_out: list[int] | None) -> float:
    """Trains from a checkpoint or the start until the end, Interrupted or RollBack.

    resume, left_out: as begin_attempt takes them. Returns the final validation loss.
    """
    config, processes = launch.config, launch.processes
    attempt = begin_attempt(launch, resume, left_out)
    first_step, saver = attempt.state.first_step, attempt.saver
    profiler = Profiler(config.folder, processes.device, enabled=config.profile and processes.is_main)
    # the first evaluation may fail too, and wandb would give its run to the next one of --multirun
    with saver, attempt.logger or nullcontext(), profiler, Collector() as collector:
        val_loss = _validate(launch, attempt)
        # a finished run's is told at the end
        if processes.is_main and first_step < config.steps:
            print(f"validation loss {val_loss:.4f} after {counted(first_step, 'step')}", flush=True)
            if first_step == 0:
                attempt.logger.log({"step": 0, "tokens": 0, "val_loss": val_loss})
        if first_step < config.steps and processes.any(launch.interruption.requested):
            # a signal came during the first evaluation, which may take longer than its sender waits: stop now
            if first_step:
                raise Interrupted(f"stopped after step {first_step}; the same command goes on from there")
            raise Interrupted("stopped before a step was done; the same command starts again")
        if processes.world_size > 1:
            _settle_buckets(launch, attempt)
        for step in range(first_step, config.steps):
            result = _step(launch, attempt, step)
            done = processes.step = step + 1
            if done == first_step + 1:
                launch.clock.finish_first_step()
                # the first step has created the optimizer's state
                saver.prepare(attempt.state.tensors())
            is_last = done == config.steps
            is_evaluated = is_last or _is_due(done, config.evaluation.every_steps)
            val_loss = _validate(launch, attempt) if is_evaluated else None
            # checked after the evaluation, during which the signal may have come
            interrupted = processes.any(launch.interruption.requested)
            is_logged = is_evaluated or done == 1 or _is_due(done, config.logging.every_steps)
            # the first step after resuming is only printed: the file stays that of an uninterrupted run
            if is_logged or done == first_step + 1:
                # while the device is still busy
                collector.collect()
                _report(launch, attempt, done, result, val_loss, is_logged=is_logged)
            if is_last or interrupted or _is_due(done, config.checkpoint.every_steps):
                _save(launch, attempt, done, val_loss)
            profiler.step()
            launch.clock.finish_step()
            if interrupted and not is_last:
                _check_saved(saver, done)
                raise Interrupted(f"stopped after step {done}; the same command goes on from there")
    _finish(launch, attempt, val_loss)
    return val_loss


def _validate(launch: Launch, attempt: Attempt) -> float:
    with launch.clock.counting("evaluation_seconds"):
        return evaluate(
            attempt.model, attempt.val_data, attempt.val_sequences, launch.processes, attempt.autocast
        )


def _step(launch: Launch, attempt: Attempt, step: int) -> StepResult:
    """One training step: changes the weights unless the guard refuses."""
    config, processes, state, timer = launch.config, launch.processes, attempt.state, attempt.timer
    timer.start()
    # dropout depends only on seed, step and rank: a resumed run draws what it would have drawn
    torch.manual_seed(seed_of(config.seed, step, processes.rank))
    # read while the GPU still runs the previous step; the GPU waits 0.1% of its time for it
    batch = attempt.train_data.batch(state.guard.batch_number(step))
    tokens, targets = (_to_device(part, processes.device) for part in batch)
    timer.finish("data")
    own_loss, loss = forward_backward(attempt.passes, tokens, targets, processes)
    # the backward pass is still running on the GPU: this check does not make the GPU wait
    limit = state.guard.norm_limit(step, own_loss, loss)
    timer.finish("forward_backward")
    rate = learning_rate(step, config.steps, config.optim)
    grad_norm = update(state.optimizer, state.scaler, rate, config.optim.gradient_clip, limit)
    state.guard.add_norm(step, grad_norm, limit)
    timer.finish("optimizer")
    return StepResult(loss, rate, grad_norm)


def _report(
    launch: Launch,
    attempt: Attempt,
    done: int,
    result: StepResult,
    val_loss: float | None,
    *,
    is_logged: bool,
) -> None:
    """Prints the progress after `done` steps, and logs its metrics if asked to; waits for the device."""
    config, processes, logger = launch.config, launch.processes, attempt.logger
    metrics = step_metrics(
        config,
        processes,
        attempt.timer,
        attempt.flops,
        done=done,
        val_loss=val_loss,
        skipped_steps=attempt.state.guard.skipped_steps,
        **result._asdict(),
    )
    if processes.is_main:
        logger.progress(metrics, (config.steps - done) * metrics["step_seconds"])
        if is_logged:
            logger.log(metrics)


def _save(launch: Launch, attempt: Attempt, done: int, val_loss: float | None) -> None:
    """Saves a checkpoint of `done` steps, and the metrics that belong to it."""
    with launch.clock.counting("checkpoint_seconds"):
        info = {"step": done, "val_loss": val_loss} | attempt.origin | attempt.state.rest()
        if launch.processes.is_main:
            attempt.logger.sync()
            info["logged"] = attempt.logger.newest_step
        attempt.saver.save(attempt.state.tensors(), info)


def _finish(launch: Launch, attempt: Attempt, val_loss: float) -> None:
    """Makes summary, pictures and sample of the trained weights; raises for a loss that is not finite."""
    config, processes = launch.config, launch.processes
    _check_finite(val_loss, config.steps)
    # already saved, and gathering the whole weights may need its memory
    attempt.state.optimizer.state.clear()
    del attempt.passes
    weights = gather(
        attempt.state.weights,
        lambda: build_weights(config, processes.device, empty=True),
        is_main=processes.is_main,
    )

    def finish() -> None:
        if config.lora.rank:
            merge_adapters(weights)
        first_step = attempt.state.first_step
        with attempt.autocast():
            finish_run(
                config, weights, val_loss, launch.clock, processes, attempt.flops, first_step=first_step
            )

    processes.from_main(finish)
    _check_saved(attempt.saver, config.steps)


def _settle_buckets(launch: Launch, attempt: Attempt) -> None:
    """Runs a backward pass on dummy tokens before the first step of every launch, new or resumed.

    DDP reorders its buckets after its first backward pass, which changes the order of sums.
    """
    shape = launch.config.microbatch, launch.config.seq_len
    nothing = torch.zeros(shape, dtype=torch.int64, device=launch.processes.device)
    passes = Passes(attempt.model, 1, attempt.autocast, attempt.state.scaler)
    forward_backward(passes, nothing, nothing, launch.processes)
    attempt.state.optimizer.zero_grad(set_to_none=True)


def _check_saved(saver: CheckpointSaver, step: int) -> None:
    if not saver.wait():
        raise OSError(f"the checkpoint of the last step, {step}, was not written: see above")


def _check_finite(val_loss: float, steps: int) -> None:
    if not math.isfinite(val_loss):
        raise FloatingPointError(
            f"the validation loss is {val_loss} after {counted(steps, 'step')}: no summary and no "
            "sample are made of it. Lower optim.learning_rate, or with precision=fp16 use bf16, and start "
            "over, or from an earlier checkpoint with checkpoint.resume=FOLDER, under another name="
        )


def seed_of(seed: int, step: int, rank: int) -> int:
    """A 64-bit seed for the random draws of one rank in one step, unlike those of its neighbours."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def _to_device(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return part.pin_memory().to(device, non_blocking=True)
    return part


def _is_due(done: int, every_steps: int) -> bool:
    return every_steps > 0 and done % every_steps == 0
