"""Times training steps of GPT-2, one row for each model, length and attention:
python -m scripts.benchmark_training 'seq_lens=[1024,4096]' out=training.json"""

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from omegaconf import OmegaConf

from model import GPT, AttentionConfig, ModelConfig
from scripts.arguments import argument, run_script
from train.distributed import join_processes
from train.logger import readable
from train.loop import autocast_context, forward_backward, update
from train.optim import OptimConfig, build_optimizer
from train.results import write_result
from train.throughput import StepTimer, model_flop_utilization, peak_memory_bytes

SIZES = Path(__file__).resolve().parent.parent / "conf" / "model"
OPTIM = OptimConfig(
    learning_rate=1e-4,
    final_learning_rate_ratio=1.0,
    schedule="cosine",
    warmup_steps=0,
    decay_fraction=0.0,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    gradient_clip=1.0,
)


@dataclass
class Arguments:
    models: list[str] = argument(["gpt2"], "names of files in conf/model/")
    seq_lens: list[int] = argument([1024], "tokens a sequence")
    implementations: list[str] = argument(["flash", "sdpa"], "attention: flash, sdpa, reference")
    tokens_per_step: int = argument(32768, "random tokens a step, one micro-batch")
    steps: int = argument(20, "timed steps of each row, after as many for warm-up as compilation takes")
    precision: str = argument("bf16", "bf16, fp16 or fp32")
    compile: bool = argument(True, "torch.compile the model")
    device: str = argument("cuda", "cuda or cpu")
    out: str = argument("", "JSON file for the rows; empty for none")


def main(arguments: Arguments) -> None:
    sizes = sorted(path.stem for path in SIZES.glob("*.yaml"))
    unknown = [name for name in arguments.models if name not in sizes]
    if unknown:
        raise ValueError(f"models must be of {', '.join(sizes)}, got {', '.join(unknown)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU: use device=cpu implementations=[sdpa]")
    rows = []
    for name in arguments.models:
        for seq_len in arguments.seq_lens:
            for implementation in arguments.implementations:
                row = measure(arguments, name, seq_len, implementation)
                rows.append(row)
                mfu = "-" if row["mfu_palm"] is None else f"{row['mfu_palm']:.1%}"
                print(
                    f"{name}  T {seq_len}  B {row['batch']}  {implementation:<9}  "
                    f"{readable(row['tokens_per_second'])} tokens/s  MFU {mfu}  "
                    f"{row['peak_memory_bytes'] / 2**30:.1f} GiB  {row['step_ms']:.1f} ms",
                    flush=True,
                )
                if arguments.out:
                    write_result(Path(arguments.out), rows)


def measure(arguments: Arguments, name: str, seq_len: int, implementation: str) -> dict:
    """One row: the median step of a model in training, on the same random tokens in every row."""
    if arguments.tokens_per_step % seq_len:
        raise ValueError(f"tokens_per_step={arguments.tokens_per_step} must be a multiple of {seq_len}")
    size = OmegaConf.create({"seq_len": seq_len, "model": OmegaConf.load(SIZES / f"{name}.yaml")})
    config = ModelConfig(**OmegaConf.to_container(size.model, resolve=True))
    with join_processes(arguments.device) as processes:
        device = processes.device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        batch = arguments.tokens_per_step // seq_len
        text = torch.randint(config.vocab_size, (batch, seq_len + 1), device=device)
        weights = GPT(config, AttentionConfig(implementation=implementation)).to(device)
        model = torch.compile(weights) if arguments.compile else weights
        optimizer = build_optimizer(weights, OPTIM)
        scaler = torch.amp.GradScaler(device.type, enabled=arguments.precision == "fp16")
        autocast = partial(autocast_context, device.type, arguments.precision)
        timer, seconds = StepTimer(device), []
        # the first steps compile, allocate and warm the clocks up
        for step in range(-max(3, arguments.steps // 2), arguments.steps):
            timer.start()
            timer.finish("data")
            _, loss = forward_backward(model, text[:, :-1], text[:, 1:], 1, processes, autocast, scaler)
            timer.finish("forward_backward")
            update(optimizer, scaler, OPTIM.learning_rate, OPTIM.gradient_clip, float("inf"))
            timer.finish("optimizer")
            elapsed = timer.seconds()["step_seconds"]
            if step >= 0:
                seconds.append(elapsed)
        per_second = arguments.tokens_per_step / median(seconds)
        mfu = {
            key: model_flop_utilization(
                config, seq_len, arguments.precision, per_second, device, causal=causal
            )
            for key, causal in (("mfu_palm", False), ("mfu_causal", True))
        }
        return {
            "implementation": implementation,
            "model": name,
            "seq_len": seq_len,
            "batch": batch,
            "n_gpus": 1,
            "precision": arguments.precision,
            "compile": arguments.compile,
            "tokens_per_second": per_second,
            **mfu,
            "peak_memory_bytes": peak_memory_bytes(device)[0],
            "step_ms": median(seconds) * 1000,
            "final_loss": loss,
        }


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
