"""Times exact attention, forward and backward, against what PyTorch offers, in one process on one GPU.

    python -m scripts.benchmark_attention out=docs/results/h200/attention.json
    python -m scripts.benchmark_attention implementations=[portable,fa2] head_dims=[64] dropout_p=0.1

Implementations: ours (what flash_attention chooses), hopper, portable, cudnn and fa2 (backends of
scaled_dot_product_attention), flex (FlexAttention, compiled), eager (attention_reference). They take turns on
the same inputs, `repeats` times; a row holds medians. Speed counts 4 B H T T D operations forward, half of it
when causal, and 2.5 times as many backward. max_error is against float64, on the first batch and head.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.flash_attention import flash_attention
from kernels.operators import IMPLEMENTATIONS, use_implementation
from kernels.reference import attention_reference
from scripts.arguments import argument, run_script
from train.results import write_result


@dataclass(kw_only=True, slots=True)
class Arguments:
    implementations: list[str] = argument(
        ["portable", "cudnn", "fa2", "flex"], "of ours hopper portable cudnn fa2 flex eager"
    )
    head_dims: list[int] = argument([64, 128], "D")
    seq_lens: list[int] = argument([1024, 4096, 16384], "T")
    causal: list[bool] = argument([True, False], "masks: causal, full or both")
    tokens: int = argument(16384, "B * T")
    width: int = argument(2048, "H * D")
    dtype: str = argument("bf16", "bf16 or fp16")
    window: int | None = argument(None, "keys that a query sees; ours and flex only")
    dropout_p: float = argument(0.0, "ours and fa2 only")
    repeats: int = argument(3, "turns of each implementation")
    plot: bool = argument(True, "also draw the results, as OUT with the ending .png")
    out: str = argument("attention.json", "result file")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
# of one implementation's turn, in milliseconds
WARMUP_MS, TURN_MS = 5, 20


def main(arguments: Arguments) -> None:
    if not torch.cuda.is_available():
        raise ValueError("benchmark_attention needs a CUDA GPU; none was found")
    if arguments.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {arguments.dtype}")
    rows = []
    for head_dim, causal, seq_len in product(arguments.head_dims, arguments.causal, arguments.seq_lens):
        for row in measure(arguments, head_dim, causal, seq_len):
            rows.append(row)
            print_row(row)
    out = Path(arguments.out)
    result = write_result(out, rows)
    if arguments.plot:
        plot(rows, result, out.with_suffix(".png"))


def measure(arguments: Arguments, head_dim: int, causal: bool, seq_len: int) -> list[dict]:
    """One row for each implementation that can run this shape."""
    batch, heads = arguments.tokens // seq_len, arguments.width // head_dim
    window, dropout_p, dtype = arguments.window, arguments.dropout_p, DTYPES[arguments.dtype]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seq_len, heads, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    dout = torch.randn_like(q)
    truth = attention_reference(
        *(x[:1, :, :1].detach().double() for x in (q, k, v)), causal=causal, window=window
    )
    timings, errors = {}, {}
    for name in arguments.implementations:
        attention = build(name, causal, window, dropout_p, seq_len)
        timings[name] = (attention, [], [])
    for _ in range(arguments.repeats):
        for name, (attention, forward_ms, backward_ms) in list(timings.items()):
            try:
                # around the backward pass too: an operator chooses anew in each
                with use_implementation(name if name in IMPLEMENTATIONS else None):
                    # compile before anything is timed
                    torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
                    forward_ms.append(median_ms(lambda f=attention: f(q, k, v)))
                    out = attention(q, k, v)
                    backward_ms.append(
                        median_ms(lambda o=out: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))
                    )
                if dropout_p == 0.0:
                    errors[name] = (out[:1, :, :1].double() - truth).abs().max().item()
            except (RuntimeError, ValueError) as error:
                print(f"{name} cannot run this: {str(error).splitlines()[0]}")
                del timings[name]
    flop = 4 * batch * heads * seq_len**2 * head_dim * (visible_share(seq_len, window) if causal else 1.0)
    return [
        {
            "implementation": name,
            "head_dim": head_dim,
            "causal": causal,
            "seq_len": seq_len,
            "batch": batch,
            "heads": heads,
            "dtype": arguments.dtype,
            "window": window,
            "dropout_p": dropout_p,
            "forward_ms": statistics.median(forward_ms),
            "backward_ms": statistics.median(backward_ms),
            "forward_tflops": flop / statistics.median(forward_ms) / 1e9,
            "backward_tflops": 2.5 * flop / statistics.median(backward_ms) / 1e9,
            "max_error": errors.get(name),
        }
        for name, (_, forward_ms, backward_ms) in timings.items()
    ]


def visible_share(seq_len: int, window: int | None) -> float:
    """The share of all scores that a causal mask keeps; one half without a window, as all papers count."""
    if window is None or window >= seq_len:
        return 0.5
    return (window * seq_len - window * (window - 1) / 2) / seq_len**2


def build(name: str, causal: bool, window: int | None, dropout_p: float, seq_len: int) -> Callable:
    """An implementation as a function of q, k, v (B, T, H, D)."""
    if name in ("ours", "hopper", "portable"):

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q, k, v, causal=causal, window=window, dropout_p=dropout_p)

        return ours
    if name == "eager":
        return lambda q, k, v: attention_reference(q, k, v, causal=causal, window=window)
    if name == "flex":
        mask = block_mask(seq_len, window) if causal else None
        # else the ninth shape runs without a kernel
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)

        def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return compiled(*heads_first, block_mask=mask).transpose(1, 2)

        return flex
    if name not in BACKENDS:
        raise ValueError(f"implementations must be of ours hopper portable cudnn fa2 flex eager, got {name}")

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(BACKENDS[name]):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, dropout_p=dropout_p)
        return out.transpose(1, 2)

    return sdpa


@cache
def block_mask(seq_len: int, window: int | None):
    def visible(b, h, i, j):
        return (j <= i) & (j > i - window) if window is not None else j <= i

    return create_block_mask(visible, None, None, seq_len, seq_len, device="cuda")


def median_ms(function: Callable) -> float:
    return triton.testing.do_bench(function, warmup=WARMUP_MS, rep=TURN_MS, return_mode="median")


def print_row(row: dict) -> None:
    mask = "causal" if row["causal"] else "full"
    print(
        f"D {row['head_dim']:3} {mask:6} T {row['seq_len']:6} {row['implementation']:9} "
        f"{row['forward_tflops']:4.0f} / {row['backward_tflops']:4.0f} TFLOP/s "
        f"{row['forward_ms']:8.3f} / {row['backward_ms']:8.3f} ms",
        flush=True,
    )


def plot(rows: list[dict], result: dict, path: Path) -> None:
    """Bars of TFLOP/s, forward above backward, one column for each head_dim and mask."""
    import matplotlib.pyplot as plt

    columns = sorted({(row["head_dim"], row["causal"]) for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(2, len(columns), figsize=(4 * len(columns), 6), squeeze=False, sharey="row")
    for column, (head_dim, causal) in enumerate(columns):
        chosen = [row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)]
        lengths = sorted({row["seq_len"] for row in chosen})
        for line, direction in enumerate(("forward", "backward")):
            axis = axes[line, column]
            for index, name in enumerate(names):
                speeds = {
                    row["seq_len"]: row[f"{direction}_tflops"]
                    for row in chosen
                    if row["implementation"] == name and row[f"{direction}_tflops"] is not None
                }
                x = [
                    lengths.index(length) + (index - (len(names) - 1) / 2) * 0.8 / len(names)
                    for length in speeds
                ]
                axis.bar(x, list(speeds.values()), 0.8 / len(names), label=name)
            axis.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths])
            axis.set_title(f"{direction}, D {head_dim}, {'causal' if causal else 'full'}")
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[1, 0].set_ylabel("TFLOP/s")
    figure.suptitle(f"{result['gpu']}, torch {result['torch']}, triton {result['triton']}", x=0.01, ha="left")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper right", ncols=len(names), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
