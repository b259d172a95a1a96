"""Times attention over sequences that several GPUs share, against one GPU alone.

    torchrun --standalone --nproc-per-node=4 -m scripts.benchmark_ring tokens_per_gpu=131072

Each rank first times flash attention alone on tokens_per_gpu tokens, then, together with the others, ring
attention on n times as many. FLOPs count the scores that the mask keeps, for a pattern in whole blocks; share
is the TFLOP/s of a GPU in the ring over those of one GPU alone. tokens_sent: those whose keys and values a
rank sends in a forward pass, of the rank that sends most.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from kernels import block_masks
from model.attention import attend
from model.block_attention import BLOCK_ATTENTION
from model.flops import window_pairs
from model.ring import Ring
from model.ring_attention import ring_attention
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from train.config import DEVICES
from train.distributed import join_processes
from train.overrides import one_of
from train.results import write_result
from train.throughput import between, mark

# queries and keys in a block of a pattern
BLOCK_SIZE = 128


@dataclass
class Arguments:
    tokens_per_gpu: int = argument(131072, "tokens of a sequence that each GPU holds")
    n_head: int = argument(12, "heads of queries")
    n_kv_head: int = argument(12, "heads of keys and values")
    head_dims: list[int] = argument([64, 128], "D")
    windows: list[int] = argument([0], "keys that a query sees; 0 for all before it")
    patterns: list[str] = argument([], "of blocks of 128: window(8192), window(1024) | strided(16)")
    repeats: int = argument(5, "timed passes, after one that is not; the median counts")
    implementation: str = argument("flash", "flash, or reference to try it on a CPU")
    device: str = argument("cuda", "cuda, or cpu to try it")
    out: str = result_file("ring.json", "the rows")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    one_of("device", arguments.device, DEVICES)
    check_some(arguments, "head_dims")
    if not arguments.windows and not arguments.patterns:
        raise ValueError("nothing to measure: windows and patterns must not both be empty, name one")
    check_least(arguments, "tokens_per_gpu", "n_head", "n_kv_head", "head_dims", "repeats")
    # found later, a wrong value would cost the rows measured before it
    if any(window < 0 for window in arguments.windows):
        raise ValueError(f"windows must be at least 0, for all keys before a query, got {arguments.windows}")
    for pattern in arguments.patterns:
        if not block_masks.parse(pattern, 1).causal:
            raise ValueError(f"patterns: {pattern} sees keys behind the query: add & causal()")
    one_of("implementation", arguments.implementation, tuple(BLOCK_ATTENTION))
    if arguments.implementation == "flash" and arguments.device == "cpu":
        raise ValueError("implementation=flash runs on a GPU, got device=cpu: use implementation=reference")
    # a rank holds two pieces of the sequence, for patterns in whole blocks
    unit = 2 * BLOCK_SIZE if arguments.patterns else 2
    if arguments.tokens_per_gpu % unit:
        reason = " for patterns" if arguments.patterns else ""
        raise ValueError(
            f"tokens_per_gpu must be a multiple of {unit}{reason}, got {arguments.tokens_per_gpu}: use "
            f"{-(-arguments.tokens_per_gpu // unit) * unit}"
        )
    with join_processes(arguments.device) as processes:
        if processes.world_size < 2:
            raise ValueError("one process shares nothing: start several with torchrun --nproc-per-node")
        rows = []
        masks = [{"window": window or None} for window in arguments.windows]
        masks += [{"pattern": pattern} for pattern in arguments.patterns]
        n_gpus = processes.world_size if arguments.device == "cuda" else 0
        for head_dim, mask in product(arguments.head_dims, masks):
            rows += measure(arguments, processes, head_dim, **mask)
            if processes.is_main:
                write_result(Path(arguments.out), rows, n_gpus)


def measure(
    arguments: Arguments, processes, head_dim: int, window: int | None = None, pattern: str | None = None
) -> list[dict]:
    """The rows of one shape: of one GPU alone, if the mask is dense, and of all GPUs together."""
    tokens, size, device = arguments.tokens_per_gpu, processes.world_size, processes.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (arguments.n_head, arguments.n_kv_head, arguments.n_kv_head, arguments.n_head)
    q, k, v, dout = (torch.randn(1, tokens, n, head_dim, device=device, dtype=dtype) for n in heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    ring = Ring(dist.group.WORLD, size * tokens, device=device)
    block_mask = pattern and block_masks.parse(pattern, size * tokens, block_size=BLOCK_SIZE, device=device)
    masks = {"window": window, "block_mask": block_mask}
    runs = {"together": lambda: ring_attention(q, k, v, ring, arguments.implementation, **masks)}
    if window is None and pattern is None:
        runs = {"alone": lambda: attend(q, k, v, arguments.implementation), **runs}
    rows = []
    for name, run in runs.items():
        forward, backward = (
            processes.mean(torch.tensor(x, device=device)).item()
            for x in median_seconds(run, (q, k, v), dout, arguments.repeats, device)
        )
        n_gpus = 1 if name == "alone" else size
        pairs = window_pairs(n_gpus * tokens, window)
        if block_mask is not None:
            pairs = len(block_mask.keys) * block_mask.block_size**2
        flop = 4 * arguments.n_head * head_dim * pairs / n_gpus
        row = {
            "implementation": arguments.implementation, "n_gpus": n_gpus, "seq_len": n_gpus * tokens,
            "window": window, "pattern": pattern, "head_dim": head_dim, "heads": arguments.n_head,
            "kv_heads": arguments.n_kv_head, "dtype": str(dtype).removeprefix("torch."),
            "forward_ms": forward * 1e3, "backward_ms": backward * 1e3,
            "forward_tflops": flop / forward / 1e12, "backward_tflops": 2.5 * flop / backward / 1e12,
        }  # fmt: skip
        if name == "together":
            sent = torch.tensor(ring.tokens_sent(**masks), device=device)
            dist.all_reduce(sent, op=dist.ReduceOp.MAX)
            row["tokens_sent"] = sent.item()
        for direction in ("forward", "backward") if rows else ():
            row[f"{direction}_share"] = row[f"{direction}_tflops"] / rows[0][f"{direction}_tflops"]
        rows.append(row)
        if processes.is_main:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def median_seconds(run, qkv, dout, repeats: int, device: torch.device) -> tuple[float, float]:
    """Medians of the forward and of the backward pass, after one of each that is not timed."""
    times, on_gpu = [], device.type == "cuda"
    for _ in range(repeats + 1):
        dist.barrier()
        start = mark(on_gpu)
        out = run()
        middle = mark(on_gpu)
        torch.autograd.grad(out, qkv, dout)
        times.append((start, middle, mark(on_gpu)))
    pairs = [(between(a, b), between(b, c)) for a, b, c in times[1:]]
    return tuple(map(median, zip(*pairs, strict=True)))


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
