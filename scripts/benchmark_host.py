"""Times how long a call of attention takes on the host, in Python and launches, with an almost idle GPU.

    python -m scripts.benchmark_host out=host.json

The sequence is short, so that the host takes the time; the calls of a turn follow each other without waiting
for the GPU. Where a call takes the host longer than a layer's kernels take the GPU, the GPU waits: in eager
models, with small batches, in generation.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kernels.operators import IMPLEMENTATIONS, use_implementation
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.benchmark_attention import BACKENDS, NAMES, build
from scripts.flash_attn_4 import leave_out_if_missing
from scripts.sdpa import sdpa
from train.results import write_result


@dataclass(kw_only=True, slots=True)
class Arguments:
    implementations: list[str] = argument(
        ["ours", "portable", "cudnn", "fa2", "flex", "fa4"], "of " + " ".join(NAMES)
    )
    head_dims: list[int] = argument([64, 128], "D")
    batch: int = argument(1, "B")
    seq_len: int = argument(256, "T")
    width: int = argument(768, "H * D")
    calls: int = argument(20, "of a turn")
    turns: int = argument(40, "of each implementation, of which the median counts")
    out: str = result_file("host.json", "result file")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check_some(arguments, "head_dims")
    if not torch.cuda.is_available():
        raise ValueError("benchmark_host needs a CUDA GPU; none was found")
    leave_out_if_missing(arguments.implementations)
    check_some(arguments, "implementations")
    check_least(arguments, "head_dims", "batch", "seq_len", "width", "calls", "turns")
    for head_dim in arguments.head_dims:
        if arguments.width % head_dim:
            raise ValueError(f"width={arguments.width} must be a multiple of head_dim {head_dim}: change one")
    rows = []
    for head_dim in arguments.head_dims:
        rows += measure(arguments, head_dim)
        write_result(Path(arguments.out), rows)


def measure(arguments: Arguments, head_dim: int) -> list[dict]:
    """A row for each implementation; they take turns, so that the host's clock is the same for all."""
    torch.manual_seed(0)
    shape = arguments.batch, arguments.seq_len, arguments.width // head_dim, head_dim
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    times = {name: ([], []) for name in arguments.implementations}
    functions = {name: function(name, arguments.seq_len) for name in times}
    for _ in range(arguments.turns + 1):
        for name, (forward, both) in times.items():
            attention = functions[name]
            with setting(name):
                with torch.no_grad():
                    forward.append(microseconds(lambda: attention(*qkv), arguments.calls))  # noqa: B023
                both.append(
                    microseconds(lambda: torch.autograd.grad(attention(*qkv), qkv, dout), arguments.calls)  # noqa: B023
                )
    rows = []
    for name, (forward, both) in times.items():
        # the first turn compiles
        row = {"implementation": name, "head_dim": head_dim, "causal": True, "batch": arguments.batch}
        row |= {"seq_len": arguments.seq_len, "heads": shape[2], "dtype": "bf16"}
        row |= {"forward_us": median(forward[1:]), "forward_backward_us": median(both[1:])}
        row |= {"least_forward_us": min(forward[1:]), "least_forward_backward_us": min(both[1:])}
        rows.append(row)
        print(
            f"D {head_dim:3} {name:9} {row['forward_us']:6.0f} us forward, "
            f"{row['forward_backward_us']:6.0f} us forward and backward",
            flush=True,
        )
    return rows


def setting(name: str):
    """The context that selects an implementation; entered once per turn, not once per call."""
    if name in BACKENDS:
        return sdpa_kernel(BACKENDS[name])
    return use_implementation(name) if name in IMPLEMENTATIONS else nullcontext()


def function(name: str, seq_len: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of q, k and v (B, T, H, D)."""
    if name not in BACKENDS:
        return build(name, True, None, 0.0, seq_len)
    # `setting` selects the backend, once per turn
    return partial(sdpa, is_causal=True)


def microseconds(call: Callable, calls: int) -> float:
    """The host's time per call, the mean over several calls."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
