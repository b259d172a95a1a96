"""The training loop: one code path for a laptop CPU, one GPU, and many."""

import gc
import math
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from data.manifest import corpus_digest
from data.prepare import prepare
from data.tokenizer import load_tokenizer, shard_mark
from train.agreement import refuse_other_code, refuse_other_settings
from train.bad_steps import RollBack, Rollbacks, write_left_out
from train.build import build_passes, build_step_model, build_weights, open_text
from train.checkpoint import refuse_other_run
from train.collector import Collector
from train.config import Config, check_machine
from train.context_parallel import ContextGroups, join_context_groups
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
from train.report import finish_run, open_run, run_flops, set_aside, step_metrics
from train.run_lock import lock_run
from train.saving import CheckpointSaver, remove_unfinished, take_checkpoint
from train.state import build_state
from train.step import autocast_context, forward_backward, update
from train.throughput import RunClock, StepTimer, begin_launch
from train.watchdog import Watchdog


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
    # --multirun trains several runs in one process, and torch stops compiling after a number of shapes
    torch.compiler.reset()
    folder = config.folder
    resume = config.checkpoint.resume
    with join_processes(config.device) as processes:
        if processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        refuse_other_code(processes)
        refuse_other_settings(config, processes)
        config.check_processes(processes.world_size)
        config.accumulation(processes.world_size)
        refuse_other_run(folder / "checkpoints", resume, asdict(config))
        if config.export:
            refuse_to_replace(folder)
        text = _prepare_text(config, processes)
        with (
            lock_run(folder, processes),
            Interruption() as interruption,
            Watchdog(processes, config.hang_seconds),
        ):
            processes.from_main(lambda: remove_unfinished(folder / "checkpoints"))
            processes.from_main(lambda: set_aside(folder))
            # None: the batches that the checkpoint leaves out
            left_out = None
            # created once for all attempts: process groups are never freed
            context = join_context_groups(processes, config.context_parallel)
            rollbacks, clock = Rollbacks(), RunClock(processes.device, launched)
            while True:
                try:
                    return _train(
                        config, processes, context, interruption, folder, text, resume, left_out, clock
                    )
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    end_out_of_memory(config, processes)
                except RollBack as spike:
                    left_out = spike.left_out
                    if processes.is_main:
                        write_left_out(folder, left_out)
                    # a run that was new may have saved checkpoints by now
                    resume = "auto" if resume == "never" else resume
                    rollbacks.add(processes.step)
                    if processes.any(interruption.requested):
                        raise Interrupted(
                            f"stopped on the way back from step {processes.step}; the same command goes on "
                            "from the last checkpoint"
                        ) from None
                # FSDP's modules form reference cycles: free the old weights before new ones are built
                gc.collect()


def _prepare_text(config: Config, processes: Processes) -> Path:
    """The folder of the prepared text. Raises ValueError for too little text, or other text on some hosts."""
    text = processes.main_first(lambda: prepare(config.data))
    corpus = corpus_digest(text)
    # hosts without a shared disk each prepare their own copy, from files that may differ
    if processes.any(corpus != processes.from_main(lambda: corpus)):
        raise ValueError(f"{text} holds other tokens on some hosts: copy rank 0's folder there, or share it")
    # reports too little text before the run has a folder
    open_text(config, text)
    return text


