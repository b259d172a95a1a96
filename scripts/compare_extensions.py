"""The worked example of docs/long_context.md: one model, extended by each method on equally many tokens.

    python -m scripts.compare_extensions out=docs/results/h200/long_context

Stages: pretrain (experiment=example_short), extend (experiment=example_long, once for each method and
length), evaluate (scripts.evaluate_context on each run) and report (a table and pictures of all results in
`out`, whichever call measured them). What is finished in runs/ or in `out` is not repeated, so that a call
may name only some stages or methods. A method is one of METHODS, alone or with an attention for its layers:
yarn+window, yarn+strided; `before` is the model as pretrained, evaluated on the same windows of text. With
several GPUs, one pretrains, since the steps are too small to share; then each takes a method.
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from omegaconf import OmegaConf

from scripts import evaluate_context
from scripts.arguments import argument, check_place, check_some, command_line, run_script, unknown_argument
from scripts.context import LEAST_LENGTH
from scripts.plot_context import draw_comparison, draw_needles
from scripts.side_by_side import places, run_side_by_side
from train.checkpoint import newest_checkpoint, read_checkpoint
from train.config import Config
from train.logger import read_metrics
from train.overrides import checked, compose_conf, key_of
from train.results import write_result
from train.weights import weights_mark

STAGES = ("pretrain", "extend", "evaluate", "report")
# the overrides of each method; the method "none" changes only the length
METHODS = {
    "none": ["start.positions=none"],
    "linear": ["start.positions=linear"],
    "ntk": ["start.positions=ntk"],
    "yarn": ["start.positions=yarn"],
    "base": ["start.positions=none", "start.rotary_base=500000"],
}
BEFORE = "before"
ALL = [BEFORE, *METHODS, "yarn+window", "yarn+strided"]
ATTENTIONS = ("window", "strided")
# the name of a result in `out`, and in it the length and the method
RESULT = re.compile(
    rf"example-(\d+)-({BEFORE}|(?:{'|'.join(METHODS)})(?:-(?:{'|'.join(ATTENTIONS)}))?)\.json"
)


@dataclass(kw_only=True, slots=True)
class Arguments:
    stages: list[str] = argument(list(STAGES), "what to do")
    methods: list[str] = argument(
        ALL, f"{BEFORE}, or of {' '.join(METHODS)}, alone or with +window or +strided"
    )
    seq_lens: list[int] = argument([16384], "to which the model is extended")
    base_seq_len: int = argument(2048, "of the model that is extended, runs/example-2048")
    short: list[str] = argument([], "overrides of the first run, as for python -m train")
    long: list[str] = argument([], "overrides of the extensions: total_tokens=10000000")
    evaluation: dict = argument({}, "changed settings of scripts.evaluate_context, as in {prompts: 5}")
    out: str = argument("long_context", "folder of the results", path=True)


def main(arguments: Arguments) -> None:
    check_some(arguments, "stages", "methods", "seq_lens")
    unknown = set(arguments.stages) - set(STAGES)
    if unknown:
        raise ValueError(f"stages must be of {', '.join(STAGES)}, got {', '.join(sorted(unknown))}")
    if "evaluate" in arguments.stages:
        evaluate_context.check_settings(evaluation(arguments))
        check_recall(arguments)
    check_windows(arguments)
    out = Path(arguments.out)
    if not arguments.out or (os.path.lexists(out) and not out.is_dir()):
        raise ValueError(f"out must name a folder, got {arguments.out!r}: choose another place")
    check_place("out", str(out / "comparison.json"))
    base, gpus = f"example-{arguments.base_seq_len}", places()
    cases = in_order([Case(base, *pair) for pair in product(arguments.methods, arguments.seq_lens)])
    extensions = {case: extension(case) for case in cases if case.method != BEFORE}
    there = results_in(out, base) if "report" in arguments.stages else []
    known = list(dict.fromkeys([*cases, *there]))
    check_finished(known, out, arguments)
    if "pretrain" in arguments.stages:
        length = f"seq_len={arguments.base_seq_len}"
        train(base, ["experiment=example_short", length, *arguments.short])
    failed, each = [], [stage for stage in arguments.stages if stage in ("extend", "evaluate")]
    if each and len(cases) > 1 and len(gpus) > 1:
        commands = {}
        # start the shortest job last
        for case in sorted(cases, key=lambda case: case.method == BEFORE):
            alone = replace(arguments, stages=each, methods=[case.method], seq_lens=[case.seq_len])
            commands[case.name] = [sys.executable, "-m", "scripts.compare_extensions", *command_line(alone)]
        failed = [name for name, code, _ in run_side_by_side(commands, gpus) if code]
        each = []
    if "extend" in each:
        for case, overrides in extensions.items():
            train(case.name, [*overrides, *arguments.long])
    if "evaluate" in each:
        for case in cases:
            evaluate(case, out / f"{case.name}.json", arguments)
    if "report" in arguments.stages:
        report(in_order(known), out)
    if failed:
        raise ValueError(f"{', '.join(failed)} failed, see above: what is finished is not done again")


def in_order(cases: list["Case"]) -> list["Case"]:
    """By length, and within a length the pretrained model first and the others as they come."""
    return sorted(cases, key=lambda case: (case.seq_len, case.method != BEFORE))


def results_in(out: Path, base: str) -> list["Case"]:
    """The cases of which there are results; those before the extension are taken for results of `base`."""
    found = (RESULT.fullmatch(path.name) for path in sorted(out.glob("*.json")))
    return [Case(base, name[2].replace("-", "+"), int(name[1])) for name in found if name]


def check_windows(arguments: Arguments) -> None:
    """Raises ValueError for windows of text too short for `before`, or for a method to have an effect."""
    shortest = min(arguments.seq_lens)
    for method in arguments.methods:
        if method.partition("+")[0] not in (BEFORE, "base") and shortest <= arguments.base_seq_len:
            raise ValueError(
                f"seq_lens must be above base_seq_len={arguments.base_seq_len} for methods=[{method}], which "
                f"would change nothing, got {arguments.seq_lens}: raise them, or leave that method out"
            )
    if BEFORE in arguments.methods and shortest < arguments.base_seq_len:
        raise ValueError(
            f"seq_lens must be at least base_seq_len={arguments.base_seq_len}, which {BEFORE} reads, got "
            f"{arguments.seq_lens}"
        )


def check_recall(arguments: Arguments) -> None:
    """Raises ValueError for recall prompts longer than models of these methods and lengths can take."""
    shortest = arguments.base_seq_len if BEFORE in arguments.methods else min(arguments.seq_lens, default=0)
    lengths = evaluation(arguments).lengths
    if shortest < LEAST_LENGTH:
        raise ValueError(
            f"recall needs {LEAST_LENGTH} tokens, and a model of methods={arguments.methods} takes "
            f"{shortest}: raise base_seq_len and seq_lens, or leave {BEFORE} out"
        )
    if lengths and max(lengths) > shortest:
        raise ValueError(
            f"evaluation.lengths={lengths} must be at most the {shortest} tokens that a model of "
            f"methods={arguments.methods} takes: lower them, or leave {BEFORE} out"
        )


def check_finished(cases: list["Case"], out: Path, arguments: Arguments) -> None:
    """Raises ValueError for runs and results under the same names that come from other models or settings."""
    for case in cases:
        settings = Path("runs", case.run, "config.yaml")
        if case.method != BEFORE and settings.exists():
            began = OmegaConf.load(settings).start.weights
            if began != f"runs/{case.base}":
                raise ValueError(
                    f"runs/{case.run} began from {began}, not from runs/{case.base}: move it away, or use "
                    "its base_seq_len"
                )
            if "pretrain" in arguments.stages and not Path("runs", case.base, "summary.json").exists():
                raise ValueError(
                    f"runs/{case.run} began from a runs/{case.base} that is not there: move it away, too, or "
                    "put that one back"
                )
        if (out / f"{case.name}.json").exists():
            check_measured(case, out / f"{case.name}.json", arguments)


def check_measured(case: "Case", path: Path, arguments: Arguments) -> None:
    """Raises ValueError for results of other weights than the run has now, or of another evaluation."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        model, run = result["rows"][0]["model"], Path("runs", case.run)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of scripts.evaluate_context: move it away, or choose another out="
        ) from error
    if model != str(run):
        raise ValueError(f"{path} is of {model}, not of {run}: choose another out=")
    newest = newest_checkpoint(run / "checkpoints")
    if newest is None and ("pretrain" if case.method == BEFORE else "extend") in arguments.stages:
        raise ValueError(f"{path} is of a {run} that is not there: move it away, too, or put that one back")
    # older results lack both
    if newest is not None and result.get("weights") not in (None, weights_mark(newest)):
        raise ValueError(f"{path} is of other weights than {run} has: move it away, or choose another out=")
    if "evaluate" not in arguments.stages or "settings" not in result:
        return
    then, now = result["settings"], asdict(evaluation(arguments))
    # these follow from the run and the machine, unless they are given
    free = {"model", "out", "window", "data", "device", "precision", "attention"} - set(arguments.evaluation)
    for key in now:
        if key not in free and now[key] != then[key]:
            raise ValueError(
                f"{path} was measured with evaluation.{key}={then[key]}, and this call asks for {now[key]}: "
                "move it away, or choose another out="
            )


