"""Draws the loss curves of runs, and prints how far they differ:
python -m scripts.plot_run 'runs=[runs/a,runs/b]' out=loss.png"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from omegaconf import OmegaConf

from data.tokenizer import without_surrogates
from scripts.arguments import OVERWRITE, argument, result_file, run_script
from train.logger import counted, read_metrics
from train.plot import draw_loss
from train.results import write_result
from train.terminal import warn

# file endings of the pictures
PICTURES = (".png", ".pdf", ".svg", ".jpg")


@dataclass
class Arguments:
    runs: list[str] = argument(
        [], "run folders, as [runs/a,runs/b]; the first one is the yardstick", path=True
    )
    out: str = result_file("loss.png", "the picture to write")
    overwrite: bool = argument(False, OVERWRITE)
    title: str = argument("", "above the picture; the runs' names if empty")
    differences: str = result_file("", "a JSON file for the differences between the curves; empty for none")


def main(arguments: Arguments) -> None:
    if not arguments.runs:
        raise ValueError("runs is empty: give run folders, as 'runs=[runs/a,runs/b]'")
    if arguments.differences and len(arguments.runs) < 2:
        raise ValueError(
            f"differences={arguments.differences} needs two runs to compare, got runs={arguments.runs}: add "
            "one, or leave differences out"
        )
    # matplotlib would add an ending to a name without one, and might replace a file of that name
    if Path(arguments.out).suffix not in PICTURES:
        raise ValueError(f"out must end in one of {', '.join(PICTURES)}, got {arguments.out!r}")
    # surrogates stand for undecodable bytes of the command line, and matplotlib draws none
    if without_surrogates(arguments.title) != arguments.title:
        raise ValueError(f"title must be UTF-8, got {arguments.title!r}: leave out what begins with \\udc")
    metrics, given = {}, {}
    for run in map(Path, arguments.runs):
        if not (run / "metrics.jsonl").is_file():
            raise ValueError(f"runs: {run} holds no metrics.jsonl: give run folders, as runs/NAME")
        if (same := given.setdefault(run.resolve(), run)) is not run:
            raise ValueError(
                f"runs must be different folders, got {same} and {run}, which are one: leave one out"
            )
        # . and .. have names too; a copy of a run in another folder may have the same one
        place = Path(os.path.abspath(run))
        name = next(name for name in (place.name, str(run), str(place)) if name not in metrics)
        metrics[name] = run / "metrics.jsonl"
    tokenizers = {name: tokenizer_of(path.parent) for name, path in metrics.items()}
    if len({tokenizer for tokenizer in tokenizers.values() if tokenizer}) > 1:
        read = ", ".join(f"{name} {tokenizer}" for name, tokenizer in tokenizers.items() if tokenizer)
        warn(f"the runs have different data.tokenizer ({read}): losses per token of these do not compare")
    rows = compare(metrics)
    for row in rows:
        if arguments.differences and not row["steps"]:
            raise ValueError(
                f"differences={arguments.differences}: {row['run']} and {row['yardstick']} logged no loss "
                "after the same number of tokens: leave one out, or differences="
            )
    draw_loss(metrics, Path(arguments.out), arguments.title or ", ".join(metrics))
    print(arguments.out)
    for row in rows:
        told = "no loss of both after the same number of tokens"
        if row["steps"]:
            told = (
                f"{counted(row['steps'], 'step')}, mean |difference| {row['mean_difference']:.5f}, "
                f"largest {row['largest_difference']:.5f}"
            )
        print(f"{row['run']} against {row['yardstick']}: {told}")
    if arguments.differences:
        write_result(Path(arguments.differences), rows)


def tokenizer_of(run: Path) -> str | None:
    """The data.tokenizer of a run's settings; None if these are not there."""
    path = run / "config.yaml"
    return OmegaConf.select(OmegaConf.load(path), "data.tokenizer") if path.is_file() else None


def compare(metrics: dict[str, Path]) -> list[dict]:
    """Rows {run, yardstick, steps, mean_difference, largest_difference} of training loss, in nats.

    Curves are compared where both runs had seen the same number of tokens, as in the picture, since their
    steps may differ in size. steps: how many of the run's steps are compared; the differences of none are
    left out.
    """
    curves = {
        name: {m["tokens"]: m["train_loss"] for m in read_metrics(path) if m.get("train_loss") is not None}
        for name, path in metrics.items()
    }
    yardstick, *others = curves
    rows = []
    for name in others:
        shared = sorted(curves[yardstick].keys() & curves[name].keys())
        differences = [abs(curves[name][tokens] - curves[yardstick][tokens]) for tokens in shared]
        row = {"run": name, "yardstick": yardstick, "steps": len(shared)}
        if differences:
            row |= {"mean_difference": mean(differences), "largest_difference": max(differences)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
