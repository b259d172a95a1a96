"""Times exact attention, forward and backward, against what PyTorch offers, in one process on one GPU.

    python -m scripts.benchmark_attention out=docs/results/h200/attention.json
    python -m scripts.benchmark_attention implementations=[portable,fa2] head_dims=[64] dropout_p=0.1

Implementations: ours (what flash_attention chooses), hopper, portable, cudnn and fa2 (backends of
scaled_dot_product_attention), flex (FlexAttention, compiled), fa4 (the package flash-attn-4, where it is
installed), eager (attention_reference). They take turns on the same inputs, `repeats` times; a row holds
medians. A turn first pauses, so that the clock recovers from the previous turn, and then times replays of a
CUDA graph of one call, with a cold L2: the GPU's own time, as in a captured or deeply queued training step,
without the time Python takes to issue it. Speed counts 4 B H T T D operations forward, half as many when
causal, and 2.5 times as many backward. max_error is against float64, on the first batch and head. The first
row is GPT-2's own shape: B 32, H 12, D 64, T 1024, packed qkv.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from kernels.flash_attention import flash_attention
from kernels.operators import IMPLEMENTATIONS, use_implementation
from kernels.reference import attention_reference
from model.flops import window_pairs
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.flash_attn_4 import flash_attn_4, leave_out_if_missing
from scripts.flex import compiled_flex
from scripts.sdpa import sdpa
from scripts.timing import capture, medians_in_turns
from train.results import machine, write_result

NAMES = ("ours", "hopper", "portable", "cudnn", "fa2", "flex", "fa4", "eager")
# implementations that support an option; the others would ignore it, and their rows would still claim it
ABLE = {
    "window": ("ours", "hopper", "portable", "flex", "fa4", "eager"),
    "dropout_p": ("ours", "hopper", "portable", "fa2"),
}


@dataclass(kw_only=True, slots=True)
class Shapes:
    """What attention is measured on, by this script and by scripts.compare_kernels."""

    head_dims: list[int] = argument([64, 128], "D")
    seq_lens: list[int] = argument([1024, 4096, 16384], "T")
    causal: list[bool] = argument([True, False], "masks: causal, full or both")
    tokens: int = argument(16384, "B * T")
    width: int = argument(2048, "H * D")
    gpt2: bool = argument(True, "GPT-2's own shape as well")
    dtype: str = argument("bf16", "bf16 or fp16")
    window: int | None = argument(None, "keys that a query sees")
    dropout_p: float = argument(0.0, "rate of dropout")


@dataclass(kw_only=True, slots=True)
class Arguments(Shapes):
    implementations: list[str] = argument(
        ["ours", "portable", "cudnn", "fa2", "flex", "fa4"], "of " + " ".join(NAMES)
    )
    window: int | None = argument(None, f"keys that a query sees; {' '.join(ABLE['window'])} only")
    dropout_p: float = argument(0.0, f"{' '.join(ABLE['dropout_p'])} only")
    repeats: int = argument(5, "turns of each implementation")
    plot: bool = argument(True, "also draw the results, as OUT with the ending .png")
    out: str = result_file("attention.json", "result file", picture=True)
    overwrite: bool = argument(False, OVERWRITE)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


class Shape(NamedTuple):
    """A shape to measure. packed: q, k and v are views of one (B, T, 3, H, D) tensor."""

    batch: int
    seq_len: int
    heads: int
    head_dim: int
    causal: bool
    packed: bool


GPT2 = Shape(32, 1024, 12, 64, True, True)


def main(arguments: Arguments) -> None:
    check_least(arguments, "repeats")
    for key, able in ABLE.items():
        unable = [name for name in arguments.implementations if name not in able]
        if getattr(arguments, key) and unable:
            raise ValueError(
                f"{key}={getattr(arguments, key)} is measured with {' '.join(able)} only: leave "
                f"{' '.join(unable)} out of implementations"
            )
    check_shapes(arguments)
    if not torch.cuda.is_available():
        raise ValueError("benchmark_attention needs a CUDA GPU; none was found")
    leave_out_if_missing(arguments.implementations)
    check_some(arguments, "implementations")
    rows, out = [], Path(arguments.out)
    for shape in shapes(arguments):
        for row in measure(arguments, shape):
            rows.append(row)
            print_row(row)
        if rows:
            result = write_result(out, rows)
    if not rows:
        raise ValueError(
            f"implementations={arguments.implementations}: none can run what is asked for, as printed above; "
            "name others, or change the shapes"
        )
    if arguments.plot:
        plot(rows, result, out.with_suffix(".png"))


def check_shapes(arguments: Shapes) -> None:
    """Raises ValueError for what cannot be measured, whatever measures it; `shapes` does for the rest."""
    check_least(arguments, "seq_lens", "head_dims", "tokens", "width")
    if arguments.window is not None and False in arguments.causal:
        raise ValueError(f"window={arguments.window} looks back only: use causal=[true]")
    if arguments.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {arguments.dtype}")


def shapes(arguments: Shapes) -> list[Shape]:
    chosen = [GPT2] if arguments.gpt2 else []
    for head_dim, causal, seq_len in product(arguments.head_dims, arguments.causal, arguments.seq_lens):
        if arguments.tokens % seq_len or arguments.width % head_dim:
            raise ValueError(
                f"tokens={arguments.tokens} must be a multiple of seq_len {seq_len}, and "
                f"width={arguments.width} of head_dim {head_dim}: change one"
            )
        batch, heads = arguments.tokens // seq_len, arguments.width // head_dim
        chosen.append(Shape(batch, seq_len, heads, head_dim, causal, False))
    if not chosen:
        raise ValueError("nothing to measure: head_dims, causal and seq_lens must not be empty, or gpt2=true")
    return chosen


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, T, H, D) that require gradients."""
    torch.manual_seed(0)
    batch, seq_len, heads, head_dim, _, packed = shape
    options = {"device": "cuda", "dtype": dtype}
    if packed:
        tensors = torch.randn(batch, seq_len, 3, heads, head_dim, **options).unbind(2)
    else:
        tensors = (torch.randn(batch, seq_len, heads, head_dim, **options) for _ in range(3))
    return tuple(x.requires_grad_() for x in tensors)


