"""Figure 1, right: where the time of GPT-2's attention goes, operation by operation, against one kernel."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.flash_attention import flash_attention
from scripts.paper import baselines
from scripts.paper.report import rows_table
from scripts.paper.verdict import Verdict, matching, ratio, value
from scripts.timing import capture_forward, median_ms

TITLE = "Figure 1, right: the forward pass of GPT-2's attention"
PAPER = """
The paper times PyTorch's five operations and its one kernel on an A100, batch not given. Read off the
figure (±0.2 ms): matmul 2.2, mask 4.5, softmax 3.7, dropout 4.6, matmul 1.8, fused kernel 2.2 ms: 7.6 times
as fast, and mask, softmax and dropout, which only move memory, are 76% of PyTorch's time.
"""
HERE = """
GPT-2 medium's attention in fp16, causal, dropout 0.1, forward. Eager is the authors' own baseline, five
operations; each is timed alone, on the result of the one before.
"""
# the memory-bound operations, and all
ELEMENTWISE = ("mask", "softmax", "dropout")
OPERATIONS = ("matmul q k", *ELEMENTWISE, "matmul p v")
FUSED = "fused kernel (ours)"


@dataclass
class Sizes:
    batch: int = 64
    heads: int = 16
    seq_len: int = 1024
    head_dim: int = 64
    dropout_p: float = 0.1


QUICK = {"batch": 1, "heads": 2, "seq_len": 64, "head_dim": 16}


@torch.no_grad()
def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    q, k, v = baselines.inputs(sizes.batch, sizes.seq_len, sizes.heads, sizes.head_dim, device)
    mask = baselines.causal_mask(sizes.seq_len, device)
    x = None
    for name, operation in baselines.eager_steps(q, k, v, mask, sizes.dropout_p):
        run = partial(operation, x)
        yield {"operation": name, "fused": False, "ms": time_ms(run, device), **asdict(sizes)}
        x = run()
    fused = partial(flash_attention, q, k, v, causal=True, dropout_p=sizes.dropout_p)
    apart = flash_attention(q, k, v, causal=True) - baselines.eager(q, k, v, mask)
    row = {"operation": FUSED, "fused": True, "ms": time_ms(fused, device), **asdict(sizes)}
    yield {**row, "max_difference": apart.abs().max().item()}


def time_ms(function, device: torch.device) -> float | None:
    """The median time; None on a CPU, whose speed says nothing about the paper."""
    return median_ms(capture_forward(function).replay) if device.type == "cuda" else None


def judge(rows: list[dict]) -> list[Verdict]:
    rows = matching(rows, **asdict(Sizes()))
    times = {name: value(rows, "ms", operation=name) for name in OPERATIONS}
    eager = None if None in times.values() else sum(times.values())
    moved = None if eager is None else sum(times[name] for name in ELEMENTWISE)
    return [
        Verdict(
            claim="the fused kernel is faster than the five operations",
            paper="7.6x",
            gate=5.0,
            ours=ratio(eager, value(rows, "ms", fused=True)),
        ),
        Verdict(
            claim="mask, softmax and dropout take most of PyTorch's time",
            paper="76%",
            gate=65.0,
            unit="%",
            ours=None if eager is None else 100 * moved / eager,
        ),
    ]


def describe(rows: list[dict]) -> str:
    return rows_table(rows, ("operation", "ms", "max_difference"))


def draw(rows: list[dict], path: Path) -> None:
    """Two stacked bars, as in the paper."""
    from train.plot import save, subplots

    figure, axis = subplots(figsize=(4.5, 4.5))
    for bar, fused in (("PyTorch", False), ("ours", True)):
        bottom = 0.0
        for row in matching(rows, fused=fused):
            height = row["ms"] or 0.0
            axis.bar(bar, height, bottom=bottom, width=0.6)
            if height:
                axis.annotate(row["operation"], (bar, bottom + height / 2), ha="center", va="center")
            bottom += height
    axis.set_ylabel("ms")
    axis.set_title("Attention on GPT-2, forward")
    save(figure, path, dpi=120)
