"""Repeats measurements: runs the commands that result files name, and compares the new values with the old.

    python -m scripts.remeasure docs/results/h200/attention.json docs/results/h200/scaling/two.json
    python -m scripts.remeasure docs/results/h200/training_350m_128.json warmup_steps=3

Other arguments replace those of each command. Each file names its command and its number of GPUs. The
commands run side by side on this machine's GPUs, started in the order given. New files are laid out in `out`
as the old ones are, which stay as they were; a training run is named after its new file, runs/remeasured-...,
and its summary is copied to that file. Then, for each file, a line for each measured value gives new over
old, as median and range over the rows.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.arguments import argument, run_script
from scripts.side_by_side import places, run_side_by_side
from train.logger import counted
from train.overrides import key_of

LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
# the scripts whose out= names a folder; that of others names one file
OF_FOLDERS = ("scripts.reproduce_paper", "scripts.compare_extensions")


@dataclass(kw_only=True, slots=True)
class Arguments:
    files: list[str] = argument([], "result files, such as those of docs/results", path=True)
    out: str = argument("remeasured", "folder of the new files", path=True)
    changes: list[str] = argument([], "KEY=VALUE of the commands, given one by one")


class Repetition(NamedTuple):
    """A measurement to repeat."""

    old: Path
    # the file that the command writes, and the file that it is copied to
    left: Path
    new: Path
    command: list[str]
    n_gpus: int


def main(arguments: Arguments) -> None:
    if not arguments.files:
        raise ValueError("files is empty: name result files, such as docs/results/h200/attention.json")
    files = [Path(name) for name in arguments.files]
    # some paths may be absolute
    together = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
    out = Path(arguments.out)
    repetitions = {
        str(path): repetition(path, out / os.path.relpath(path, together), arguments.changes)
        for path in dict.fromkeys(files)
    }
    gpus = places()
    commands, needed, writers = {}, {}, {}
    for name, again in repetitions.items():
        for path in (again.left, again.new):
            if path.exists():
                raise ValueError(f"{path} is there already: move it away, or choose another out=")
            other = writers.setdefault(path, name)
            if other != name:
                raise ValueError(f"{other} and {name} would both be made again as {path}: name one at a time")
        commands[name], needed[name] = again.command, again.n_gpus
    failed = []
    for name, code, seconds in run_side_by_side(commands, gpus, needed):
        again = repetitions[name]
        if code or not again.left.is_file():
            failed.append(name)
            print(f"{name}: failed after {seconds:.0f} s", flush=True)
            continue
        if again.left != again.new:
            again.new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(again.left, again.new)
        print(f"{name}: {seconds:.0f} s\n{comparison(again.old, again.new, arguments.changes)}", flush=True)
    if failed:
        raise ValueError(f"{', '.join(failed)} failed, as printed above")


def repetition(old: Path, new: Path, changes: Sequence[str] = ()) -> Repetition:
    """How to repeat the measurement of a result file, with `changes` in place of its command's own values.

    Raises ValueError as read_command, for a result made of others, and for changes of where the new one goes.
    """
    module, given, n_gpus = read_command(old)
    changed = {key_of(word) for word in changes}
    if taken := changed & {"name", "differences"}:
        raise ValueError(
            f"{min(taken)}= follows from out=, which names the folder of new files: leave it out"
        )
    # it was given for the old files: a picture or table where the new ones go is somebody's
    given = [*without(given, "overwrite", *changed), *changes]
    stages = [word for word in given if key_of(word) == "stages"]
    if module == "scripts.compare_extensions" and stages and "evaluate" not in stages[-1]:
        raise ValueError(
            f"{old} is made of other results, by {stages[-1]}: repeat those, or add "
            "'stages=[evaluate,report]'"
        )
    left = new
    if module == "train":
        # named after the new file, so that another out= is another run
        name = "-".join(new.with_suffix("").parts).lstrip("/.-")
        # of other characters Hydra would make something else
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        left = Path("runs", name, "summary.json")
        given = [*without(given, "name"), f"name={name}"]
    elif module == "scripts.plot_run":
        # its rows are the differences; the picture goes beside them
        given = without(given, "out", "differences")
        given += [f"out={new.with_suffix('.png')}", f"differences={new}"]
    else:
        check_out(module, old)
        place = new.parent if module in OF_FOLDERS else new
        given = [*without(given, "out"), f"out={place}"]
    launcher = ["-m"] if n_gpus == 1 else [*LAUNCHER, f"--nproc-per-node={n_gpus}", "-m"]
    return Repetition(old, left, new, [sys.executable, *launcher, module, *given], n_gpus)


def read_command(old: Path) -> tuple[str, list[str], int]:
    """The module that made a result file, what it was given, and on how many processes.

    Raises ValueError for a file that does not say, and for one that its command alone would not make.
    """
    try:
        result = json.loads(old.read_text(encoding="utf-8"))
        words, n_gpus = shlex.split(str(result["command"])), max(1, result["n_gpus"])
        # without rows there is nothing to compare with
        iter(result["rows"])
    except OSError as error:
        raise ValueError(f"files: {old} cannot be read ({error}): correct it") from error
    # invalid UTF-8 and invalid JSON both raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{old} does not name a command, its GPUs and its rows: it is no result file"
        ) from error
    words = words[1:]
    # skip options of Python itself, which change no measurement
    while words and words[0] in ("-u", "-W"):
        words = words[1 if words[0] == "-u" else 2 :]
    if len(words) < 2 or words[0] != "-m" or not (words[1] == "train" or words[1].startswith("scripts.")):
        raise ValueError(f"{old} comes from {result['command']!r}: only train and scripts.* are repeated")
    module, given = words[1], words[2:]
    if {"-m", "--multirun"} & set(given):
        raise ValueError(
            f"{old} is of one of the runs that {result['command']!r} has trained: give that command again, "
            "or this run's own values to python -m train"
        )
    if module == "scripts.reproduce_paper" and old.name.endswith(".part.json"):
        raise ValueError(f"{old} is of an experiment that did not finish: leave it out, or give its command")
    return module, given, n_gpus


def without(words: Sequence[str], *keys: str) -> list[str]:
    """The words of a command that give none of the keys."""
    return [word for word in words if key_of(word) not in keys]


def check_out(module: str, old: Path) -> None:
    """Raises ValueError if a script that old is said to come from cannot be told where to write."""
    try:
        keys = {item.name for item in fields(import_module(module).Arguments)}
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{old} comes from {module}, which cannot be called ({error}): leave it out"
        ) from error
    if "out" not in keys:
        raise ValueError(f"{old} comes from {module}, which has no out= for a new result: leave it out")


def comparison(old: Path, new: Path, changes: Sequence[str] = ()) -> str:
    """A line for each measured value: new over old, as median and range over the rows.

    Rows whose texts or truth values differ are of something else, and are counted. changes: as for
    `repetition`; what they name may differ.
    """
    before, after = (json.loads(path.read_text(encoding="utf-8"))["rows"] for path in (old, new))
    if len(before) != len(after):
        return f"  {len(after)} rows where {old} has {len(before)}: not compared"
    # implementations=[ours] changes implementation
    changed = [key_of(word) for word in changes]
    others, ratios, missing = [], {}, Counter()
    fractions = {key for row in before for key, value in row.items() if isinstance(value, float)}
    for number, (was, is_now) in enumerate(zip(before, after, strict=True), 1):
        differ = [
            f"{key}={is_now[key]}, which was {value}"
            for key, value in was.items()
            if isinstance(value, str | bool)
            and is_now.get(key, value) != value
            and not any(word.startswith(key) for word in changed)
        ]
        if differ:
            others.append(f"row {number} of {differ[0]}")
            continue
        for key, value in was.items():
            if not is_number(value):
                continue
            if not is_number(is_now.get(key)):
                missing[key] += 1
            elif value:
                ratios.setdefault(key, []).append(is_now[key] / value)
    # integers are either sizes, which are equal in both, or measured bytes, which differ
    ratios = {key: found for key, found in ratios.items() if key in fractions or set(found) != {1.0}}
    lines = [
        f"  {key:<28} {median(found):6.3f}  ({min(found):.3f} to {max(found):.3f})"
        for key, found in ratios.items()
    ]
    lines += [f"  {key:<28} no number in {counted(n, 'row')} that had one" for key, n in missing.items()]
    if others:
        lines.append(f"  {counted(len(others), 'row')} not compared, the first: {others[0]}")
    return "\n".join(lines)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__, words="files", others="changes")
