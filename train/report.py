"""What a run reports to its user: the opening lines, the metrics of a step, the files at the end."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from data.loader import TokenLoader
from data.tokenizer import load_tokenizer
from model import GPT
from model.flops import flops_ledger
from train.bad_steps import LEFT_OUT
from train.checkpoint import list_checkpoints, reads_on
from train.config import Config, write_config
from train.distributed import Processes
from train.documents import document_ids
from train.export import EXPORT, export_run
from train.free_name import first_free
from train.logger import WANDB_ID, RunLogger, counted, duration, read_metrics, readable
from train.optim import learning_rate
from train.profiler import MEMORY, NEEDED, TRACE
from train.results import write_result
from train.sample import sample_text
from train.terminal import warn
from train.throughput import RunClock, StepTimer, flop_utilization, peak_memory_bytes

# what a run writes in its folder, but for its summary: a run that has one is not begun anew
OF_AN_ATTEMPT = ("config*.yaml", "metrics.jsonl", LEFT_OUT, WANDB_ID, "loss.png", "sample.txt")

# if layers have patterns; all of a rank's sequences took 9 s and 5 GiB at each start of a long-sequence run
COUNTED_SEQUENCES = 32


def set_aside(folder: Path) -> None:
    """Moves what an attempt without a checkpoint left into folder/attempt_<n>, and says so.

    The run that starts over has its own settings and metrics, leaves out no batches of that attempt, and is a
    new run to wandb.
    """
    if list_checkpoints(folder / "checkpoints"):
        return
    left = [path for pattern in OF_AN_ATTEMPT for path in sorted(folder.glob(pattern))]
    if not left:
        return
    aside = first_free(lambda number: folder / f"attempt_{number}")
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    print(f"starts over; what an attempt without a checkpoint left is in {aside}", flush=True)


def tell_other_steps(config: Config, info: dict, first_step: int, corpus: str) -> None:
    """Says which step of this run a checkpoint is at, if its own steps have another number of tokens.

    info: what read_checkpoint returned. corpus: corpus_digest of the text.
    """
    step, size, own_size = info["step"], info["config"]["tokens_per_step"], config.tokens_per_step
    if size == own_size:
        return
    # in another text, or another order of it, the run has read nothing yet
    again = step * size - first_step * own_size if reads_on(info, asdict(config), corpus) else 0
    remark = f"; the last {counted(again, 'token')} before it are read again" if again else ""
    warmup_steps = config.optim.warmup_steps
    if step >= info["config"]["optim"]["warmup_steps"] and first_step < warmup_steps:
        remark += (
            f"; the warm-up, which was over, goes on to step {warmup_steps:,}, "
            f"optim.warmup_steps={first_step} leaves it out"
        )
    print(
        f"step {step:,} of {counted(size, 'token')} is step {first_step:,} of {counted(own_size, 'token')}, "
        f"in which warm-up and schedule are counted{remark}"
    )


def tell_lost_metrics(folder: Path, info: dict) -> None:
    """Says which steps before a run's own checkpoint are no longer in its metrics.jsonl.

    info: what read_checkpoint returned.
    """
    path, every_steps = folder / "metrics.jsonl", info["config"]["logging"]["every_steps"]
    # older checkpoints do not tell: they may lie between two lines
    logged = info.get("logged", info["step"] // every_steps * every_steps)
    newest = max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0
    # a run that began at the checkpoint of another may not have come to its first line yet
    is_whole = info["resume"] in ("auto", "never")
    if is_whole and newest < logged:
        print(f"{path} lacks steps {newest + 1:,} to {logged:,}: loss curve and summary leave them out")


def open_run(
    config: Config,
    first_step: int,
    processes: Processes,
    weights: GPT,
    train_data: TokenLoader,
    val_data: TokenLoader,
) -> RunLogger:
    """Creates the run folder, says on the terminal what will be trained, and opens the metrics."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    written = write_config(config, folder, first_step)
    world_size, steps = processes.world_size, config.steps
    accumulation = config.accumulation(world_size)
    tokens = steps * config.tokens_per_step
    epochs = tokens / train_data.tokens_per_epoch
    trained = ""
    if config.lora.rank:
        n_trained = sum(p.numel() for p in weights.parameters() if p.requires_grad)
        trained = f"{readable(n_trained)} of them trained, "
    print(
        f"{config.name}: {readable(weights.n_parameters())} parameters, {trained}"
        f"attention {config.attention.implementation}, {config.precision}, "
        f"{world_size} x {device_name(processes.device)}\n"
        f"{counted(steps, 'step')} of {counted(config.tokens_per_step, 'token')}: "
        f"{_in_groups(world_size, config.context_parallel)} x {counted(accumulation, 'micro-batch')} x "
        f"{counted(config.microbatch, 'sequence')} x {counted(config.seq_len, 'token')}; "
        f"{readable(tokens)} tokens, {epochs:.2f} epochs of {config.data.source}"
    )
    if first_step == steps:
        print(
            f"all {counted(steps, 'step')} are done already: raise total_tokens to go on, or choose another "
            "name= for a new run"
        )
    elif first_step:
        changed = "" if written.name == "config.yaml" else f" with the settings of {written}"
        print(f"continues after step {first_step}{changed}")
    for remark in _remarks(config, val_data):
        print(remark)
    return RunLogger(folder, config.name, steps, first_step, asdict(config), config.wandb)