def _train(
    config: Config,
    processes: Processes,
    context: ContextGroups,
    interruption: Interruption,
    folder: Path,
    text: Path,
    resume: str,
    left_out: list[int] | None,
    clock: RunClock,
) -> float:
    """One attempt at training, from a checkpoint or the start until the end, Interrupted or RollBack.

    resume: as checkpoint.resume. left_out: numbers of the batches to leave out; None: those of the
    checkpoint. clock: shared by all attempts.
    """
    device, is_main = processes.device, processes.is_main
    corpus = corpus_digest(text)
    checkpoints = folder / "checkpoints"
    saved = processes.from_main(lambda: take_checkpoint(checkpoints, resume))
    if is_main and processes.step:
        # only the rollback after a spike starts an attempt at a later step than 0
        print(f"goes back to {saved or 'the start: no checkpoint was saved yet'}", flush=True)
    train_data, val_data, val_sequences = open_text(config, text, context.data_rank, context.data_size)
    state = build_state(config, processes, saved, resume, left_out, corpus)
    optimizer, scaler, guard, first_step = state.optimizer, state.scaler, state.guard, state.first_step
    # what each checkpoint of this attempt says of where it comes from
    origin = {
        "resume": resume,
        "config": asdict(config),
        "corpus": corpus,
        "tokenizer": shard_mark(config.data.tokenizer),
        "end_of_text": load_tokenizer(config.data.tokenizer).end_of_text,
    }
    model = build_step_model(state.weights, config, processes, context)
    autocast = partial(autocast_context, device.type, config.precision)
    passes = build_passes(model, config, processes, autocast, scaler)
    timer, flops = StepTimer(device), run_flops(config, train_data)

    def validate() -> float:
        with clock.counting("evaluation_seconds"):
            return evaluate(model, val_data, val_sequences, processes, autocast)

    saver = CheckpointSaver(checkpoints, config.checkpoint, processes)
    logger = None
    if is_main:
        logger = open_run(config, folder, first_step, processes, state.weights, train_data, val_data)
    measure = partial(step_metrics, config, processes, timer, flops)
    val_loss = validate()
    if is_main:
        print(f"validation loss {val_loss:.4f} after {counted(first_step, 'step')}", flush=True)
        if first_step == 0:
            logger.log({"step": 0, "tokens": 0, "val_loss": val_loss})

    profiler = Profiler(folder, device, enabled=config.profile and is_main)
    with saver, logger or nullcontext(), profiler, Collector() as collector:
        if first_step < config.steps and processes.any(interruption.requested):
            # a signal came during the first evaluation, which may take longer than its sender waits: stop now
            if first_step:
                raise Interrupted(f"stopped after step {first_step}; the same command goes on from there")
            raise Interrupted("stopped before a step was done; the same command starts again")
        if processes.world_size > 1:
            _settle_buckets(model, config, processes, autocast, scaler, optimizer)
        for step in range(first_step, config.steps):
            timer.start()
            # dropout depends only on seed, step and rank: a resumed run draws what it would have drawn
            torch.manual_seed(seed_of(config.seed, step, processes.rank))
            # read while the GPU still runs the previous step; the GPU waits 0.1% of its time for it
            batch = train_data.batch(guard.batch_number(step))
            tokens, targets = (_to_device(part, device) for part in batch)
            timer.finish("data")
            own_loss, loss = forward_backward(passes, tokens, targets, processes)
            # the backward pass is still running on the GPU: this check does not make the GPU wait
            limit = guard.norm_limit(step, own_loss, loss)
            timer.finish("forward_backward")
            rate = learning_rate(step, config.steps, config.optim)
            grad_norm = update(optimizer, scaler, rate, config.optim.gradient_clip, limit)
            guard.add_norm(step, grad_norm, limit)
            timer.finish("optimizer")

            done = processes.step = step + 1
            if done == first_step + 1:
                # the first step has created the optimizer's state
                saver.prepare(state.tensors())
            is_last = done == config.steps
            val_loss = validate() if is_last or _is_due(done, config.evaluation.every_steps) else None
            # checked after the evaluation, during which the signal may have come
            interrupted = processes.any(interruption.requested)
            is_logged = is_last or done == 1 or val_loss is not None
            is_logged |= _is_due(done, config.logging.every_steps)
            # the first step after resuming is only printed: the file stays that of an uninterrupted run
            if is_logged or done == first_step + 1:
                # while the device is still busy
                collector.collect()
                metrics = measure(done, loss, val_loss, rate, grad_norm, guard.skipped_steps)
                if is_main:
                    logger.progress(metrics, (config.steps - done) * metrics["step_seconds"])
                    if is_logged:
                        logger.log(metrics)
            if is_last or interrupted or _is_due(done, config.checkpoint.every_steps):
                with clock.counting("checkpoint_seconds"):
                    if is_main:
                        logger.sync()
                    info = {"step": done, "val_loss": val_loss} | origin | state.rest()
                    saver.save(state.tensors(), info)
            profiler.step()
            clock.finish_step()
            if interrupted and not is_last:
                _check_saved(saver, done)
                raise Interrupted(f"stopped after step {done}; the same command goes on from there")

    _check_finite(val_loss, config.steps)
    # already saved, and gathering the whole weights may need its memory
    optimizer.state.clear()
    del passes
    weights = gather(state.weights, lambda: build_weights(config, device), is_main=is_main)
    if is_main:
        if config.lora.rank:
            merge_adapters(weights)
        with autocast():
            finish_run(config, folder, weights, val_loss, clock, processes, flops, first_step=first_step)
    processes.barrier()
    _check_saved(saver, config.steps)
    return val_loss


def _settle_buckets(model, config: Config, processes: Processes, autocast, scaler, optimizer) -> None:
    """Runs a backward pass on dummy tokens before the first step of every launch, new or resumed.

    DDP reorders its buckets after its first backward pass, which changes the order of sums.
    """
    nothing = torch.zeros((config.microbatch, config.seq_len), dtype=torch.int64, device=processes.device)
    forward_backward(Passes(model, 1, autocast, scaler), nothing, nothing, processes)
    optimizer.zero_grad(set_to_none=True)


def _check_saved(saver: CheckpointSaver, step: int) -> None:
    if not saver.wait():
        raise OSError(f"the checkpoint of the last step, {step}, was not written: see above")


def _check_finite(val_loss: float, steps: int) -> None:
    if not math.isfinite(val_loss):
        raise FloatingPointError(
            f"the validation loss is {val_loss} after {counted(steps, 'step')}: no summary and no "
            "sample are made of it. Lower optim.learning_rate, or use precision=bf16 or fp32, and start "
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