def measure(arguments: Arguments, shape: Shape) -> list[dict]:
    """One row for each implementation that can run this shape."""
    window, dropout_p, causal = arguments.window, arguments.dropout_p, shape.causal
    q, k, v = inputs(shape, DTYPES[arguments.dtype])
    dout = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    truth = attention_reference(
        *(x[:1, :, :1].detach().double() for x in (q, k, v)), causal=causal, window=window
    )
    outs, graphs, errors = {}, {}, {}
    for name in arguments.implementations:
        attention = build(name, causal, window, dropout_p, shape.seq_len)
        try:
            # covers the backward pass too: the operator chooses an implementation anew in each pass
            with use_implementation(name if name in IMPLEMENTATIONS else None):
                # keep out: the backward graph reads tensors that it keeps alive
                outs[name], *graphs[name] = capture(attention, (q, k, v), dout)
        except (RuntimeError, ValueError) as error:
            print(f"{name} cannot run this: {str(error).splitlines()[0]}")
            continue
        if dropout_p == 0.0:
            errors[name] = (outs[name][:1, :, :1].double() - truth).abs().max().item()
    share = visible_share(shape.seq_len, window) if causal else 1.0
    flop = 4 * shape.batch * shape.heads * shape.seq_len**2 * shape.head_dim * share
    rows = []
    for name, (forward_ms, backward_ms) in medians_in_turns(graphs, arguments.repeats).items():
        rows.append(
            {
                "implementation": name,
                **shape._asdict(),
                "dtype": arguments.dtype,
                "window": window,
                "dropout_p": dropout_p,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "forward_tflops": flop / forward_ms / 1e9,
                "backward_tflops": 2.5 * flop / backward_ms / 1e9,
                "max_error": errors.get(name),
            }
        )
    return rows


def visible_share(seq_len: int, window: int | None) -> float:
    """The share of all scores that a causal mask keeps; one half without a window, as all papers count it."""
    if window is None or window >= seq_len:
        return 0.5
    return window_pairs(seq_len, window) / seq_len**2


def build(name: str, causal: bool, window: int | None, dropout_p: float, seq_len: int) -> Callable:
    """An implementation as a function of q, k, v (B, T, H, D)."""
    if name in ("ours", "hopper", "portable"):
        return partial(flash_attention, causal=causal, window=window, dropout_p=dropout_p)
    if name == "eager":
        return partial(attention_reference, causal=causal, window=window)
    if name == "flex":
        return compiled_flex(block_mask(seq_len, window) if causal else None)
    if name == "fa4":
        return flash_attn_4(causal, window)
    if name not in BACKENDS:
        raise ValueError(f"implementations must be of {' '.join(NAMES)}, got {name}")
    return partial(sdpa, backend=BACKENDS[name], is_causal=causal, dropout_p=dropout_p)


@cache
def block_mask(seq_len: int, window: int | None):
    def visible(b, h, i, j):
        return (j <= i) & (j > i - window) if window is not None else j <= i

    return create_block_mask(visible, None, None, seq_len, seq_len, device="cuda")


def print_row(row: dict) -> None:
    mask = "causal" if row["causal"] else "full"
    if row["packed"]:
        mask = "GPT-2"
    print(
        f"D {row['head_dim']:3} {mask:6} T {row['seq_len']:6} {row['implementation']:9} "
        f"{row['forward_tflops']:4.0f} / {row['backward_tflops']:4.0f} TFLOP/s "
        f"{row['forward_ms']:8.3f} / {row['backward_ms']:8.3f} ms",
        flush=True,
    )


def plot(rows: list[dict], result: dict, path: Path) -> None:
    """Draws bars of TFLOP/s, forward above backward; columns: GPT-2's shape, and each head_dim and mask."""
    from train.plot import length_label, save, subplots

    columns = {}
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        title = "GPT-2" if row["packed"] else f"D {row['head_dim']}, {mask}"
        columns.setdefault(title, []).append(row)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    widths = [1 + 2 * len({row["seq_len"] for row in chosen}) for chosen in columns.values()]
    figure, axes = subplots(
        2, len(columns), figsize=(max(5, sum(widths) / 1.7), 6), width_ratios=widths, squeeze=False,
        sharey="row",
    )  # fmt: skip
    for column, (title, chosen) in enumerate(columns.items()):
        lengths = sorted({row["seq_len"] for row in chosen})
        for line, direction in enumerate(("forward", "backward")):
            axis = axes[line, column]
            for index, name in enumerate(names):
                speeds = {
                    row["seq_len"]: row[f"{direction}_tflops"]
                    for row in chosen
                    if row["implementation"] == name
                }
                x = [
                    lengths.index(length) + (index - (len(names) - 1) / 2) * 0.8 / len(names)
                    for length in speeds
                ]
                axis.bar(x, list(speeds.values()), 0.8 / len(names), label=name)
            axis.set_xticks(range(len(lengths)), list(map(length_label, lengths)))
            axis.set_title(f"{direction}\n{title}" if line == 0 else direction)
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[1, 0].set_ylabel("TFLOP/s")
    figure.suptitle(machine(result), x=0.01, ha="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    save(figure, path, dpi=120)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
