"""Figure 3 and Tables 9 to 21: run time and memory of full attention by the length of the sequence."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import torch

from scripts.paper import baselines
from scripts.paper.memory import reason_in
from scripts.paper.report import markdown
from scripts.paper.verdict import Verdict, least, matching, only_total, ratio, total, value
from scripts.timing import forward_backward_ms

TITLE = "Figure 3 and Tables 9 to 21: run time and memory by length"
PAPER = """
B 16, H 8, D 64, fp16, not causal, one A100-40GB, lengths 128 to 64K, dropout 0.1 and a padding mask
(lengths uniform in [T - 20, T]) on and off. Forward and backward with both, flash is 3.25, 3.32 and 3.31
times as fast as PyTorch at 1K, 2K and 4K, and 1.65 times Megatron's at 1K; at 4K it takes 20.4 times less
memory than PyTorch, and its memory grows linearly, to 13.4 GB at 64K. Block-sparse flash is 9.1, 35 and 146
times as fast as dense flash at 4K, 16K and 64K, linear in the length.
"""
HERE = """
The same shapes in fp16. Padding is in front of a sequence instead of behind it; baselines are those of
scripts/paper/baselines.py: eager is the authors' own, Megatron's softmax is a Triton kernel, window is our
kernel over the last 256 keys (causal), ours sparse computes 256 keys for each query. Eager and Megatron run
to 8K, the other rivals to 16K. Times are medians of the GPU's own time. Memory is the peak of one forward
and backward pass with its inputs, output and gradients. Reformer, Smyrf, Longformer and the other
approximations of the paper are not ported: published.json has its numbers. FlexAttention, which compiles
each length anew, is measured at four of them, SDPA's math to 4K.
"""
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PAPER_SHAPE = {"batch": 16, "heads": 8, "head_dim": 64}
# the longest sequence that is tried, limited by the memory of all (T, T) scores or by the time
LONGEST = {
    "eager": 8192,
    "megatron": 8192,
    # runs in float32, one operation at a time
    "sdpa math": 4096,
    "ours": 65536,
    "ours sparse": 65536,
    "window": 65536,
    "linformer": 65536,
}
LONGEST_OTHERS = 16384
OURS = ("ours", "ours sparse", "window")
# the paper's tables of forward and backward together, by (dropout, mask)
BOTH_TABLES = {(True, True): "11", (False, True): "14", (True, False): "17", (False, False): "20"}
PAPER_NAMES = {
    "eager": "PyTorch",
    "megatron": "Megatron",
    "linformer": "Linformer",
    "ours": "FlashAttention",
    "ours sparse": "Block-Sparse Flash",
}


@dataclass
class Sizes:
    batch: int = 16
    heads: int = 8
    head_dim: int = 64
    seq_lens: list[int] = field(default_factory=lambda: [2**n for n in range(7, 17)])
    implementations: list[str] = field(
        default_factory=lambda: [
            "ours",
            "ours sparse",
            "eager",
            "megatron",
            *baselines.SDPA,
            "flex",
            "linformer",
            "window",
        ]
    )
    # lengths for FlexAttention, which compiles ten seconds for each
    flex_seq_lens: list[int] = field(default_factory=lambda: [128, 1024, 4096, 16384])
    # dropout and padding mask, each on and off
    settings: list[list[bool]] = field(
        default_factory=lambda: [[True, True], [False, True], [True, False], [False, False]]
    )


QUICK = {
    "batch": 1,
    "heads": 1,
    "head_dim": 16,
    "seq_lens": [64, 128],
    "implementations": ["ours", "ours sparse", "eager", "megatron", "linformer", "window"],
    "settings": [[True, True], [False, False]],
}
DROPOUT_P = 0.1


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    for seq_len, (dropout, mask) in product(sizes.seq_lens, sizes.settings):
        for name in sizes.implementations:
            tried = sizes.flex_seq_lens if name == "flex" else range(LONGEST.get(name, LONGEST_OTHERS) + 1)
            if seq_len not in tried:
                continue
            row = {"implementation": name, "seq_len": seq_len, "dropout": dropout, "mask": mask}
            row |= {key: getattr(sizes, key) for key in PAPER_SHAPE}
            row |= {"forward_ms": None, "backward_ms": None, "memory_bytes": None, "max_error": None}
            # a rival that lacks a mask, dropout or memory raises an error, whose message the row keeps
            with reason_in(row, () if name in OURS else (RuntimeError, ValueError)):
                row |= measure_one(sizes, device, name, seq_len, dropout, mask)
            said = row.get("why", total(row))
            print(f"T {seq_len:6} dropout {dropout:d} mask {mask:d} {name:14} {said}", flush=True)
            yield row


def measure_one(
    sizes: Sizes, device: torch.device, name: str, seq_len: int, dropout: bool, mask: bool
) -> dict:
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    qkv = baselines.inputs(sizes.batch, seq_len, sizes.heads, sizes.head_dim, device, requires_grad=True)
    dout = torch.randn_like(qkv[0])
    first_key = padding(sizes.batch, device) if mask else None
    attention = baselines.build(name, seq_len, first_key, DROPOUT_P if dropout else 0.0, device)
    measured = {}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    out = attention(*qkv)
    gradients = torch.autograd.grad(out, qkv, dout)
    if on_gpu:
        measured["memory_bytes"] = torch.cuda.max_memory_allocated() - before
    if name not in ("linformer", "window", "ours sparse") and not dropout:
        measured["max_error"] = max_error(out, qkv, first_key)
    del out, gradients
    if on_gpu:
        measured["forward_ms"], measured["backward_ms"] = forward_backward_ms(attention, qkv, dout)
    return measured


def padding(batch: int, device: torch.device) -> torch.Tensor:
    """How many tokens of padding each sequence has, 0 to 20, (B,) int32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 21, (batch,), generator=generator, dtype=torch.int32).to(device)


