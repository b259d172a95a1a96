"""Times whole training steps of GPT-2 on random tokens, one row for each model, length and attention:

    python -m scripts.benchmark_training 'seq_lens=[1024,4096]' out=training.json
    python -m scripts.benchmark_training jobs=true out=jobs.json
    python -m scripts.benchmark_training ladder=true out=ladder.json
    python -m scripts.benchmark_training 'peers=[transformers,liger]' 'models=[llama]' out=peers.json

jobs=true makes one row for each job that the project has an aim for, and gives that aim, set for one H200.
ladder=true makes one row for each switch, from plain PyTorch to the defaults, on the same tokens and initial
weights. peers are the same models by others, compiled (scripts/peers.py). A step is what train/loop.py does
between two log lines: forward, backward, reading the loss back, clipping, AdamW. Its time is the mean over
the timed steps, from the device's own events. A Markdown table is written beside the JSON file.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from model import GPT, AttentionConfig, ModelConfig
from model.attention import IMPLEMENTATIONS
from model.compiled import CompiledModel
from model.flops import flops_ledger
from model.gpt import has_fused_gelu
from model.recompute import RECOMPUTE
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.peers import PEERS, Transformers, build_peer, check_peers, compile_peer, leave_out_missing_peers
from scripts.sizes import check_models, read_model
from train.config import DEVICES, PRECISIONS
from train.distributed import join_processes
from train.logger import readable
from train.optim import OptimConfig, build_optimizer
from train.out_of_memory import is_out_of_memory
from train.overrides import at_least, one_of
from train.passes import EAGER_STEPS, GraphedPasses, Passes, supports_graphs
from train.plot import draw_bars
from train.results import write_result
from train.step import autocast_context, forward_backward, update
from train.throughput import Stopwatch, flop_utilization, peak_memory_bytes, reset_peak_memory
from train.whole_file import write_whole

OPTIM = OptimConfig(
    algorithm="adamw",
    learning_rate=1e-4,
    final_learning_rate_ratio=1.0,
    schedule="cosine",
    warmup_steps=0,
    decay_fraction=0.0,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    momentum=0.95,
    gradient_clip=1.0,
)


@dataclass
class Arguments:
    models: list[str] = argument(["gpt2"], "names of files in conf/model/")
    seq_lens: list[int] = argument([1024], "tokens a sequence")
    bias: str = argument("", "of which matrices: all, qkv or none; empty for the model's own")
    implementations: list[str] = argument(["flash"], "attention: flash, sdpa, reference")
    peers: list[str] = argument([], "the same models by others, behind ours: transformers, liger")
    ladder: bool = argument(False, "rows from plain PyTorch to the defaults, of the first model and length")
    jobs: bool = argument(False, "a row for each job that has an aim, with its own model, length and tokens")
    tokens_per_step: int = argument(32768, "random tokens a step; a longer sequence is a step of its own")
    tokens_per_microbatch: int = argument(
        32768, "tokens of a micro-batch; a longer sequence is one of its own"
    )
    steps: int = argument(20, "timed steps of each row")
    warmup_steps: int = argument(5, "steps before these, the first of which compiles")
    precision: str = argument("bf16", "bf16, fp16 or fp32")
    compile: bool = argument(True, "torch.compile the model")
    cuda_graphs: bool = argument(True, "the passes of a micro-batch as CUDA graphs")
    fused_loss: bool = argument(True, "the head and its loss by our kernel")
    fused_gelu: bool = argument(True, "GELU or a gate fused into the adjacent matrix products")
    low_precision_residual: bool = argument(True, "the residual stream in `precision`, not in float32")
    recompute: list[str] = argument(["none"], "what the backward pass recomputes: none, selective, full")
    device: str = argument("cuda", "cuda or cpu")
    out: str = result_file(
        "",
        "JSON file for the rows, a table beside it, and for a ladder a picture; empty for none",
        picture=True,
        table=True,
    )
    overwrite: bool = argument(False, OVERWRITE)


@dataclass(frozen=True)
class Step:
    """The settings in which two rows of the same model and length can differ."""

    implementation: str
    precision: str
    compile: bool
    cuda_graphs: bool
    fused_loss: bool
    fused_gelu: bool
    low_precision_residual: bool
    recompute: str


@dataclass(frozen=True)
class Job:
    """A training job that users run, and its aim on one H200."""

    model: str
    seq_len: int
    aim: str = ""
    tokens_per_microbatch: int = 32768
    tokens_per_step: int = 32768


JOBS = (
    Job("gpt2", 1024, "625K tokens/s, 12.5 GiB"),
    Job("gpt2", 4096, "540K tokens/s"),
    Job("gpt2", 32768, "205K tokens/s"),
    Job("gpt2_medium", 1024, "230K tokens/s"),
    # without recomputation, the step fits as two micro-batches
    Job("gpt2_xl", 1024, "50% MFU (PaLM)", tokens_per_microbatch=16384),
    Job("gpt2", 262144, "trains on one GPU"),
)
# arguments that a job sets
OF_JOBS = ("models", "seq_lens", "tokens_per_microbatch", "tokens_per_step")

PLAIN = Step(
    "reference",
    "fp32",
    compile=False,
    cuda_graphs=False,
    fused_loss=False,
    fused_gelu=False,
    low_precision_residual=False,
    recompute="none",
)
# each rung keeps what earlier rungs switched on
LADDER = (
    ("plain PyTorch, float32 (TF32)", {}),
    ("bf16 matrix products", {"precision": "bf16"}),
    ("flash attention", {"implementation": "flash"}),
    ("torch.compile", {"compile": True}),
    ("fused head and loss", {"fused_loss": True}),
    ("bf16 residual stream", {"low_precision_residual": True}),
    ("GELU inside of products", {"fused_gelu": True}),
    ("CUDA graphs", {"cuda_graphs": True}),
)
# settings that a CPU needs in place of the defaults
ON_A_CPU = "implementations=[sdpa] fused_loss=false"
# arguments that a ladder sets
RUNGS = ("implementations", "peers", *[item.name for item in fields(Step)][1:])


def main(arguments: Arguments) -> None:
    check_models(arguments.models)
    one_of("device", arguments.device, DEVICES)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device=cuda, but torch sees no GPU: use device=cpu {ON_A_CPU}")
    one_of("precision", arguments.precision, PRECISIONS)
    check_counts(arguments)
    wanted = list(aims(arguments))
    for _, given in wanted:
        check_rows(given)
        check_cpu(given)
    leave_out_missing_peers(arguments.peers)
    rows = []
    for aim, given in wanted:
        for label, name, seq_len, step in steps_to_measure(given):
            rows.append({"label": label, **aim, **measure(given, name, seq_len, step)})
            print(describe(rows[-1]), flush=True)
            if arguments.out:
                write_result(Path(arguments.out), rows, n_gpus=int(arguments.device == "cuda"))
                write_whole(Path(arguments.out).with_suffix(".md"), table(rows))
    if arguments.ladder and arguments.out:
        bars = {row["label"]: row["tokens_per_second"] for row in rows}
        title = f"{rows[0]['model']}, {rows[0]['seq_len']} tokens a sequence: what each switch adds"
        draw_bars(bars, Path(arguments.out).with_suffix(".png"), title, "tokens/s")


def aims(arguments: Arguments):
    """Yields, for each of JOBS or for the arguments as given, the aim for its rows, and its arguments."""
    if not arguments.jobs:
        yield {}, arguments
        return
    usual = Arguments()
    own = [name for name in (*OF_JOBS, "ladder") if getattr(arguments, name) != getattr(usual, name)]
    if own:
        raise ValueError(f"jobs=true brings its own {', '.join(OF_JOBS)}, got {', '.join(own)}: leave it out")
    for job in JOBS:
        yield (
            {"aim": job.aim},
            replace(
                arguments,
                models=[job.model],
                seq_lens=[job.seq_len],
                tokens_per_microbatch=job.tokens_per_microbatch,
                tokens_per_step=job.tokens_per_step,
            ),
        )


def check_counts(arguments: Arguments) -> None:
    """Raises ValueError for unusable counts of steps or processes, and for what a ladder would ignore."""
    at_least("steps", arguments.steps, 1)
    at_least("warmup_steps", arguments.warmup_steps, 0)
    # a ladder has a row with CUDA graphs
    is_graphed = arguments.device == "cuda" and (arguments.cuda_graphs or arguments.ladder)
    if is_graphed and arguments.warmup_steps <= EAGER_STEPS:
        raise ValueError(
            f"warmup_steps={arguments.warmup_steps}: with cuda_graphs=true graphs are captured in step "
            f"{EAGER_STEPS + 1}, which is not to be timed: use warmup_steps={EAGER_STEPS + 1}, or "
            "cuda_graphs=false"
        )
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"one process is timed, got {processes}: start it without torchrun")
    if not arguments.ladder:
        return
    for key in ("models", "seq_lens"):
        if len(getattr(arguments, key)) != 1:
            raise ValueError(
                f"ladder=true measures a single one, got {key}={getattr(arguments, key)}: name one"
            )
    usual = Arguments()
    for key in RUNGS:
        if getattr(arguments, key) != getattr(usual, key):
            raise ValueError(f"ladder=true sets {key} itself, got {getattr(arguments, key)}: leave it out")


def check_rows(arguments: Arguments) -> None:
    """Raises ValueError, before anything is measured, for a row that cannot be measured."""
    check_some(arguments, "models", "seq_lens", "implementations", "recompute")
    for key, choices in (("implementations", IMPLEMENTATIONS), ("recompute", RECOMPUTE)):
        for value in getattr(arguments, key):
            one_of(key, value, choices)
    check_least(arguments, "tokens_per_step", "tokens_per_microbatch", "seq_lens")
    check_peers(arguments.peers, [config_of(arguments, name, 1) for name in arguments.models])
    for seq_len in arguments.seq_lens:
        tokens_per_step, tokens_per_microbatch = tokens_of(arguments, seq_len)
        for key, value, of, unit in (
            ("tokens_per_microbatch", tokens_per_microbatch, "seq_len", seq_len),
            ("tokens_per_step", tokens_per_step, "tokens_per_microbatch", tokens_per_microbatch),
        ):
            if value % unit:
                raise ValueError(f"{key}={value} must be a multiple of {of}={unit}: change one of them")


def check_cpu(arguments: Arguments) -> None:
    """Raises ValueError for rows on a CPU that need a GPU."""
    steps = [step for *_, step in steps_to_measure(arguments)]
    if arguments.device == "cpu" and any(step.implementation == "flash" or step.fused_loss for step in steps):
        ladder = ", without ladder=true" if arguments.ladder else ""
        raise ValueError(
            f"flash attention and the fused loss run on a GPU, got device=cpu: use {ON_A_CPU}{ladder}"
        )


def config_of(arguments: Arguments, name: str, seq_len: int) -> ModelConfig:
    config = read_model(name, seq_len)
    return replace(config, bias=arguments.bias or config.bias)


def tokens_of(arguments: Arguments, seq_len: int) -> tuple[int, int]:
    """Tokens of a step and of a micro-batch, each at least one sequence of this length."""
    return max(arguments.tokens_per_step, seq_len), max(arguments.tokens_per_microbatch, seq_len)


def steps_to_measure(arguments: Arguments):
    """(label, model, length, step) of every row."""
    if arguments.ladder:
        step = PLAIN
        for label, switch in LADDER:
            step = replace(step, **switch)
            yield label, arguments.models[0], arguments.seq_lens[0], step
        return
    rows = product(arguments.models, arguments.seq_lens, arguments.implementations, arguments.recompute)
    for name, seq_len, implementation, recompute in rows:
        step = Step(
            implementation,
            arguments.precision,
            arguments.compile,
            arguments.cuda_graphs,
            arguments.fused_loss,
            arguments.fused_gelu,
            arguments.low_precision_residual,
            recompute,
        )
        label = implementation if recompute == "none" else f"{implementation}, recompute={recompute}"
        yield label, name, seq_len, step
    theirs = replace(PLAIN, precision=arguments.precision, compile=arguments.compile)
    for peer, name, seq_len in product(arguments.peers, arguments.models, arguments.seq_lens):
        yield peer, name, seq_len, replace(theirs, implementation=peer)


def measure(arguments: Arguments, name: str, seq_len: int, step: Step) -> dict:
    """One row, on the same random tokens and initial weights as the other rows of this model and length."""
    tokens_per_step, tokens_per_microbatch = tokens_of(arguments, seq_len)
    config = config_of(arguments, name, seq_len)
    row = {
        "model": name,
        "bias": config.bias,
        "seq_len": seq_len,
        "batch": tokens_per_microbatch // seq_len,
        "tokens_per_step": tokens_per_step,
        "n_gpus": int(arguments.device == "cuda"),
        **asdict(step),
    }
    with join_processes(arguments.device) as processes:
        device = processes.device
        forget_earlier_rows(device)
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        text = torch.randint(config.vocab_size, (tokens_per_step // seq_len, seq_len + 1), device=device)
        inputs, targets = text[:, :-1], text[:, 1:]
        accumulation = tokens_per_step // tokens_per_microbatch

        def train_step() -> float:
            _, loss = forward_backward(passes, inputs, targets, processes)
            update(optimizer, scaler, OPTIM.learning_rate, OPTIM.gradient_clip, float("inf"))
            return loss

        try:
            model = build_model(config, step, device)
            if isinstance(model, GPT):
                # record what ran, not what was asked for: recomputed layers do not fuse GELU
                row["fused_gelu"] = model.blocks[0].mlp.fused_gelu and step.precision != "fp32"
            passes, optimizer, scaler = build_training(model, step, accumulation, device)
            times = time_steps(train_step, arguments.warmup_steps, arguments.steps, device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {**row, "tokens_per_second": None}
        step_seconds, first_step_seconds, loss = times
        per_second = tokens_per_step / step_seconds
        flops = flops_ledger(config, attention_of(step), seq_len, recompute=step.recompute)
        return {
            **row,
            "cuda_graphs": passes.is_graphed,
            "tokens_per_second": per_second,
            **{
                f"mfu_{name}": flop_utilization(count, per_second, step.precision, device)
                for name, count in flops.items()
            },
            "peak_memory_bytes": peak_memory_bytes(device)[0],
            "step_ms": step_seconds * 1000,
            "first_step_seconds": first_step_seconds,
            "final_loss": loss,
        }


def forget_earlier_rows(device: torch.device) -> None:
    """Frees the memory of earlier rows, and what torch has compiled for them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak_memory(device)
    torch.compiler.reset()