class Case(NamedTuple):
    """One line of the table."""

    # the run of the model that is extended
    base: str
    method: str
    # tokens in a window of text; the extended model takes a whole window
    seq_len: int

    @property
    def name(self) -> str:
        """The name of its results, and of its own run if it has one."""
        return f"example-{self.seq_len}-{self.method.replace('+', '-')}"

    @property
    def run(self) -> str:
        return self.base if self.method == BEFORE else self.name


def extension(case: Case) -> list[str]:
    """The command line of one extension. Raises ValueError for an unknown method."""
    positions, _, attention = case.method.partition("+")
    if positions not in METHODS or attention not in ("", *ATTENTIONS):
        raise ValueError(
            f"methods must be {BEFORE}, or of {', '.join(METHODS)}, alone or with +window or +strided, "
            f"got {case.method!r}"
        )
    overrides = ["experiment=example_long", f"seq_len={case.seq_len}", f"start.weights=runs/{case.base}"]
    if attention:
        overrides.append(f"attention={attention}")
    return [*overrides, *METHODS[positions]]


def train(name: str, overrides: list[str]) -> None:
    """Trains in a subprocess, unless that run is finished. Raises ValueError if it fails or had differed."""
    if Path("runs", name, "summary.json").exists():
        check_overrides(name, overrides)
        print(f"{name}: finished before", flush=True)
        return
    command = [sys.executable, "-m", "train", f"name={name}", *overrides]
    print(" ".join(command[1:]), flush=True)
    # which lets it save its state at Ctrl-C
    [(_, code, _)] = run_side_by_side({name: command}, [None])
    if code:
        raise ValueError(f"the training run {name} failed, see above: what is finished is not done again")


