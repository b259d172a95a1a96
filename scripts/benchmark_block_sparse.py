"""Times block-sparse attention, forward and backward, against dense causal attention and FlexAttention.

    python -m scripts.benchmark_block_sparse out=docs/results/h200/block_sparse.json
    python -m scripts.benchmark_block_sparse seq_lens=[65536] 'patterns=[window(1024)]' repeats=5

A pattern is written as in conf/attention/strided.yaml; "dense" is causal attention without a block mask. All
implementations get the same blocks and take turns on the same inputs; a row holds medians of replays of a
CUDA graph of one call, with a cold L2. Speed counts 4 D operations forward, and 2.5 times as many backward,
for each score of a kept block; dense attention counts half of all scores. density: kept blocks over causal
blocks. allowed_ms: 1.15 times the density times the same implementation's dense time, plus 20 us. With
document_tokens, a token also sees its own document only; the density is then that of both masks together.
With deterministic, ours is also measured with deterministic=True, in separate rows. extra_bytes: the peak
memory of forward and backward beyond inputs, gradients and mask. max_error is against float64, on the first
head, up to 16K tokens. FlexAttention compiles for every pattern and length, some 10 seconds each. fa4, where
flash-attn-4 is installed, is measured with causal masks and windows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from kernels import block_masks
from kernels.bit_tiles import FULL
from kernels.block_mask import BlockMask
from kernels.flash_attention import flash_attention
from kernels.operators import IMPLEMENTATIONS, use_implementation
from kernels.reference import attention_reference
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.flash_attn_4 import flash_attn_4, leave_out_if_missing
from scripts.flex import compiled_flex
from scripts.timing import capture, medians_in_turns
from train.results import machine, write_result

# what flex is measured with by default, where patterns hold it: it compiles for each pattern anew
FLEX_PATTERNS = ["window(1024)", "window(1024) | strided(16)"]


@dataclass(kw_only=True, slots=True)
class Arguments:
    implementations: list[str] = argument(["ours", "flex", "fa4"], "of ours hopper portable flex fa4")
    patterns: list[str] = argument(
        [
            "dense",
            "causal()",
            "strided(2)",
            "strided(8)",
            "strided(32)",
            "strided(64)",
            "window(1024)",
            "window(1024) | strided(16)",
            "bigbird(2, 0, 0)",
        ],
        "masks",
    )
    flex_patterns: list[str] | None = argument(
        None, f"those of patterns that flex is measured with; None: of {', '.join(FLEX_PATTERNS)}"
    )
    head_dims: list[int] = argument([64, 128], "D")
    seq_lens: list[int] = argument([16384, 65536], "T")
    block_size: int = argument(128, "queries and keys of a block, 64 or 128")
    width: int = argument(2048, "H * D; the batch is 1")
    dropout_p: float = argument(0.0, "ours only")
    document_tokens: int = argument(0, "tokens of a document, beside the patterns; 0: none; ours only")
    deterministic: bool = argument(False, "also measure ours with deterministic=True")
    repeats: int = argument(3, "turns of each implementation")
    plot: bool = argument(True, "also draw the results, as OUT with the ending .png")
    out: str = result_file("block_sparse.json", "result file", picture=True)
    overwrite: bool = argument(False, OVERWRITE)


# longer sequences have no max_error, because the reference stores all scores
LONGEST_CHECKED = 16384
PEERS = ("flex", "fa4")
# patterns that fa4 is measured with: its kernels implement these masks without lists of blocks
FA4_PATTERN = re.compile(r"dense|causal\(\)|window\((\d+)\)")
DIRECTIONS = ("forward", "backward")


def main(arguments: Arguments) -> None:
    check(arguments)
    leave_out_if_missing(arguments.implementations)
    check_some(arguments, "implementations")
    rows, dense, out = [], {}, Path(arguments.out)
    for head_dim, seq_len, pattern in product(arguments.head_dims, arguments.seq_lens, arguments.patterns):
        for row in measure(arguments, head_dim, seq_len, pattern):
            key = row["implementation"], row["deterministic"], head_dim, seq_len
            if pattern == "dense" and not arguments.document_tokens:
                dense[key] = row
            for direction in DIRECTIONS:
                of_dense = dense[key][f"{direction}_ms"] if key in dense else None
                row[f"allowed_{direction}_ms"] = of_dense and allowed_ms(row["density"], of_dense)
            rows.append(row)
            print_row(row)
        result = write_result(out, rows)
    if arguments.plot:
        over_length = len(arguments.patterns) == 1 and len(arguments.seq_lens) > 1
        draw = plot_over_length if over_length else plot
        draw(rows, result, out.with_suffix(".png"))


def check(arguments: Arguments) -> None:
    """Raises ValueError for what cannot be measured, or not on this machine."""
    check_some(arguments, "head_dims", "seq_lens", "patterns")
    check_least(arguments, "head_dims", "seq_lens", "width", "repeats")
    for head_dim in arguments.head_dims:
        if arguments.width % head_dim:
            raise ValueError(f"width={arguments.width} must be a multiple of head_dim {head_dim}: change one")
    # a wrong pattern would otherwise end the benchmark halfway
    for pattern in arguments.patterns:
        if pattern != "dense" and not block_masks.parse(pattern, 1, block_size=arguments.block_size).causal:
            raise ValueError(f"patterns: {pattern} sees keys behind the query: add & causal()")
    if arguments.flex_patterns is not None and "flex" not in arguments.implementations:
        raise ValueError(
            f"flex_patterns={arguments.flex_patterns} is read with flex among implementations only, got "
            f"{arguments.implementations}: add it, or leave flex_patterns out"
        )
    for pattern in arguments.flex_patterns or []:
        flex_mask(pattern, arguments.block_size)
        if pattern not in arguments.patterns:
            raise ValueError(f"flex_patterns must be among patterns, got {pattern}: add it there too")
    unable = [name for name in arguments.implementations if name in PEERS]
    for key in ("dropout_p", "document_tokens"):
        given = getattr(arguments, key)
        if given < 0:
            raise ValueError(f"{key} must be at least 0, got {given}")
        if given and unable:
            raise ValueError(f"{key}={given}: leave {' '.join(unable)} out of implementations")
    if not torch.cuda.is_available():
        raise ValueError("benchmark_block_sparse needs a CUDA GPU; none was found")
    names = ("ours", *IMPLEMENTATIONS, *PEERS)
    if not set(arguments.implementations) <= set(names):
        raise ValueError(f"implementations must be of {' '.join(names)}, got {arguments.implementations}")


def allowed_ms(density: float, dense_ms: float) -> float:
    """The most time that a pass over the share `density` of the causal blocks may take."""
    return 1.15 * density * dense_ms + 0.02


def measure(arguments: Arguments, head_dim: int, seq_len: int, pattern: str) -> list[dict]:
    """One row for each implementation."""
    heads, block_size = arguments.width // head_dim, arguments.block_size
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, seq_len, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    dout = torch.randn_like(q)
    # the block mask, each token's document, and what both leave of the causal mask
    mask, ids, seen = None, None, None
    if pattern != "dense":
        mask = seen = block_masks.parse(pattern, seq_len, block_size=block_size, device="cuda")
    if arguments.document_tokens:
        ids = (torch.arange(seq_len, device="cuda") // arguments.document_tokens).int()[None]
        seen = mask or block_masks.causal(seq_len, block_size=block_size, device="cuda")
        seen = seen & block_masks.documents(ids, block_size=block_size)
    scores = heads * (seq_len**2 / 2 if seen is None else len(seen.keys) * block_size**2)
    truth = None
    if seq_len <= LONGEST_CHECKED and arguments.dropout_p == 0.0:
        truth = attention_reference(*(x[:, :, :1].detach().double() for x in (q, k, v)), block_mask=seen)
    flex_patterns = FLEX_PATTERNS if arguments.flex_patterns is None else arguments.flex_patterns
    outs, graphs, errors, extra_bytes = {}, {}, {}, {}
    for run in product(arguments.implementations, (False, True)[: 1 + arguments.deterministic]):
        name, deterministic = run
        if name in PEERS and deterministic:
            continue
        if name == "flex" and pattern not in flex_patterns:
            continue
        if name == "fa4" and not FA4_PATTERN.fullmatch(pattern):
            continue
        attention = build(name, deterministic, pattern, mask, ids, seq_len, arguments)
        with use_implementation(name if name in IMPLEMENTATIONS else None):
            # compile first
            torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
            extra_bytes[run] = peak_bytes(attention, (q, k, v), dout)
            # keep out: the backward graph reads tensors that it keeps alive
            outs[run], *graphs[run] = capture(attention, (q, k, v), dout)
        if truth is not None:
            errors[run] = (outs[run][:, :, :1].double() - truth).abs().max().item()
    rows = []
    for run, (forward_ms, backward_ms) in medians_in_turns(graphs, arguments.repeats).items():
        name, deterministic = run
        rows.append(
            {
                "implementation": name,
                "deterministic": deterministic,
                "pattern": pattern,
                "density": 1.0 if seen is None else seen.density(),
                "block_size": block_size,
                "head_dim": head_dim,
                "causal": True,
                "seq_len": seq_len,
                "batch": 1,
                "heads": heads,
                "dtype": "bf16",
                "dropout_p": arguments.dropout_p,
                "document_tokens": arguments.document_tokens,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "forward_tflops": 4 * scores * head_dim / forward_ms / 1e9,
                "backward_tflops": 10 * scores * head_dim / backward_ms / 1e9,
                "extra_bytes": extra_bytes[run],
                "max_error": errors.get(run),
            }
        )
    return rows


def build(
    name: str, deterministic: bool, pattern: str, mask: BlockMask | None, ids: Tensor | None, seq_len: int,
    arguments: Arguments,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """An implementation as a function of q, k, v (1, T, H, D). ids: document ids, (1, T) int32."""
    if name in ("ours", *IMPLEMENTATIONS):
        options = {"dropout_p": arguments.dropout_p, "deterministic": deterministic}
        return partial(flash_attention, block_mask=mask, document_ids=ids, **options)
    if name == "fa4":
        window = FA4_PATTERN.fullmatch(pattern)[1]
        return flash_attn_4(causal=True, window=window and int(window))
    listed = mask or block_masks.causal(seq_len, block_size=arguments.block_size, device="cuda")
    return compiled_flex(flex_block_mask(listed, flex_mask(pattern, arguments.block_size)))


def flex_block_mask(mask: BlockMask, visible: Callable) -> FlexBlockMask:
    """A one-head mask in FlexAttention's form. visible(b, h, i, j): the same mask, score by score."""
    _, row, column = mask.coordinates()
    lists = []
    for chosen in (mask.tiles != FULL, mask.tiles == FULL):
        kept = torch.zeros(1, 1, mask.n_rows, mask.n_columns, dtype=torch.int32, device=row.device)
        kept[0, 0, row[chosen], column[chosen]] = 1
        lists += [kept.sum(-1, dtype=torch.int32), kept.argsort(descending=True, stable=True).int()]
    return FlexBlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.block_size, mask_mod=visible, seq_lengths=(mask.seq_q, mask.seq_k)
    )