def attention_of(step: Step) -> AttentionConfig:
    """Peers have PyTorch's."""
    return AttentionConfig(implementation="sdpa" if step.implementation in PEERS else step.implementation)


def build_model(config: ModelConfig, step: Step, device: torch.device) -> GPT | Transformers:
    model = GPT(
        config,
        attention_of(step),
        fused_loss=step.fused_loss,
        fused_gelu=step.fused_gelu and has_fused_gelu(device),
        low_precision_residual=step.low_precision_residual,
        recompute=step.recompute,
    )
    return (build_peer(step.implementation, model) if step.implementation in PEERS else model).to(device)


def build_training(model: GPT | Transformers, step: Step, accumulation: int, device: torch.device):
    """(passes of a micro-batch, optimizer, scaler of the loss); accumulation: micro-batches in a step."""
    optimizer = build_optimizer(model, OPTIM)
    if step.compile:
        # ours as train/build.py
        ours = isinstance(model, GPT)
        whole = not step.cuda_graphs
        model = CompiledModel(model, whole=whole) if ours else compile_peer(step.implementation, model)
    scaler = torch.amp.GradScaler(device.type, enabled=step.precision == "fp16")
    autocast = partial(autocast_context, device.type, step.precision)
    kind = GraphedPasses if step.cuda_graphs and supports_graphs(device) else Passes
    return kind(model, accumulation, autocast, scaler), optimizer, scaler


