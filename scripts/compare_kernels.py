"""Times copies of kernels/hopper in turns, in one process on one GPU: what a change to a kernel is worth.

    git worktree add ../before HEAD~1
    python -m scripts.compare_kernels 'copies=[../before,.]'

A copy is a folder that holds one of the project. Only its kernels/hopper is loaded; all else is the project's
that runs, so a copy whose kernels expect another kernels/problem.py cannot be compared. In each of `repeats`
turns, there and back through the copies, every copy computes the same inputs, forward and backward, by
replays of a CUDA graph: alone, which is a median of calls with a cold L2 after a pause, and steady, a mean of
back-to-back calls, which the card's limit of power slows down. A speed is the time of the first copy divided
by that of another. difference: the largest one of out, dq, dk or dv from the first copy's, over the largest
number there.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType

import torch

import kernels
from kernels import block_masks
from kernels.problem import Problem
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.benchmark_attention import DTYPES, Shape, Shapes, check_shapes, inputs, shapes
from scripts.timing import capture_forward, median_ms
from train.results import write_result

PACKAGE = "kernels.hopper"
PASSES = ("forward", "backward")
# seconds of back-to-back calls before those that are timed, and of these
BEFORE, STEADY = 0.12, 0.25
# milliseconds of calls that are queued at a time
QUEUED_MS = 20


@dataclass(kw_only=True, slots=True)
class Arguments(Shapes):
    copies: list[str] = argument(
        ..., "folders of the project's copies, the one to compare with first", path=True
    )
    passes: list[str] = argument(list(PASSES), "of " + " ".join(PASSES))
    pattern: str = argument("", "a block mask in place of others, as in conf/attention/strided.yaml")
    steady: bool = argument(True, "time back-to-back calls, too")
    repeats: int = argument(4, "turns of each copy; an even number goes there as often as back")
    out: str = result_file("kernels.json", "result file")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check_least(arguments, "repeats")
    check_shapes(arguments)
    # beside others, one of them under a second spelling shows what no change is worth
    if len({Path(name).resolve() for name in arguments.copies}) < 2:
        raise ValueError(f"copies={arguments.copies} must name two folders or more, to compare them")
    check_some(arguments, "passes")
    if unknown := set(arguments.passes) - set(PASSES):
        raise ValueError(f"passes must be of {' '.join(PASSES)}, got {' '.join(sorted(unknown))}")
    if arguments.pattern:
        if arguments.window is not None:
            raise ValueError(f"window={arguments.window} and pattern={arguments.pattern!r}: give one of them")
        if False in arguments.causal:
            raise ValueError(
                f"pattern={arguments.pattern!r} takes the place of both masks: use causal=[true]"
            )
        block_masks.parse(arguments.pattern, 1)
    copies = {name: load(Path(name)) for name in dict.fromkeys(arguments.copies)}
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("compare_kernels needs a Hopper GPU; none was found")
    rows = []
    for shape in shapes(arguments):
        rows += measure(arguments, shape, copies)
        write_result(Path(arguments.out), rows)


def load(folder: Path) -> ModuleType:
    """The package kernels.hopper of a copy, beside the project's own and those of other copies."""
    if not (folder / "kernels" / "hopper" / "launch.py").is_file():
        raise ValueError(
            f"copies: {folder} holds no kernels/hopper: name a folder with a copy of the project"
        )
    own_path, own_package = kernels.__path__, kernels.hopper
    own = {name: sys.modules.pop(name) for name in loaded()}
    kernels.__path__ = [str((folder / "kernels").resolve())]
    try:
        package = import_module(PACKAGE)
        # imports the rest, which later calls find in the package's cache
        package.launcher()
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(own)
        kernels.__path__, kernels.hopper = own_path, own_package
    return package


def loaded() -> list[str]:
    return [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]


def measure(arguments: Arguments, shape: Shape, copies: dict[str, ModuleType]) -> list[dict]:
    """A row for each copy and pass."""
    q, k, v = (x.detach() for x in inputs(shape, DTYPES[arguments.dtype]))
    dout = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    seed = torch.zeros((), dtype=torch.int64, device="cuda") if arguments.dropout_p > 0.0 else None
    mask = arguments.pattern and block_masks.parse(arguments.pattern, shape.seq_len, device="cuda")
    problem = Problem(
        softmax_scale=shape.head_dim**-0.5,
        causal=shape.causal and not mask,
        blocks=tuple(mask.tensors()) if mask else (),
        window=arguments.window,
        dropout_p=arguments.dropout_p,
        dropout_seed=seed,
    )
    graphs, truth, differences = {}, None, {}
    # what a backward graph reads stays allocated
    kept = []
    for name, copy in copies.items():
        out, lse = copy.attention_forward(problem, q, k, v)
        kept += [out, lse]
        found = [out]
        if "backward" in arguments.passes:
            found += copy.attention_backward(problem, dout, None, q, k, v, out, lse)
        truth = truth or found
        differences[name] = max(map(difference, found, truth))
        # the defaults bind what the names hold now
        calls = {
            "forward": lambda copy=copy: copy.attention_forward(problem, q, k, v),
            "backward": lambda copy=copy, out=out, lse=lse: copy.attention_backward(
                problem, dout, None, q, k, v, out, lse
            ),
        }
        for direction in arguments.passes:
            graphs[name, direction] = capture_forward(calls[direction])
    alone, steady = ({key: [] for key in graphs} for _ in range(2))
    for turn in range(arguments.repeats):
        # there and back, so that none always comes behind the same other one
        for key, graph in list(graphs.items())[:: -1 if turn % 2 else 1]:
            alone[key].append(median_ms(graph.replay))
            if arguments.steady:
                steady[key].append(steady_ms(graph.replay, alone[key][-1]))
    rows = []
    for (name, direction), times in alone.items():
        first = next(iter(copies)), direction
        row = {"copy": name, "pass": direction, **shape._asdict(), "dtype": arguments.dtype}
        row |= {"window": arguments.window, "pattern": arguments.pattern, "dropout_p": arguments.dropout_p}
        row |= {"alone_ms": median(times), "speed_alone": median(alone[first]) / median(times)}
        if arguments.steady:
            steadily = median(steady[name, direction])
            row |= {"steady_ms": steadily, "speed_steady": median(steady[first]) / steadily}
        rows.append(row | {"difference": differences[name]})
        print_row(rows[-1])
    return rows


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()


def steady_ms(function: Callable, milliseconds: float) -> float:
    """The mean of calls back to back, behind others of the same; milliseconds: about what one takes."""
    # as many calls at a time as keep the queue filled, but short
    at_a_time = math.ceil(QUEUED_MS / milliseconds)
    calls_of(function, BEFORE, at_a_time)
    started = time.perf_counter()
    n = calls_of(function, STEADY, at_a_time)
    return (time.perf_counter() - started) / n * 1e3


def calls_of(function: Callable, seconds: float, at_a_time: int) -> int:
    """Calls for so long; returns their number, once all have ended."""
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(at_a_time):
            function()
        n += at_a_time
        torch.cuda.synchronize()
    return n


def print_row(row: dict) -> None:
    mask = row["pattern"] or ("GPT-2" if row["packed"] else "causal" if row["causal"] else "full")
    speeds = (
        f"{how} {row[f'speed_{how}']:6.3f} / {row[f'{how}_ms']:8.3f} ms"
        for how in ("alone", "steady")
        if f"speed_{how}" in row
    )
    print(
        f"D {row['head_dim']:3} {mask:6} T {row['seq_len']:6} {row['pass']:8} {row['copy']:20} "
        f"{', '.join(speeds)}, differs by {row['difference']:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
