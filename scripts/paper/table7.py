"""Table 7 and Appendix E.5: short sequences, and other head sizes, against PyTorch's own fused attention."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.flash_attention import flash_attention
from scripts.paper import baselines
from scripts.paper.memory import reason_in
from scripts.paper.report import rows_table
from scripts.paper.verdict import Verdict, least, matching, only_total, ratio, total
from scripts.sdpa import sdpa
from scripts.timing import forward_backward_ms

TITLE = "Table 7 and Appendix E.5: short sequences and other heads"
PAPER = """
Table 7 (B 64, H 16, D 64, dropout and mask, T 128, 256, 512, A100): NVIDIA's Apex FMHA 0.27, 0.81, 2.95 ms
forward and backward, flash 0.28, 0.75, 2.81. Appendix E.5 gives the speed-up over PyTorch: B 8, H 12, D 64,
dropout and mask, from 2.25 at T 128 to 4.3 at 4096; B 16, H 12, D 128, causal, 2.5 to 3.25 (bars, read to
0.05).
"""
HERE = """
The same shapes in fp16, forward and backward. Apex FMHA does not run on this GPU; PyTorch's own two fused
attentions stand in its place. Those of Table 7 and of head size 64 have dropout 0.1 and are causal, because
the fused ones take no padding.
"""
FUSED = ("sdpa flash", "sdpa cudnn")


class Shape(NamedTuple):
    batch: int
    heads: int
    head_dim: int
    dropout_p: float


SHAPES = {
    "Table 7": (Shape(64, 16, 64, 0.1), (128, 256, 512)),
    "E.5, D 64, dropout": (Shape(8, 12, 64, 0.1), (128, 256, 512, 1024, 2048, 4096)),
    "E.5, D 128, causal": (Shape(16, 12, 128, 0.0), (128, 256, 512, 1024, 2048)),
}


@dataclass
class Sizes:
    groups: list[str] = field(default_factory=lambda: list(SHAPES))
    longest: int = 4096
    implementations: list[str] = field(default_factory=lambda: ["ours", "eager", *FUSED])
    # share of each shape's batch to run: 1 for all of it
    batch_share: float = 1.0


QUICK = {"groups": ["Table 7"], "longest": 128, "implementations": ["ours", "eager"], "batch_share": 0.016}


def attention(name: str, shape: Shape, seq_len: int, device: torch.device):
    if name == "ours":
        return partial(flash_attention, causal=True, dropout_p=shape.dropout_p)
    if name == "eager":
        mask = baselines.causal_mask(seq_len, device)
        return partial(baselines.eager, mask=mask, dropout_p=shape.dropout_p)
    return partial(sdpa, backend=baselines.SDPA[name], is_causal=True, dropout_p=shape.dropout_p)


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    for group in sizes.groups:
        shape, lengths = SHAPES[group]
        batch = max(1, round(shape.batch * sizes.batch_share))
        for seq_len in lengths:
            for name in sizes.implementations if seq_len <= sizes.longest else []:
                row = {"group": group, "seq_len": seq_len, **shape._asdict(), "batch": batch}
                row |= {"implementation": name, "forward_ms": None, "backward_ms": None}
                qkv = baselines.inputs(batch, seq_len, shape.heads, shape.head_dim, device, True)
                # a backend that lacks dropout or this shape raises an error, whose message the row keeps
                with reason_in(row, RuntimeError if name in FUSED else ()):
                    chosen = attention(name, shape, seq_len, device)
                    if device.type == "cuda":
                        times = forward_backward_ms(chosen, qkv, torch.randn_like(qkv[0]))
                        row["forward_ms"], row["backward_ms"] = times
                    else:
                        row["is_finite"] = bool(chosen(*qkv).isfinite().all())
                yield row


def judge(rows: list[dict]) -> list[Verdict]:
    def gains(group: str, other: str) -> list[float | None]:
        shape, lengths = SHAPES[group]
        chosen = matching(rows, group=group, batch=shape.batch)
        return [
            ratio(
                only_total(chosen, seq_len=seq_len, implementation=other),
                only_total(chosen, seq_len=seq_len, implementation="ours"),
            )
            for seq_len in lengths
        ]

    with_dropout = gains("Table 7", "sdpa flash") + gains("E.5, D 64, dropout", "sdpa flash")
    lengths, eager = SHAPES["E.5, D 128, causal"][1], gains("E.5, D 128, causal", "eager")
    cudnn = [gain for gain in gains("E.5, D 128, causal", "sdpa cudnn") if gain is not None]
    note = ""
    if least(eager) is not None and cudnn:
        note = f"least at T {lengths[eager.index(min(eager))]}; over cuDNN's fused attention, from T 128 on: "
        note += ", ".join(f"{gain:.2f}x" for gain in cudnn)
    return [
        Verdict(
            claim="head size 128, causal: faster than PyTorch's operations, the least of T 128 to 2048",
            paper="2.5x",
            gate=2.5,
            ours=least(eager),
            note=note,
        ),
        Verdict(
            claim="with dropout: speed against PyTorch's own flash attention, the least of all lengths",
            paper="0.96x (Apex FMHA)",
            gate=0.8,
            ours=least(with_dropout),
        ),
    ]


def describe(rows: list[dict]) -> str:
    columns = (
        "group",
        "batch",
        "heads",
        "head_dim",
        "seq_len",
        "implementation",
        "forward_ms",
        "backward_ms",
        "why",
    )
    return rows_table(rows, columns)


def draw(rows: list[dict], path: Path) -> None:
    """Draws the speed-up over eager by length, a panel for each group."""
    from train.plot import save, subplots

    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, axes = subplots(1, len(groups), figsize=(4.5 * len(groups), 4), squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        chosen = [row for row in matching(rows, group=group) if total(row) is not None]
        eager = {row["seq_len"]: total(row) for row in matching(chosen, implementation="eager")}
        for name in dict.fromkeys(
            row["implementation"] for row in chosen if row["implementation"] != "eager"
        ):
            mine = [row for row in matching(chosen, implementation=name) if row["seq_len"] in eager]
            axis.plot(
                [row["seq_len"] for row in mine],
                [eager[row["seq_len"]] / total(row) for row in mine],
                "o-",
                label=name,
            )
        axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.set_xlabel("tokens")
        axis.set_ylabel("speed over eager")
        axis.set_title(group)
        if eager and axis.lines[1:]:
            axis.set_xscale("log", base=2)
            axis.legend()
    save(figure, path, dpi=120)