def max_error(out: torch.Tensor, qkv: tuple, first_key: torch.Tensor | None) -> float:
    """The largest error against float64, on the last 64 queries of the first batch and head."""
    q, k, v = (x[0, :, 0].detach().double() for x in qkv)
    start = 0 if first_key is None else int(first_key[0])
    truth = (q[-64:] @ k[start:].T * q.shape[-1] ** -0.5).softmax(-1) @ v[start:]
    return (out[0, -64:, 0].double() - truth).abs().max().item()


def judge(rows: list[dict]) -> list[Verdict]:
    rows = matching(rows, **PAPER_SHAPE)
    both = matching(rows, dropout=True, mask=True)
    neither = matching(rows, dropout=False, mask=False)

    def gain(slow: str, fast: str, seq_len: int, chosen: list[dict] = both) -> float | None:
        return ratio(
            only_total(chosen, implementation=slow, seq_len=seq_len),
            only_total(chosen, implementation=fast, seq_len=seq_len),
        )

    def memory(name: str, seq_len: int) -> float | None:
        return value(neither, "memory_bytes", implementation=name, seq_len=seq_len)

    at_4k = memory("eager", 4096), memory("ours", 4096)
    with_both = "dropout and mask, forward and backward"
    # memory that does not grow with the length, such as that of some heads' sums of dq, gives less than 2
    doublings = [ratio(memory("ours", 2**n), memory("ours", 2 ** (n - 1))) for n in range(11, 17)]
    verdicts = [
        Verdict(
            claim=f"faster than PyTorch at 1K, 2K and 4K, the least; {with_both}",
            paper="3.25x",
            gate=3.0,
            ours=least([gain("eager", "ours", seq_len) for seq_len in (1024, 2048, 4096)]),
        ),
        Verdict(
            claim=f"faster than Megatron's softmax at 1K; {with_both}",
            paper="1.65x",
            gate=1.65,
            ours=gain("megatron", "ours", 1024),
        ),
        Verdict(
            claim="less memory than PyTorch at 4K",
            paper="20.4x",
            gate=20.0,
            ours=ratio(*at_4k),
            note=""
            if None in at_4k
            else "{:.2f} and {:.2f} GB (17.02 and 0.84)".format(*(x / 1e9 for x in at_4k)),
        ),
        Verdict(
            claim="memory at 64K",
            paper="13.4 GB",
            gate=14.0,
            at_most=True,
            unit=" GB",
            ours=ratio(memory("ours", 65536), 1e9),
        ),
        Verdict(
            claim="memory at most linear: what a doubled length takes beyond the double, worst of 1K to 64K",
            paper="0.0%",
            gate=2.0,
            at_most=True,
            unit="%",
            ours=beyond_double(doublings),
            note=""
            if None in doublings
            else "doubled, it is " + ", ".join(f"{growth:.2f}x" for growth in doublings),
        ),
    ]
    for seq_len, paper, gate in ((4096, "9.1x", 8.0), (16384, "35x", 30.0), (65536, "146x", 100.0)):
        verdicts.append(
            Verdict(
                claim=f"block-sparse faster than dense at {seq_len // 1024}K; {with_both}",
                paper=paper,
                gate=gate,
                ours=gain("ours", "ours sparse", seq_len),
            )
        )
    sparse = [only_total(both, implementation="ours sparse", seq_len=2**n) for n in range(13, 17)]
    verdicts.append(
        Verdict(
            claim="block-sparse time is linear: a doubled length off doubled time, worst of 8K to 64K",
            paper="8.6%",
            gate=15.0,
            at_most=True,
            unit="%",
            ours=farthest([ratio(b, a) for a, b in pairwise(sparse)]),
        )
    )
    return verdicts


