"""Figure 2, right: time of block-sparse attention by the share of blocks that it computes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kernels.block_masks import butterfly
from kernels.flash_attention import flash_attention
from scripts.paper import baselines
from scripts.paper.report import rows_table
from scripts.paper.sparsity import BLOCK_SIZE, random_blocks
from scripts.paper.verdict import Verdict, at_sizes, matching, total
from scripts.timing import forward_backward_ms

TITLE = "Figure 2, right: sparsity"
PAPER = """
Sequences of 4096 tokens, forward and backward: the time of block-sparse attention grows with the share of
blocks that it computes, and dense attention is a flat line above it.
"""
HERE = """
Full (not causal) attention in fp16, our kernels, blocks of 128 by 128 drawn at random, as many in each row,
and the butterfly; the same at 16,384 tokens.
"""
RANDOM, BUTTERFLY, DENSE = "random", "butterfly", "dense"


@dataclass
class Sizes:
    batch: int = 16
    heads: int = 8
    head_dim: int = 64
    seq_lens: list[int] = field(default_factory=lambda: [4096, 16384])
    densities: list[float] = field(default_factory=lambda: [0.0625, 0.125, 0.25, 0.5, 0.75, 1.0])


QUICK = {"batch": 1, "heads": 1, "head_dim": 16, "seq_lens": [256], "densities": [0.5, 1.0]}


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    for seq_len in sizes.seq_lens:
        # equally many tokens at every length
        batch = max(1, sizes.batch * min(sizes.seq_lens) // seq_len)
        masks = {(DENSE, 1.0): None}
        for density in sizes.densities:
            mask = random_blocks(seq_len, density, device)
            # the nearest density that a row of so many blocks can have
            masks[RANDOM, mask.density()] = mask
        mask = butterfly(seq_len, block_size=BLOCK_SIZE, device=device)
        masks[BUTTERFLY, mask.density()] = mask
        for (pattern, density), mask in masks.items():
            qkv = baselines.inputs(batch, seq_len, sizes.heads, sizes.head_dim, device, requires_grad=True)
            attention = partial(flash_attention, causal=False, block_mask=mask)
            row = {"pattern": pattern, "density": density, "seq_len": seq_len, "batch": batch}
            row |= {"heads": sizes.heads, "head_dim": sizes.head_dim, "forward_ms": None, "backward_ms": None}
            if device.type == "cuda":
                times = forward_backward_ms(attention, qkv, torch.randn_like(qkv[0]))
                row["forward_ms"], row["backward_ms"] = times
            else:
                row["is_finite"] = bool(attention(*qkv).isfinite().all())
            yield row


def judge(rows: list[dict]) -> list[Verdict]:
    verdicts = []
    usual = Sizes()
    for seq_len, paper in ((4096, "a straight line"), (16384, "not in the paper")):
        batch = usual.batch * min(usual.seq_lens) // seq_len
        chosen = matching(rows, seq_len=seq_len)
        chosen = at_sizes(chosen, batch=batch, heads=usual.heads, head_dim=usual.head_dim)
        drawn = [(row["density"], total(row)) for row in matching(chosen, pattern=RANDOM)]
        dense = [total(row) for row in matching(chosen, pattern=DENSE)]
        measured = len(drawn) > 2 and None not in dense
        verdicts.append(
            Verdict(
                claim=f"time is linear in density at T {seq_len}, R²",
                paper=paper,
                gate=0.99,
                unit="",
                ours=r_squared(drawn) if measured else None,
            )
        )
        # by density, the time taken over the time allowed
        shares = {s: ms / dense[0] / (1.25 * s + 0.03) for s, ms in drawn} if measured else {}
        worst = max(shares, key=shares.get, default=None)
        note = ""
        if shares:
            slope, start = np.polyfit(*np.array(drawn).T, 1) / dense[0]
            note = f"worst at density {worst:g}; the line through all is {slope:.2f} density + {start:.3f}"
        verdicts.append(
            Verdict(
                claim=f"skipping costs little at T {seq_len}: time over 1.25 density + 0.03 of dense, worst",
                paper=paper,
                gate=1.0,
                at_most=True,
                ours=shares.get(worst),
                note=note,
            )
        )
    return verdicts


def r_squared(points: list[tuple[float, float]]) -> float:
    """The share of the variance of y that a straight line through the points (x, y) explains."""
    x, y = np.array(points).T
    residual = y - np.polyval(np.polyfit(x, y, 1), x)
    return 1.0 - float((residual**2).sum() / ((y - y.mean()) ** 2).sum())


def describe(rows: list[dict]) -> str:
    columns = ("seq_len", "batch", "pattern", "density", "forward_ms", "backward_ms")
    return rows_table(rows, columns)


def draw(rows: list[dict], path: Path) -> None:
    """Time over density, one panel for each length."""
    from train.plot import save, subplots

    lengths = sorted({row["seq_len"] for row in rows})
    figure, axes = subplots(1, len(lengths), figsize=(4.5 * len(lengths), 4), squeeze=False)
    for axis, seq_len in zip(axes[0], lengths, strict=True):
        timed = [row for row in matching(rows, seq_len=seq_len) if total(row) is not None]
        drawn = matching(timed, pattern=RANDOM)
        axis.plot([100 * r["density"] for r in drawn], [total(r) for r in drawn], "o-", label="random blocks")
        for row in matching(timed, pattern=BUTTERFLY):
            axis.plot(100 * row["density"], total(row), "s", color="C2", label="butterfly")
        for row in matching(timed, pattern=DENSE):
            axis.axhline(total(row), linestyle="--", color="C3", label="dense")
        axis.set_xlabel("% of blocks computed")
        axis.set_ylabel("forward and backward, ms")
        axis.set_ylim(bottom=0)
        axis.set_title(f"T {seq_len}")
        if timed:
            axis.legend()
    save(figure, path, dpi=120)
