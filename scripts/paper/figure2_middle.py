"""Figure 2, middle: bytes and time of Algorithm 1 forward by the size of its blocks of keys."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kernels.reference import attention_reference
from scripts.paper import baselines
from scripts.paper.algorithm1 import algorithm1, launch
from scripts.paper.counters import counted_bytes
from scripts.paper.report import rows_table
from scripts.paper.traffic import algorithm1_bytes
from scripts.paper.verdict import Verdict, matching, ratio, value
from scripts.timing import capture_forward, median_ms

TITLE = "Figure 2, middle: the size of a block"
PAPER = """
Forward, the shape of Figure 2 left, blocks of 64 to 512 keys. Bytes and time fall together from about 6 GB
and 6 ms to 2 and 2; from 256 on, time falls no further, because something else limits it.
"""
HERE = """
Algorithm 1 in its own order of loops, as a kernel of its own (scripts/paper/algorithm1.py), in fp16,
without mask; a block of 512 is left out, because its scores do not fit into the registers. `formula_gb` is
the bytes that the algorithm names; `l2_gb` what the multiprocessors asked the L2 cache for and `memory_gb`
what reached the memory, by the GPU's counters: today's L2 holds a head, so the formula shows between
multiprocessors and L2.
"""
PAPER_SHAPE = {"batch": 64, "heads": 16, "seq_len": 1024, "head_dim": 64}


@dataclass
class Sizes:
    batch: int = 64
    heads: int = 16
    seq_len: int = 1024
    head_dim: int = 64
    blocks: list[int] = field(default_factory=lambda: [32, 64, 128, 256])
    counters: bool = True


QUICK = {"batch": 1, "heads": 1, "seq_len": 128, "head_dim": 16, "blocks": [32, 64, 128], "counters": False}


def work(name: str, sizes: dict) -> Callable:
    """What runs under the counters, and is timed: the kernel alone. name: the size of a block."""
    sizes = Sizes(**sizes)
    device = torch.device("cuda")
    shape = (sizes.batch, sizes.heads, sizes.seq_len, sizes.head_dim)
    q, k, v, out = (torch.randn(shape, device=device, dtype=baselines.DTYPE) for _ in range(4))
    l_i = torch.empty(shape[:3], device=device)
    m_i = torch.empty_like(l_i)
    return lambda: launch(q, k, v, out, l_i, m_i, int(name))


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    shape = {key: getattr(sizes, key) for key in PAPER_SHAPE}
    q, k, v = baselines.inputs(**shape, device=device)
    truth = attention_reference(*(x[:1, :, :1].double() for x in (q, k, v)), causal=False)
    for block_n in sizes.blocks:
        out = algorithm1(q, k, v, block_n)
        row = {
            "block_n": block_n,
            **shape,
            "formula_gb": algorithm1_bytes(**shape, block_n=block_n) / 1e9,
            "l2_gb": None,
            "memory_gb": None,
            "ms": None,
            "max_error": (out[:1, :, :1].double() - truth).abs().max().item(),
        }
        if device.type == "cuda":
            row["ms"] = median_ms(capture_forward(work(str(block_n), asdict(sizes))).replay)
            counted = counted_bytes(__name__, str(block_n), asdict(sizes)) if sizes.counters else None
            if isinstance(counted, str):
                row["counters"] = counted
            elif counted:
                row["memory_gb"], row["l2_gb"] = counted["memory"] / 1e9, counted["l2"] / 1e9
        yield row


def judge(rows: list[dict]) -> list[Verdict]:
    rows = matching(rows, **PAPER_SHAPE)
    counted = [row for row in rows if row["l2_gb"] is not None]
    off = [abs(row["l2_gb"] / row["formula_gb"] - 1) * 100 for row in counted]
    why = [row["counters"] for row in rows if "counters" in row]
    return [
        Verdict(
            claim="the bytes are those of the formula, largest difference over the blocks",
            paper="axis of the figure",
            gate=25.0,
            at_most=True,
            unit="%",
            ours=max(off) if off and len(off) == len(rows) else None,
            note=why[0] if why else "",
        ),
        Verdict(
            claim="blocks of 128 keys are faster than blocks of 32",
            paper="falls to 256",
            gate=1.5,
            ours=ratio(value(rows, "ms", block_n=32), value(rows, "ms", block_n=128)),
        ),
    ]


def describe(rows: list[dict]) -> str:
    return rows_table(rows, ("block_n", "formula_gb", "l2_gb", "memory_gb", "ms", "max_error"))


def draw(rows: list[dict], path: Path) -> None:
    """Bytes on the left axis, time on the right one, over the size of a block."""
    from train.plot import save, subplots

    figure, axis = subplots(figsize=(5, 4))
    blocks = [str(row["block_n"]) for row in rows]
    axis.plot(blocks, [row["formula_gb"] for row in rows], "o--", label="formula")
    if all(row["l2_gb"] is not None for row in rows):
        axis.plot(blocks, [row["l2_gb"] for row in rows], "o-", label="counted, to L2")
    axis.set_xlabel("keys in a block")
    axis.set_ylabel("GB")
    axis.set_ylim(bottom=0)
    if all(row["ms"] is not None for row in rows):
        time = axis.twinx()
        time.plot(blocks, [row["ms"] for row in rows], "s-", color="C3", label="time")
        time.set_ylabel("ms")
        time.set_ylim(bottom=0)
        time.legend(loc="lower left")
    axis.legend(loc="upper right")
    axis.set_title("Algorithm 1, forward")
    save(figure, path, dpi=120)