def time_steps(
    train_step: Callable[[], float], warmup_steps: int, steps: int, device: torch.device
) -> tuple[float, float, float]:
    """Mean seconds of the steps after warm-up, seconds of the first step of all, and the last one's loss."""
    first, watch = Stopwatch(device), Stopwatch(device)
    for index in range(warmup_steps + steps):
        if index == warmup_steps:
            watch.start()
        loss = train_step()
        if index == 0:
            first_seconds = first.seconds()
    return watch.seconds() / steps, first_seconds, loss


def describe(row: dict) -> str:
    model = f"{row['model']:<11} bias {row['bias']:<4}"
    job = f"{model} T {row['seq_len']:<6} B {row['batch']:<3} {row['label']:<30}"
    if row["tokens_per_second"] is None:
        return f"{job} out of memory"
    mfu = "-" if row["mfu_palm"] is None else f"{row['mfu_palm']:.1%}"
    return (
        f"{job} {readable(row['tokens_per_second'])} tokens/s  MFU {mfu}  {row['step_ms']:.1f} ms  "
        f"{row['peak_memory_bytes'] / 2**30:.1f} GiB  loss {row['final_loss']:.4f}  "
        f"first step {row['first_step_seconds']:.0f} s"
    )


def table(rows: list[dict]) -> str:
    """The rows in Markdown, one line each."""
    lines = [
        "| job | | tokens/s | step | MFU (PaLM) | MFU (causal) | peak memory | first step | aim on an H200 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        job = f"{row['model']}, T {row['seq_len']:,}, B {row['batch']}, {row['tokens_per_step']:,} tokens"
        values = ["out of memory", *[""] * 5]
        if row["tokens_per_second"] is not None:
            shares = [row["mfu_palm"], row["mfu_causal"]]
            values = [
                readable(row["tokens_per_second"]),
                f"{row['step_ms']:.1f} ms",
                *("" if share is None else f"{share:.1%}" for share in shares),
                f"{row['peak_memory_bytes'] / 2**30:.1f} GiB",
                f"{row['first_step_seconds']:.0f} s",
            ]
        lines.append(f"| {' | '.join([job, row['label'], *values, row.get('aim', '')])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
