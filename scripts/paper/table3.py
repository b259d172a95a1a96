"""Table 3: the Long Range Arena: speed at the shapes of its five tasks, accuracy on two of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import torch

from scripts.arguments import check_as_many
from scripts.paper import tasks
from scripts.paper.encoder import Encoder, attention_function, draw_examples, encoder_config, train_classifier
from scripts.paper.memory import reason_in
from scripts.paper.pictures import train_on_pictures
from scripts.paper.report import rows_table
from scripts.paper.verdict import Verdict, matching, ratio, value
from scripts.timing import capture, median_ms
from train.step import autocast_context

TITLE = "Table 3: the Long Range Arena"
PAPER = """
Five tasks of 1K to 4K tokens, fp16. Accuracy, mean over the tasks: Transformer 59.3, flash 59.8,
block-sparse flash 59.6; speed, geometric mean over the tasks, against the Transformer: 2.4 and 2.8 times.
On ListOps 36.0, 37.6 and 37.0, on Pathfinder 72.7, 72.7 and 73.3.
"""
HERE = """
Speed: forward and backward of an encoder of the size that is usual there (2 layers, 64 channels, 2 heads)
in fp16, dropout 0.1 in all layers, on random tokens of the five shapes, by replay of a CUDA graph.
Accuracy: ListOps of 500 to 2000 tokens and Pathfinder of 32 by 32, both drawn anew
(scripts/paper/tasks.py), the same examples in the same order for each attention, in bf16 without dropout;
Text, Retrieval and Image need downloads. For Pathfinder the model first guesses hidden pixels of pictures of
8 by 8, then learns the labels there, of 16 by 16, and of 32 by 32, turned and mirrored at random; without
that it hardly left chance. The sparse mask is 256 keys for each query; the paper does not give its own.
Pixels are read in an order, the same for all, in which the 256 are every second row and column.
"""
# task -> tokens of a sequence, sequences in a batch; Retrieval reads two documents, so its batch is 16 pairs,
# since with more the CUDA graphs of eager attention do not fit
SHAPES = {
    "ListOps": (2048, 32),
    "Text": (4096, 32),
    "Retrieval": (4096, 32),
    "Image": (1024, 256),
    "Pathfinder": (1024, 256),
}
IMPLEMENTATIONS = ["eager", "ours", "ours sparse"]
# lengths at which accuracies are judged
TRAINED_LENGTHS = {"ListOps": 2000, "Pathfinder": 1024}


@dataclass
class Sizes:
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    # share of each shape's batch to run: 1 for all of it
    batch_share: float = 1.0
    longest: int = 4096
    implementations: list[str] = field(default_factory=lambda: list(IMPLEMENTATIONS))
    trained: list[str] = field(default_factory=lambda: ["ListOps", "Pathfinder"])
    examples: int = 32768
    # so many that the error of guessing is a third of a point
    test_examples: int = 16384
    listops_lengths: list[int] = field(default_factory=lambda: [500, 2000])
    steps: int = 3000
    batch: int = 64
    # for Pathfinder, a value for each side; hidden pixels are guessed at the first side
    sides: list[int] = field(default_factory=lambda: [8, 16, 32])
    guessing_steps: int = 1500
    side_steps: list[int] = field(default_factory=lambda: [3000, 1000, 1500])
    side_batches: list[int] = field(default_factory=lambda: [256, 128, 64])
    side_rates: list[float] = field(default_factory=lambda: [2e-3, 1e-3, 1e-3])

    def __post_init__(self):
        check_as_many(self, "sides", "side_steps", "side_batches", "side_rates")
        if len(self.listops_lengths) != 2:
            raise ValueError(
                f"listops_lengths must be the shortest and the longest, got {self.listops_lengths}: give both"
            )


QUICK = {
    "shapes": ["ListOps"],
    "batch_share": 0.03125,
    "longest": 64,
    "implementations": ["eager", "ours"],
    "trained": ["ListOps"],
    "examples": 8,
    "test_examples": 4,
    "listops_lengths": [10, 40],
    "steps": 1,
    "batch": 2,
}


def measure(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    for name in sizes.implementations:
        for task in sizes.shapes:
            seq_len, batch = SHAPES[task]
            seq_len, batch = min(seq_len, sizes.longest), max(1, round(batch * sizes.batch_share))
            row = {"kind": "speed", "task": task, "attention": name, "seq_len": seq_len, "batch": batch}
            row["ms"] = None
            with reason_in(row):
                row["ms"] = step_ms(name, seq_len, batch, device)
            print(f"{task} {name}: {row.get('why', row['ms'])}", flush=True)
            yield row
    for task in sizes.trained:
        train = {"ListOps": train_on_expressions, "Pathfinder": train_on_paths}[task]
        for row in train(sizes, device):
            print(f"{task} {row['attention']}: {row}", flush=True)
            yield {"kind": "accuracy", "task": task, **row}


def train_on_expressions(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    low, high = sizes.listops_lengths
    task = partial(tasks.listops, shortest=low, longest=high)
    train, test = draw_examples(task, sizes.examples, sizes.test_examples, device)
    for name in sizes.implementations:
        torch.manual_seed(0)
        config = encoder_config(high, 2, 2, 64, tasks.LISTOPS_VOCABULARY, 0.0)
        model = Encoder(config, attention_function(name, high, device), 10).to(device)
        trained = train_classifier(
            model, config, train, test, steps=sizes.steps, batch=sizes.batch, learning_rate=1e-3
        )
        yield {
            "attention": name,
            "seq_len": high,
            "examples": sizes.examples,
            "steps": sizes.steps,
            **trained,
        }


def train_on_paths(sizes: Sizes, device: torch.device) -> Iterator[dict]:
    """Yields the accuracy at the last side; `steps` is the sum over all sides."""
    drawn = [
        draw_examples(partial(tasks.pathfinder, side=side), sizes.examples, sizes.test_examples, device)
        for side in sizes.sides
    ]
    for name in sizes.implementations:
        model = None
        stages = zip(drawn, sizes.side_steps, sizes.side_batches, sizes.side_rates, strict=True)
        for (train, test), steps, batch, learning_rate in stages:
            model, trained = train_on_pictures(
                train,
                test,
                model,
                n_layer=2,
                n_head=2,
                n_embd=64,
                attention=name,
                guessing_steps=sizes.guessing_steps,
                steps=steps,
                batch=batch,
                learning_rate=learning_rate,
            )
        seq_len, steps = sizes.sides[-1] ** 2, sum(sizes.side_steps)
        yield {"attention": name, "seq_len": seq_len, "examples": sizes.examples, "steps": steps, **trained}


def step_ms(name: str, seq_len: int, batch: int, device: torch.device) -> float | None:
    """The time of forward and backward on random tokens; None on a CPU, where one step shows that it runs."""
    torch.manual_seed(0)
    config = encoder_config(seq_len, 2, 2, 64, tasks.GRAY_LEVELS, 0.1)
    model = Encoder(config, attention_function(name, seq_len, device), 10).to(device)
    tokens = torch.randint(tasks.GRAY_LEVELS, (batch, seq_len), device=device)
    targets = torch.randint(10, (batch,), device=device)
    precision = "fp16" if device.type == "cuda" else "fp32"

    def loss(*parameters) -> torch.Tensor:
        with autocast_context(device.type, precision):
            return model.loss(tokens, targets)

    parameters = tuple(model.parameters())
    if device.type != "cuda":
        torch.autograd.grad(loss(), parameters)
        return None
    _, forward, backward = capture(loss, parameters, torch.ones((), device=device))
    return median_ms(forward.replay) + median_ms(backward.replay)


def judge(rows: list[dict]) -> list[Verdict]:
    speeds = [
        row
        for row in matching(rows, kind="speed")
        if (row["seq_len"], row["batch"]) == SHAPES[row["task"]] and row["ms"] is not None
    ]

    def gain(name: str) -> float | None:
        gains = [
            ratio(
                value(speeds, "ms", task=task, attention="eager"),
                value(speeds, "ms", task=task, attention=name),
            )
            for task in SHAPES
        ]
        return None if None in gains else geometric_mean(gains)

    verdicts = [
        Verdict(
            claim=f"{words} faster than the Transformer, geometric mean of five shapes",
            paper=paper,
            gate=gate,
            ours=gain(name),
        )
        for name, words, paper, gate in (
            ("ours", "flash", "2.4x", 2.4),
            ("ours sparse", "block-sparse flash", "2.8x", 2.8),
        )
    ]

    def accuracy(task: str, name: str) -> float | None:
        trained = matching(rows, kind="accuracy", task=task, seq_len=TRAINED_LENGTHS[task])
        return value([row for row in trained if row["steps"] >= 1000], "accuracy", attention=name)

    for task, paper in (("ListOps", "37.6 and 36.0"), ("Pathfinder", "72.7 and 72.7")):
        both = [accuracy(task, name) for name in ("ours", "eager")]
        verdicts.append(
            Verdict(
                claim=f"{task}: accuracy of flash and of the Transformer, difference",
                paper=paper,
                gate=1.5,
                at_most=True,
                unit=" points",
                ours=None if None in both else abs(both[0] - both[1]),
                note="" if None in both else f"{both[0]:.1f}% and {both[1]:.1f}%",
            )
        )
    # models that learn nothing do not differ either
    verdicts.append(
        Verdict(
            claim="Pathfinder: accuracy of flash",
            paper="72.7%",
            gate=70.0,
            unit="%",
            ours=accuracy("Pathfinder", "ours"),
        )
    )
    return verdicts


def describe(rows: list[dict]) -> str:
    speed = rows_table(matching(rows, kind="speed"), ("task", "seq_len", "batch", "attention", "ms", "why"))
    columns = ("task", "attention", "seq_len", "examples", "steps", "final_loss", "accuracy")
    return f"{speed}\n\n{rows_table(matching(rows, kind='accuracy'), columns)}"


def draw(rows: list[dict], path: Path) -> None:
    """Draws the milliseconds of a step at each shape, and accuracies."""
    from train.plot import save, subplots

    figure, axes = subplots(1, 2, figsize=(10, 4))
    for axis, kind, key, label in (
        (axes[0], "speed", "ms", "forward and backward, ms"),
        (axes[1], "accuracy", "accuracy", "accuracy, %"),
    ):
        chosen = matching(rows, kind=kind)
        names = list(dict.fromkeys(row["attention"] for row in chosen))
        places = list(dict.fromkeys(row["task"] for row in chosen))
        for index, name in enumerate(names):
            mine = matching(chosen, attention=name)
            x = [
                places.index(row["task"]) + (index - (len(names) - 1) / 2) * 0.8 / len(names) for row in mine
            ]
            axis.bar(x, [row[key] or 0.0 for row in mine], 0.8 / len(names), label=name)
        axis.set_xticks(range(len(places)), places)
        axis.set_ylabel(label)
        if chosen:
            # room for the legend above the bars
            axis.margins(y=0.25)
            axis.legend(ncols=len(names), loc="upper center", fontsize="small")
    save(figure, path, dpi=120)
