"""Table 2: training GPT-2 small and medium, against Hugging Face and Megatron-LM."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.arguments import check_as_many
from scripts.paper.memory import reason_in
from scripts.paper.report import rows_table
from scripts.paper.training import MODELS, configure, time_training
from scripts.paper.verdict import Verdict, at_sizes, matching, ratio, value

TITLE = "Table 2: training GPT-2"
PAPER = """
OpenWebText, 1024 tokens, 512 sequences a step, fp16 with a loss scaler, dropout 0.1, 8 A100-40GB, 400K steps.
Small: Hugging Face 9.5 days, Megatron-LM 4.7, flash 2.7: 3.5 and 1.7 times as fast, perplexity 18.2 for all.
Medium: 21.0, 11.5, 6.9 days: 3.0 and 1.7 times; perplexity 14.2, 14.3, 14.3 in arXiv v2, 14.2 for all in the
NeurIPS version.
"""
HERE = """
Tokens per second of whole steps on one GPU with the same dropout and precision, 64 sequences a step, which
is one GPU's share of the paper's 512, on random tokens; medians over the steps. The
perplexities are not repeated, Figure 4 compares the losses instead. All models take the same micro-batch and
optimizer (AdamW, fused), which favors Hugging Face over the paper's run of it. "attention of 2022" is
Hugging Face's model with the operations that its attention had in 2022; "our attention" swaps the attention
alone; Megatron-like is our model with one kernel for scale, mask and softmax, and its MLPs compiled.
"""
SMALL, MEDIUM = "gpt2", "gpt2_medium"
# sizes that are the same in all rows
SETTINGS = ("dropout", "precision", "tokens_per_step", "compile", "steps")


@dataclass
class Sizes:
    # files of conf/model/, and sequences in a micro-batch of each
    models: list[str] = field(default_factory=lambda: [SMALL, MEDIUM])
    microbatches: list[int] = field(default_factory=lambda: [32, 16])
    implementations: list[str] = field(default_factory=lambda: list(MODELS))
    seq_len: int = 1024
    # one GPU's share of the paper's 512 sequences
    tokens_per_step: int = 65536
    dropout: float = 0.1
    precision: str = "fp16"
    compile: bool = True
    warmup_steps: int = 1
    steps: int = 5

    def __post_init__(self):
        check_as_many(self, "models", "microbatches")


QUICK = {
    "models": ["tiny"],
    "microbatches": [1],
    "implementations": [
        "Hugging Face eager",
        "Hugging Face, attention of 2022",
        "Megatron-like",
        "ours, eager attention",
    ],
    "seq_len": 32,
    "tokens_per_step": 32,
    "dropout": 0.0,
    "precision": "fp32",
    "compile": False,
    "steps": 1,
}


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    for size, microbatch in zip(sizes.models, sizes.microbatches, strict=True):
        for name in sizes.implementations:
            config = configure(
                f"model={size}",
                f"model.dropout={sizes.dropout}",
                f"precision={sizes.precision}",
                f"compile={sizes.compile}",
                f"seq_len={sizes.seq_len}",
                f"tokens_per_step={sizes.tokens_per_step}",
                f"tokens_per_microbatch={microbatch * sizes.seq_len}",
            )
            row = {"size": size, "seq_len": sizes.seq_len, "microbatch": microbatch}
            row |= {key: getattr(sizes, key) for key in SETTINGS}
            row |= {"model": name, "tokens_per_second": None}
            # a model that does not fit, or that this version of its library breaks, must not stop the others
            with reason_in(row, (RuntimeError, ValueError)):
                row |= time_training(name, config, sizes.warmup_steps, sizes.steps)
            said = row.get("why", f"{row['tokens_per_second']} tokens/s")
            print(f"{size} {name}: {said}", flush=True)
            yield row


def judge(rows: list[dict]) -> list[Verdict]:
    rows = matching(rows, seq_len=1024, dropout=0.1, precision="fp16")
    rows = at_sizes(rows, tokens_per_step=65536, compile=True, steps=5)
    verdicts = []
    for size, microbatch, words, hugging_face, megatron in (
        (SMALL, 32, "small", "3.5x", "1.74x"),
        (MEDIUM, 16, "medium", "3.0x", "1.67x"),
    ):
        of_size = at_sizes(matching(rows, size=size), microbatch=microbatch)

        def speed(name: str, rows: list[dict] = of_size) -> float | None:
            return value(rows, "tokens_per_second", model=name)

        ours = speed("ours")
        swap = ratio(speed("Hugging Face, our attention"), speed("Hugging Face eager"))
        alone = "" if swap is None else f"swapping the attention alone gives {swap:.2f}x"
        then = ratio(ours, speed("Hugging Face, attention of 2022"))
        alone += "" if then is None else f"; with the attention of 2022 it is {then:.2f}x"
        verdicts += [
            Verdict(
                claim=f"GPT-2 {words}: faster than Hugging Face",
                paper=hugging_face,
                gate=3.0,
                ours=ratio(ours, speed("Hugging Face eager")),
                note=alone,
            ),
            Verdict(
                claim=f"GPT-2 {words}: faster than Megatron-LM",
                paper=megatron,
                gate=1.7,
                ours=ratio(ours, speed("Megatron-like")),
            ),
        ]
    return verdicts


def describe(rows: list[dict]) -> str:
    columns = (
        "size",
        "model",
        "microbatch",
        "step_ms",
        "tokens_per_second",
        "peak_memory_bytes",
        "final_loss",
        "why",
    )
    return rows_table(rows, columns)


def draw(rows: list[dict], path: Path) -> None:
    """Tokens per second, a group of bars for each size."""
    from train.plot import save, subplots

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure, axes = subplots(1, len(sizes), figsize=(6 * len(sizes), 4), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        chosen = matching(rows, size=size)[::-1]
        speeds = [(row["tokens_per_second"] or 0.0) / 1000 for row in chosen]
        labels = ["failed" if "why" in row else f"{x:.0f}" for row, x in zip(chosen, speeds, strict=True)]
        axis.bar_label(axis.barh([row["model"] for row in chosen], speeds), labels)
        axis.margins(x=0.15)
        axis.set_xlabel("thousand tokens per second")
        axis.set_title(size)
    save(figure, path, dpi=120)