def flex_mask(pattern: str, block_size: int) -> Callable:
    """A pattern as FlexAttention's mask function: its parts joined by |, each computed from i and j."""

    def causal(i, j):
        return j <= i

    def window(i, j, n):
        return (j <= i) & (j > i - n)

    def strided(i, j, n):
        return (j <= i) & ((i // block_size - j // block_size) % n == 0)

    known = {"dense": causal, "causal": causal, "window": window, "strided": strided}
    parts = []
    for part in pattern.split("|"):
        name, _, numbers = part.strip().rstrip(")").partition("(")
        if name not in known or "&" in part:
            raise ValueError(
                f"flex_patterns must be of {', '.join(known)} joined by |, got {part.strip()}: leave it out"
            )
        parts.append((known[name], [int(number) for number in numbers.split(",") if number]))

    def visible(b, h, i, j):
        seen = parts[0][0](i, j, *parts[0][1])
        for function, numbers in parts[1:]:
            seen = seen | function(i, j, *numbers)
        return seen

    return visible


def peak_bytes(attention: Callable, qkv: tuple[Tensor, ...], dout: Tensor) -> int:
    """The peak memory that a forward and backward pass allocate, without the gradients, in bytes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attention(*qkv), qkv, dout)
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in qkv)


def label(row: dict) -> str:
    """The implementation, and whether it ran with deterministic=True."""
    return f"{row['implementation']} deterministic" if row["deterministic"] else row["implementation"]


def print_row(row: dict) -> None:
    line = f"D {row['head_dim']:3} T {row['seq_len']:7} {row['pattern']:26} {row['density']:6.1%} "
    line += f"{label(row):23} {row['forward_ms']:8.3f} ms {row['forward_tflops']:4.0f} TFLOP/s"
    line += f"   backward {row['backward_ms']:8.3f} ms {row['backward_tflops']:4.0f} TFLOP/s"
    if row["allowed_forward_ms"] is not None:
        shares = (row[f"{direction}_ms"] / row[f"allowed_{direction}_ms"] for direction in DIRECTIONS)
        line += "   of what is allowed {:.2f} and {:.2f}".format(*shares)
    print(line, flush=True)


def plot(rows: list[dict], result: dict, path: Path) -> None:
    """Draws time and allowed time over density; columns: head_dim and length, forward above backward."""
    from train.plot import length_label, save, subplots

    shapes = list(dict.fromkeys((row["head_dim"], row["seq_len"]) for row in rows))
    names = list(dict.fromkeys(map(label, rows)))
    # tall enough for the titles above the axes and the legend below
    size = max(7.2, 3.6 * len(shapes)), 6.4
    figure, axes = subplots(2, len(shapes), figsize=size, squeeze=False, sharex=True)
    for column, shape in enumerate(shapes):
        for axis, direction in zip(axes[:, column], DIRECTIONS, strict=True):
            for index, name in enumerate(names):
                chosen = [
                    row for row in rows if (row["head_dim"], row["seq_len"], label(row)) == (*shape, name)
                ]
                chosen.sort(key=lambda row: row["density"])
                density = [100 * row["density"] for row in chosen]
                axis.plot(
                    density,
                    [row[f"{direction}_ms"] for row in chosen],
                    "o^s"[index % 3],
                    c=f"C{index}",
                    label=name,
                )
                allowed = [row[f"allowed_{direction}_ms"] for row in chosen]
                if None not in allowed:
                    axis.plot(density, allowed, c=f"C{index}", label=f"1.15 of {name}, dense, and 20 us")
            axis.set(
                xscale="log", yscale="log", title=f"{direction}, D {shape[0]}, T {length_label(shape[1])}"
            )
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("kept blocks of the causal ones, %")
    axes[0, 0].set_ylabel("ms")
    axes[1, 0].set_ylabel("ms")
    figure.suptitle(machine(result), x=0.01, ha="left")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=max(2, len(shapes)),
        frameon=False,
    )
    save(figure, path, dpi=120)


def plot_over_length(rows: list[dict], result: dict, path: Path) -> None:
    """Draws microseconds per thousand tokens over the length: a cost linear in length is a level line."""
    from train.plot import save, subplots

    figure, axes = subplots(1, 2, figsize=(9, 3.8), sharex=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for shape in dict.fromkeys((label(row), row["head_dim"]) for row in rows):
            chosen = [row for row in rows if (label(row), row["head_dim"]) == shape]
            lengths = [row["seq_len"] for row in chosen]
            costs = [1e6 * row[f"{direction}_ms"] / row["seq_len"] for row in chosen]
            axis.plot(lengths, costs, "o-", label="{}, D {}".format(*shape))
        axis.set_xscale("log", base=2)
        axis.set(xlabel="tokens", ylim=(0, None), title=f"{direction}, {rows[0]['pattern']}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("us for 1000 tokens")
    axes[0].legend()
    figure.suptitle(machine(result), x=0.01, ha="left")
    save(figure, path, dpi=120)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