def _remarks(config: Config, val_data: TokenLoader) -> Iterator[str]:
    """Remarks on settings that are accepted but give less than they say."""
    optim, steps = config.optim, config.steps
    if optim.warmup_steps > steps:
        yield (
            f"optim.warmup_steps={optim.warmup_steps}, but the run has {counted(steps, 'step')}: its "
            f"learning rate ends at {learning_rate(steps - 1, steps, optim):.2e}, below "
            f"optim.learning_rate={optim.learning_rate}; lower optim.warmup_steps, or raise total_tokens"
        )
    if config.evaluation.tokens // config.seq_len > val_data.sequences_per_epoch:
        yield (
            f"evaluation.tokens={config.evaluation.tokens}, but the validation text has "
            f"{val_data.tokens_per_epoch:,} in whole sequences, all of which an evaluation takes: lower "
            "evaluation.tokens, or prepare a larger data.validation_fraction"
        )
    saves, evaluations = config.checkpoint.every_steps, config.evaluation.every_steps
    # 0 where one of them is switched off
    common = math.lcm(saves, evaluations)
    if config.checkpoint.keep_best and common not in (0, saves, evaluations):
        yield (
            f"checkpoint.every_steps={saves} and evaluation.every_steps={evaluations}: the best checkpoint "
            f"is of those at every {common} steps, and the last; make one a multiple of the other"
        )
    kept = config.checkpoint.keep_every_steps
    common = math.lcm(saves, kept)
    if common not in (0, saves, kept):
        yield (
            f"checkpoint.every_steps={saves} and checkpoint.keep_every_steps={kept}: one checkpoint of every "
            f"{common} steps is kept; make the second a multiple of the first"
        )


def run_flops(config: Config, train_data: TokenLoader) -> dict[str, float]:
    """model.flops.flops_ledger of a run; documents are taken to be like those of this rank's first batch.

    If layers have patterns, every pair of tokens is examined: only COUNTED_SEQUENCES sequences are, then.
    """
    documents = None
    if config.separate_documents:
        text, _ = train_data.batch(0)
        text = text[:COUNTED_SEQUENCES] if config.attention.sparse else text
        documents = document_ids(text, load_tokenizer(config.data.tokenizer).end_of_text)
    return flops_ledger(
        config.model,
        config.attention,
        config.seq_len,
        recompute=config.recompute,
        lora_rank=config.lora.rank,
        lora_head=config.lora.embeddings_and_norms,
        document_ids=documents,
    )


def step_metrics(
    config: Config,
    processes: Processes,
    timer: StepTimer,
    flops: dict[str, float],
    *,
    done: int,
    loss: float,
    val_loss: float | None,
    learning_rate: float,
    grad_norm: torch.Tensor,
    skipped_steps: int,
) -> dict:
    """The metrics after `done` steps; times are means over the steps since the last call.

    flops: what run_flops returned.
    """
    seconds = timer.seconds()
    tokens_per_second = config.tokens_per_step / seconds["step_seconds"]
    per_gpu = tokens_per_second / processes.world_size
    allocated, reserved = peak_memory_bytes(processes.device)
    return {
        "step": done,
        "tokens": done * config.tokens_per_step,
        "train_loss": loss,
        "val_loss": val_loss,
        "learning_rate": learning_rate,
        "grad_norm": grad_norm.item(),
        "skipped_steps": skipped_steps,
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_gpu": per_gpu,
        **seconds,
        "mfu": flop_utilization(flops["kept"], per_gpu, config.precision, processes.device),
        "peak_memory_allocated_bytes": allocated,
        "peak_memory_reserved_bytes": reserved,
    }


