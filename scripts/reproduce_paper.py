"""Repeats the experiments of the FlashAttention paper on this machine's GPU, with a verdict on each claim.

    python -m scripts.reproduce_paper                          # all of them
    python -m scripts.reproduce_paper figure2 figure3          # some, by the beginnings of their names
    python -m scripts.reproduce_paper figure3 'sizes.seq_lens=[1024,4096]'
    python -m scripts.reproduce_paper quick=true               # small; on a CPU in Triton's interpreter
    python -m scripts.reproduce_paper keep=true                # continue after an interruption
    python -m scripts.reproduce_paper overwrite=true           # measure again and replace existing results

Each experiment is a file of scripts/paper/ that says what the paper did and claims. It writes its rows to
<out>/<experiment>.json, and to <experiment>.part.json while it runs; the report, <out>/README.md, is
rewritten from all result files in that folder. Several experiments run in a process each, the longest first,
one at a time on each GPU; one that fails does not stop the others.
"""

import gc
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scripts.arguments import OVERWRITE, argument, check_least, check_place, command_line, run_script
from scripts.paper.registry import EXPERIMENTS, choose, load
from scripts.paper.report import check_report, part_of, write_report
from scripts.side_by_side import places, run_side_by_side
from train.overrides import wrong_value
from train.results import write_result

SECONDS_BETWEEN_WRITES = 20


