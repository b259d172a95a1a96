"""The training loop: one code path for a laptop CPU, one GPU, and many."""

import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from data.loader import TokenLoader
from data.prepare import prepare
from model import GPT
from train.checkpoint import check_fits, find_checkpoint, read_checkpoint, save_checkpoint
from train.config import Config, check_machine
from train.distributed import Processes, join_processes
from train.evaluate import evaluate
from train.optim import build_optimizer, learning_rate
from train.report import finish_run, open_run, step_metrics
from train.throughput import StepTimer

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(config: Config) -> float:
    """Trains as the configuration says and returns the final validation loss, in nats per token.

    Raises ValueError for what this machine, the text or an earlier run of that name rule out, before any
    long work; FloatingPointError for a loss that is not finite, before it reaches the weights.
    """
    check_machine(config)
    with join_processes(config.device) as processes:
        return _train(config, processes)


def _train(config: Config, processes: Processes) -> float:
    device, is_main = processes.device, processes.is_main
    accumulation = config.accumulation(processes.world_size)
    folder = Path("runs") / config.name
    checkpoints = folder / "checkpoints"
    saved_path = find_checkpoint(checkpoints, config.checkpoint.resume)
    saved = read_checkpoint(saved_path) if saved_path else None
    if saved:
        check_fits(saved, saved_path, asdict(config), same_run=config.checkpoint.resume == "auto")
    with processes.main_first():
        text = prepare(config.data)

    load = partial(
        TokenLoader,
        text,
        seq_len=config.seq_len,
        tokenizer=config.data.tokenizer,
        seed=config.seed,
        rank=processes.rank,
        world_size=processes.world_size,
    )
    train_data = load(split="train", sequences_per_step=config.tokens_per_step // config.seq_len)
    sequences_at_once = config.microbatch * processes.world_size
    val_data = load(split="val", sequences_per_step=sequences_at_once, shuffle=False)
    val_sequences = min(config.evaluation.tokens // config.seq_len, val_data.sequences_per_epoch)
    val_batches = max(1, val_sequences // sequences_at_once)

    # the same weights on every rank, whatever their number
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    weights = GPT(config.model, config.attention).to(device)
    optimizer = build_optimizer(weights, config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    first_step = 0
    if saved:
        weights.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first_step = saved["step"]
        del saved
    # dropout differs between ranks, and between the parts of a resumed run
    torch.manual_seed(config.seed + 1 + processes.rank + processes.world_size * first_step)
    model = torch.compile(weights) if config.compile else weights
    if processes.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = partial(autocast_context, device.type, config.precision)
    validate = partial(evaluate, model, val_data, val_batches, processes, autocast)

    logger = None
    if is_main:
        logger = open_run(config, folder, first_step, processes, weights, train_data)
    timer = StepTimer(device)
    started = time.perf_counter()
    val_loss = validate()
    if is_main:
        print(f"validation loss {val_loss:.4f} after {first_step} steps", flush=True)
        if first_step == 0:
            logger.log({"step": 0, "tokens": 0, "val_loss": val_loss})

    for step in range(first_step, config.steps):
        timer.start()
        tokens, targets = (_to_device(part, device) for part in train_data.batch(step))
        timer.finish("data")
        own_loss, loss = forward_backward(model, tokens, targets, accumulation, processes, autocast, scaler)
        # the backward is still running on the GPU: this check does not make it wait
        stop_unless_finite(own_loss, loss, step, config, processes)
        timer.finish("forward_backward")
        rate = learning_rate(step, config.steps, config.optim)
        grad_norm = update(optimizer, scaler, rate, config.optim.gradient_clip)
        timer.finish("optimizer")

        done = step + 1
        is_last = done == config.steps
        val_loss = validate() if is_last or _is_due(done, config.evaluation.every_steps) else None
        if is_last or done == first_step + 1 or val_loss or _is_due(done, config.logging.every_steps):
            metrics = step_metrics(config, processes, done, loss, val_loss, rate, grad_norm, timer)
            if is_main:
                logger.log(metrics)
                logger.progress(metrics, (config.steps - done) * metrics["step_seconds"])
        if is_main and (is_last or _is_due(done, config.checkpoint.every_steps)):
            save_checkpoint(
                checkpoints, done, weights, optimizer, scaler, asdict(config), config.checkpoint.keep
            )

    if is_main:
        logger.close()
        with autocast():
            finish_run(config, folder, weights, val_loss, time.perf_counter() - started, processes)
    processes.barrier()
    return val_loss


def forward_backward(
    model, tokens, targets, accumulation, processes, autocast, scaler
) -> tuple[float, float]:
    """Adds the gradients of one step's loss; returns that loss on this rank and its mean over the ranks.

    tokens, targets: this rank's rows of the step, (accumulation * microbatch, T) int64.
    """
    total = torch.zeros((), device=tokens.device)
    microbatches = list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True))
    for index, (inputs, labels) in enumerate(microbatches):
        is_last = index == accumulation - 1
        if processes.world_size > 1:
            # the ranks' gradients are averaged once a step
            model.require_backward_grad_sync = is_last
        with autocast():
            loss = model(inputs, labels) / accumulation
        total += loss.detach()
        if is_last:
            losses = torch.stack((total, processes.mean(total.clone())))
            losses = losses.to("cpu", non_blocking=True)
            losses_arrived = _record_event(tokens.device)
        scaler.scale(loss).backward()
    losses_arrived()
    own_loss, mean_loss = losses.tolist()
    return own_loss, mean_loss


def stop_unless_finite(own_loss, loss, step, config: Config, processes: Processes) -> None:
    """Raises FloatingPointError on every rank if the loss of any rank is infinite or not a number."""
    if torch.isfinite(torch.tensor(loss)):
        return
    rows = config.tokens_per_step // config.seq_len // processes.world_size
    first = step * rows * processes.world_size + processes.rank * rows
    raise FloatingPointError(
        f"the loss is {own_loss} on rank {processes.rank} ({loss} over all ranks) at step {step + 1}, "
        f"in the batch of sequences {first} to {first + rows - 1}; the weights were not changed. "
        "Lower optim.learning_rate, or use precision=bf16 or fp32, and resume from the last checkpoint"
    )


def update(optimizer, scaler, rate: float, gradient_clip: float) -> torch.Tensor:
    """One optimizer step at this learning rate; returns the gradients' global norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, gradient_clip or float("inf"))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def autocast_context(device_type: str, precision: str):
    """Matrix products in the run's precision; fp32 needs no context (on a GPU its products use TF32)."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=AUTOCAST_DTYPES[precision])


def _to_device(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return part.pin_memory().to(device, non_blocking=True)
    return part


def _record_event(device: torch.device):
    """A function that waits until the work queued so far is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _is_due(done: int, every_steps: int) -> bool:
    return every_steps > 0 and done % every_steps == 0