def check_overrides(name: str, overrides: list[str]) -> None:
    """Raises ValueError if the finished run of that name had other total_tokens or other overrides."""
    asked = OmegaConf.create(asdict(checked(compose_conf(overrides), Config)))
    path = Path("runs", name, "config.yaml")
    had = OmegaConf.load(path)
    keys = ["total_tokens", *map(key_of, overrides)]
    for key in dict.fromkeys(keys):
        # a configuration does not hold experiment=..., only the values that it changes
        then, now = (OmegaConf.select(config, key) for config in (had, asked))
        if key != "experiment" and then != now:
            raise ValueError(
                f"{path} has {key}={then}, and this call asks for {now}: move runs/{name} away, or give what "
                "it had in short= or long="
            )


def evaluate(case: Case, out: Path, arguments: Arguments) -> None:
    if out.exists():
        # the run may have been trained since
        check_measured(case, out, arguments)
        print(f"{out}: measured before", flush=True)
        return
    settings, folder = evaluation(arguments), run_config(case.run)["data"]["folder"]
    given = {"model": f"runs/{case.run}", "data": settings.data or folder, "out": str(out)}
    evaluate_context.main(replace(settings, window=case.seq_len, **given))


def evaluation(arguments: Arguments) -> evaluate_context.Arguments:
    """The settings that evaluate each run; empty data: the run's own. Raises ValueError for unusable ones."""
    given = arguments.evaluation
    for key in ("model", "out", "window"):
        if key in given:
            raise ValueError(f"evaluation.{key} differs from run to run, got {given[key]}: leave it out")
    names = [item.name for item in fields(evaluate_context.Arguments)]
    for key in given:
        if key not in names:
            reason = unknown_argument(str(key), evaluate_context.Arguments)
            raise ValueError(
                f"evaluation={given} is not of scripts.evaluate_context: {reason}"
                "python -m scripts.evaluate_context --help lists them"
            )
    try:
        return checked(OmegaConf.create({"model": "", "data": "", **given}), evaluate_context.Arguments)
    except ValueError as error:
        raise ValueError(f"evaluation={given} is not of scripts.evaluate_context: {error}") from error