@dataclass(kw_only=True, slots=True)
class Arguments:
    experiments: list[str] = argument([], "of " + " ".join(EXPERIMENTS) + "; empty for all")
    quick: bool = argument(
        False, "small sizes, to see that everything runs: they give no verdict on the paper's claims"
    )
    sizes: dict[str, Any] = argument({}, "the experiment's own, as sizes.seq_len=512; its file lists them")
    keep: bool = argument(
        False, "leave an experiment alone whose result lies in out, unless it was interrupted"
    )
    measure: bool = argument(True, "false: only write the report again, from the results in out")
    report: bool = argument(True, "false: only measure")
    processes: int | None = argument(None, "experiments at a time; null: one on each GPU, on a CPU one")
    out: str = argument(
        "",
        "folder of results and report; docs/results/<gpu>/paper if empty, paper_quick where quick=true",
        path=True,
    )
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check(arguments)
    names = choose(arguments.experiments) if arguments.measure else []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        if arguments.measure and not arguments.quick:
            raise ValueError("the paper's sizes need a CUDA GPU; none was found: use quick=true")
        # before any kernel is imported: triton reads it at decoration time
        os.environ["TRITON_INTERPRET"] = "1"
    paper = "paper_quick" if arguments.quick else "paper"
    folder = Path(arguments.out or Path("docs/results", machine_name(), paper))
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"out must name a folder, got {folder}, which is none: choose another place")
    check_place("out", str(folder))
    if arguments.report:
        check_report(folder)
    modules = {name: load(name) for name in EXPERIMENTS}
    paths = {name: folder / f"{name}.json" for name in names}
    if arguments.keep:
        names = [name for name in names if not paths[name].is_file() or part_of(paths[name]).is_file()]
    elif not arguments.overwrite:
        check_unmeasured(folder, paths)
    sizes = {name: choose_sizes(name, modules[name], arguments) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    if len(names) == 1:
        (name,) = names
        print(f"{name}: {modules[name].TITLE}", flush=True)
        try:
            measure(modules[name], sizes[name], device, paths[name])
        except Exception:
            traceback.print_exc()
            failed = names
    elif names:
        for name, code, seconds in measure_side_by_side(names, folder, arguments):
            print(f"{name}: {seconds:.0f} s", flush=True)
            failed += [name] if code else []
            if arguments.report:
                # written after each experiment, so that an interrupted run leaves a report
                write_report(folder, modules)
    if arguments.report:
        print(write_report(folder, modules))
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, as printed above")


def check(arguments: Arguments) -> None:
    """Raises ValueError for arguments that are wrong, have no effect, or contradict each other."""
    choose(arguments.experiments)
    check_least(arguments, "processes")
    if arguments.keep and arguments.overwrite:
        raise ValueError("keep=true leaves results alone, and overwrite=true replaces them: give one of them")
    if arguments.measure:
        return
    if not arguments.report:
        raise ValueError("measure=false and report=false leave nothing to do: leave one of them out")
    idle = [key for key in ("experiments", "sizes") if getattr(arguments, key)]
    if idle:
        raise ValueError(
            f"{' and '.join(idle)} have no effect with measure=false, which writes the report on all: leave "
            "them out"
        )


def check_unmeasured(folder: Path, paths: dict[str, Path]) -> None:
    """Raises ValueError if some of these experiments have results already, or rows of an interrupted run."""
    there = [name for name, path in paths.items() if path.is_file() or part_of(path).is_file()]
    if there:
        raise ValueError(
            f"{folder} holds results of {', '.join(there)}: add keep=true to measure what is missing, "
            "overwrite=true to measure them again, or choose another out="
        )


def measure_side_by_side(names: list[str], folder: Path, arguments: Arguments):
    """Runs this script for each of these experiments side by side, the longest first."""
    alone = replace(
        arguments, experiments=[], keep=False, overwrite=True, report=False, processes=None, out=str(folder)
    )
    commands = {
        name: [sys.executable, "-m", "scripts.reproduce_paper", name, *command_line(alone)]
        for name in sorted(names, key=EXPERIMENTS.get, reverse=True)
    }
    return run_side_by_side(commands, places(arguments.processes))


def measure(experiment: ModuleType, sizes, device: torch.device, path: Path) -> None:
    """Writes the experiment's rows to path; until they are complete, to a file of another name beside it."""
    # spare garbage collection between measurements the walk through everything that is imported
    gc.freeze()
    part = part_of(path)
    rows, written = [], time.perf_counter()
    # by default it would end this process without the rows
    before = signal.signal(signal.SIGTERM, exit_once)
    try:
        for row in experiment.measure(sizes, device):
            rows.append(row)
            if time.perf_counter() - written > SECONDS_BETWEEN_WRITES:
                write_result(part, rows)
                written = time.perf_counter()
    finally:
        if rows:
            write_result(part, rows)
        signal.signal(signal.SIGTERM, before)
    if not rows:
        # do not take the part file of an earlier try for a result
        raise ValueError("these sizes leave nothing to measure: name at least one of each list of sizes=")
    part.replace(path)


def exit_once(number: int, frame) -> NoReturn:
    """Ends this process by an exception, with the code that shells report for the signal."""
    # it may come twice, from Slurm and from a parent process, and must not break off what is written
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def choose_sizes(name: str, experiment: ModuleType, arguments: Arguments):
    """The experiment's Sizes: the paper's or the quick ones, with the command line's changes.

    Raises ValueError for changes of sizes that it has not, to values of other types, or that do not fit.
    """
    quick = experiment.QUICK if arguments.quick else {}
    known = asdict(experiment.Sizes())
    unknown = [key for key in arguments.sizes if key not in known]
    if unknown:
        raise ValueError(f"sizes of {name} are {', '.join(known)}, got {', '.join(unknown)}")
    # under their key, by which an error names them
    given = OmegaConf.create({"sizes": arguments.sizes})
    try:
        merged = OmegaConf.merge({"sizes": experiment.Sizes}, {"sizes": quick}, given)
        return OmegaConf.to_object(merged)["sizes"]
    except OmegaConfBaseException as error:
        raise ValueError(wrong_value(error, given)) from error
    except ValueError as error:
        raise ValueError(f"sizes of {name}: {error}") from error


def machine_name() -> str:
    """The GPU's name as a folder name: h200, rtx-4090; cpu without one."""
    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().replace("NVIDIA", "").replace("GeForce", "").lower().split()
    return "-".join(words)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__, words="experiments")