def finish_run(
    config: Config,
    weights: GPT,
    val_loss: float,
    clock: RunClock,
    processes: Processes,
    flops: dict[str, float],
    *,
    first_step: int,
) -> None:
    """Writes a summary and a sample, draws the loss curve, and says where everything lies.

    first_step: where this attempt began; if that is the last step, the summary stays that of the launch that
    got there.
    """
    # imported here: matplotlib takes a second, for which no run should wait at its start
    from train.plot import draw_loss

    folder, has_trained = config.folder, first_step < config.steps
    logged = [m for m in read_metrics(folder / "metrics.jsonl") if m.get("train_loss") is not None]
    if not logged:
        print(f"{folder / 'metrics.jsonl'} holds no step with a loss: no loss curve, and no summary of it")
    steps = counted(config.steps, "step")
    print(f"\nvalidation loss {val_loss:.4f} after {steps}; {duration(clock.elapsed())} for this run")
    # earlier launches may have had another number of processes and another micro-batch
    measured = [m for m in logged if m["step"] > first_step] or _last_of_as_many_processes(logged)
    summary = _summary(config, measured, val_loss, clock, processes, flops) if measured else None
    # a run none of whose saves had room has nothing to go on from: a summary would forbid it to start over
    is_saved = bool(list_checkpoints(folder / "checkpoints"))
    if summary and is_saved and (has_trained or not (folder / "summary.json").exists()):
        n_gpus = summary["n_gpus"] if processes.device.type == "cuda" else 0
        write_result(folder / "summary.json", [summary], n_gpus)
    if has_trained and summary and summary["mfu_palm"] is not None:
        print(
            f"MFU {summary['mfu_palm']:.1%} (PaLM, nanoGPT), {summary['mfu_causal']:.1%} (causal), "
            f"{summary['mfu_mask']:.1%} (exact mask); {summary['mfu_executed']:.1%} executed"
        )
    if config.export:
        export_run(weights, config.data.tokenizer, folder, config.start.weights)
    is_sampled = False
    if config.sample.tokens:
        tokenizer = load_tokenizer(config.data.tokenizer)
        # a long sample from a large model takes longer than the watchdog lets a step take
        try:
            sample = sample_text(weights, tokenizer, config.sample, config.seed, processes.mark_piece)
        # at positions that training has not seen a model may have numbers that are not finite
        except ValueError as error:
            warn(f"no sample: {error}")
        else:
            (folder / "sample.txt").write_text(sample + "\n", encoding="utf-8")
            print(f"--- sample ---\n{sample}\n--------------")
            is_sampled = True
    # behind what the run is for
    if logged:
        draw_loss({config.name: folder / "metrics.jsonl"}, folder / "loss.png", config.name)
    is_traced = config.steps - first_step >= NEEDED
    _tell_files(config, is_saved=is_saved, is_sampled=is_sampled, is_traced=is_traced)


def _tell_files(config: Config, *, is_saved: bool, is_sampled: bool, is_traced: bool) -> None:
    """Prints where everything lies that this launch made, and, if there is a checkpoint, how to go on."""
    folder = config.folder
    # a file that an earlier launch made after fewer steps is not this one's
    made = {"sample.txt": is_sampled, "checkpoints": is_saved, EXPORT: config.export}
    made |= dict.fromkeys((TRACE, MEMORY), config.profile and is_traced)
    for name, what in (
        ("loss.png", "loss curve"),
        ("sample.txt", "sample"),
        ("metrics.jsonl", "metrics"),
        ("summary.json", "summary"),
        ("checkpoints", "checkpoints"),
        (EXPORT, "to share"),
        (TRACE, "trace"),
        (MEMORY, "memory"),
    ):
        if made.get(name, True) and (folder / name).exists():
            print(f"{what:<12} {folder / name}")
    if is_saved:
        run = shlex.quote(f"run={folder}")
        print(f"{'more text':<12} python -m scripts.sample {run} 'prompt=...'", flush=True)


def _world_size(line: dict) -> int:
    """The number of processes that have measured a line of metrics.jsonl."""
    return round(line["tokens_per_second"] / line["tokens_per_second_per_gpu"])


def _last_of_as_many_processes(lines: list[dict]) -> list[dict]:
    """Of the lines of several launches the last ones, as far as one number of processes has measured them."""
    others = [place for place, line in enumerate(lines) if _world_size(line) != _world_size(lines[-1])]
    return lines[others[-1] + 1 :] if others else lines


def _summary(
    config: Config,
    steps: list[dict],
    val_loss: float,
    clock: RunClock,
    processes: Processes,
    flops: dict[str, float],
) -> dict:
    """One row of a training result; speeds are medians that leave out the first step and its compilation.

    steps: the lines of metrics.jsonl that it is made from. What the clock adds covers this launch alone.
    """
    windows = steps[1:] or steps
    per_second = median(m["tokens_per_second"] for m in windows)
    # of the launch that has measured them
    world_size = _world_size(steps[-1])
    per_gpu = per_second / world_size
    return {
        "implementation": config.attention.implementation,
        "model": f"{config.model.n_layer}x{config.model.n_embd}",
        "seq_len": config.seq_len,
        "batch": config.microbatch,
        "n_gpus": world_size,
        "tokens": config.steps * config.tokens_per_step,
        "tokens_per_second": per_second,
        **{
            f"mfu_{name}": flop_utilization(count, per_gpu, config.precision, processes.device)
            for name, count in flops.items()
        },
        "peak_memory_bytes": steps[-1]["peak_memory_allocated_bytes"],
        "step_ms": median(m["step_seconds"] for m in windows) * 1000,
        "data_ms": median(m["data_seconds"] for m in windows) * 1000,
        **clock.summary(),
        "final_loss": val_loss,
    }


def _in_groups(world_size: int, context_parallel: int) -> str:
    """The processes, by groups of those that share sequences."""
    if context_parallel == 1:
        return counted(world_size, "process")
    return f"{counted(world_size // context_parallel, 'group')} of {counted(context_parallel, 'process')}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