def farthest(growths: list[float | None]) -> float | None:
    """By how many percent, at worst, the growth from a length to its double differs from 2."""
    if None in growths:
        return None
    return max(abs(growth / 2 - 1) for growth in growths) * 100


def beyond_double(growths: list[float | None]) -> float | None:
    """By how many percent, at worst, the growth from a length to its double exceeds 2; 0 if it never does."""
    if None in growths:
        return None
    return max(0.0, max(growths) / 2 - 1) * 100


def describe(rows: list[dict]) -> str:
    """A table like the paper's for each setting: our numbers, with the paper's A100 in italics below."""
    from train.plot import length_label

    lengths = sorted({row["seq_len"] for row in rows})
    header = ["implementation", *map(length_label, lengths)]
    parts = []
    for (dropout, mask), table in BOTH_TABLES.items():
        chosen = matching(rows, dropout=dropout, mask=mask)
        if chosen:
            what = f"Table {table}: forward and backward, ms, dropout {'on' if dropout else 'off'}, "
            what += f"mask {'on' if mask else 'off'}"
            parts.append(f"{what}\n\n{markdown(header, pivot(chosen, lengths, total, table))}")
    neither = matching(rows, dropout=False, mask=False)
    lines = pivot(neither, lengths, lambda row: row["memory_bytes"] and row["memory_bytes"] / 1e6, "21")
    parts.append(f"Table 21: memory, MB, forward and backward, neither\n\n{markdown(header, lines)}")
    refused = {(row["implementation"], row["why"]) for row in rows if "why" in row}
    parts += [f"* {name}: {why}" for name, why in sorted(refused)]
    return "\n\n".join(parts)


def pivot(rows: list[dict], lengths: list[int], number, table: str) -> list[list]:
    published = PUBLISHED["tables"][table]["rows"]
    lines = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        values = {row["seq_len"]: number(row) for row in matching(rows, implementation=name)}
        lines.append([name, *(values.get(n) for n in lengths)])
        if PAPER_NAMES.get(name) in published:
            theirs = dict(zip(PUBLISHED["seq_lens"], published[PAPER_NAMES[name]], strict=True))
            lines.append([f"*{PAPER_NAMES[name]}, A100*", *(theirs.get(n) for n in lengths)])
    return lines


def draw(rows: list[dict], path: Path) -> None:
    """Draws run time with dropout and mask, and memory, over the length; both axes logarithmic."""
    from train.plot import save, subplots

    panels = (
        ("forward and backward, dropout and mask, ms", matching(rows, dropout=True, mask=True), total),
        (
            "memory, MB",
            matching(rows, dropout=False, mask=False),
            lambda row: row["memory_bytes"] and row["memory_bytes"] / 1e6,
        ),
    )
    figure, axes = subplots(1, 2, figsize=(11, 4.5))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for axis, (title, chosen, number) in zip(axes, panels, strict=True):
        for index, name in enumerate(names):
            points = [(row["seq_len"], number(row)) for row in matching(chosen, implementation=name)]
            points = [point for point in points if point[1] is not None]
            if points:
                # Matplotlib repeats its colors after ten
                style = "o-" if index < 10 else "s--"
                axis.loglog(*zip(*points, strict=True), style, base=2, color=f"C{index}", label=name)
        axis.set_yscale("log", base=10)
        axis.set_xlabel("tokens")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    save(figure, path, dpi=120)