def report(cases: list[Case], out: Path) -> None:
    """Writes comparison.json and two pictures for each length, and prints a table, of the measured cases."""
    measured = {}
    for case in cases:
        path = out / f"{case.name}.json"
        if path.exists():
            measured[case] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        else:
            print(f"{path}: not measured yet", flush=True)
    if not measured:
        raise ValueError(f"{out} holds no results of these methods and lengths: run the other stages first")
    rows = [summary(case, found) for case, found in measured.items()]
    write_result(out / "comparison.json", rows)
    for length in sorted({case.seq_len for case in measured}):
        chosen = {case.method: found for case, found in measured.items() if case.seq_len == length}
        draw_comparison(chosen, out / f"comparison_{length}.png")
        draw_needles(chosen, out / f"needles_{length}.png")
    print(table(rows))


def summary(case: Case, measured: list[dict]) -> dict:
    """One line of the table, from a run's metrics and the results of evaluate_context.

    A loss that was not finite is None; a mean is over the finite ones.
    """
    path = Path("runs", case.run, "metrics.jsonl")
    if not path.exists():
        raise ValueError(
            f"{path} is not there: the report reads it beside the results, run it where runs/ is"
        )
    metrics = read_metrics(path)
    # both lines hold a validation loss, or null if it was not finite: another line must not replace it
    first, last = metrics[0], metrics[-1]
    by_context = {row["context"]: row["loss"] for row in measured if row["kind"] == "context"}
    row = {
        "method": case.method,
        "run": case.run,
        "window": case.seq_len,
        "seq_len": measured[0]["seq_len"],
        "tokens": last["tokens"],
        "tokens_per_second_per_gpu": last["tokens_per_second_per_gpu"],
        "val_loss_at_start": first["val_loss"],
        "val_loss": last["val_loss"],
        "loss_with_least_context": by_context[min(by_context)],
        "loss_with_whole_context": by_context[max(by_context)],
        "effective_context": next(r["context"] for r in measured if r["kind"] == "effective_context"),
    }
    for kind in ("passkey", "key_value"):
        recall = [r for r in measured if r["kind"] == kind and r["length"] == row["seq_len"]]
        for value in ("accuracy", "loss"):
            # evaluation.lengths may leave out the model's own length
            found = [r[value] for r in recall if r[value] is not None]
            row[f"{kind}_{value}"] = mean(found) if found else None
    return row


def run_config(name: str) -> dict:
    """The configuration of a finished run. Raises ValueError if there is none."""
    newest = newest_checkpoint(Path("runs", name, "checkpoints"))
    if newest is None:
        raise ValueError(f"runs/{name} has no checkpoint: run the stages pretrain and extend first")
    return read_checkpoint(newest)["config"]


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, as in the guide."""
    columns = {
        "method": "method",
        "window": "windows of",
        "seq_len": "tokens seen",
        "val_loss_at_start": "loss untrained",
        "val_loss": "loss",
        "loss_with_whole_context": "with all its context",
        "effective_context": "effective context",
        "passkey_accuracy": "passkey",
        "passkey_loss": "nats",
        "key_value_loss": "key-value, nats",
        "tokens_per_second_per_gpu": "tokens/s a GPU",
    }

    def shown(value) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:,.0f}" if value > 1000 else f"{value:.3f}"
        return f"{value:,}" if isinstance(value, int) else value

    lines = [columns.values(), ["---"] * len(columns)]
    lines += [[shown(row[key]) for key in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
