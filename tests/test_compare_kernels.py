"""scripts.compare_kernels: copies of kernels/hopper beside one another, and what is told of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import block_masks
from scripts import compare_kernels
from scripts.benchmark_attention import Shape
from tests.on_a_gpu import on_hopper

ROOT = Path(kernels.__file__).parents[1]
SHAPE = Shape(1, 8, 2, 4, True, False)


@pytest.fixture
def changed(tmp_path):
    """A copy of the project whose long tiles have other registers."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    tiles = tmp_path / "kernels" / "hopper" / "tiles.py"
    text = tiles.read_text()
    assert "ForwardTile(2, 128, 2, 2, 240, 24)" in text
    tiles.write_text(text.replace("ForwardTile(2, 128, 2, 2, 240, 24)", "ForwardTile(2, 128, 2, 2, 232, 40)"))
    return tmp_path


LOADING = """
import sys
from pathlib import Path

import kernels
import kernels.hopper.launch as own
from scripts.compare_kernels import load

before = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
copies = [load(Path(folder)).launcher() for folder in sys.argv[1:]]
after = {name: module for name, module in sys.modules.items() if name.startswith("kernels")}
assert all(after[name] is module for name, module in before.items())
import kernels.hopper.launch as again
assert again is own and kernels.hopper.launcher() is own
for launch in (own, *copies):
    print(launch.__file__, launch.forward_tile(128, "full", 4096).consumer_registers)
print(len({id(launch.forward_kernel) for launch in (own, *copies)}))
"""


def test_copies_have_kernels_of_their_own_and_leave_the_projects_as_they_are(changed):
    # in a process that compiles, which Triton's interpreter does not
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(changed), str(ROOT)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launch = "kernels/hopper/launch.py"
    assert done.stdout.splitlines() == [
        f"{ROOT / launch} 240", f"{changed.resolve() / launch} 232", f"{ROOT / launch} 240", "3"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"copies": [".", "."]}, "name two folders or more"),
        ({"copies": [".", "./.", "docs/.."]}, "name two folders or more"),
        ({"copies": [".", "docs"]}, "docs holds no kernels/hopper"),
        ({"copies": [".", "docs"], "passes": ["side"]}, "passes must be of forward backward, got side"),
        ({"copies": [".", "docs"], "passes": []}, "passes must not be empty"),
        ({"copies": [".", "docs"], "dtype": "fp32"}, "dtype must be one of bf16, fp16, got fp32"),
        ({"copies": [".", "docs"], "window": 9}, r"use causal=\[true\]"),
        ({"copies": [".", "docs"], "repeats": 0}, "repeats must be at least 1"),
        ({"copies": [".", "docs"], "pattern": "causal()"}, r"use causal=\[true\]"),
        ({"copies": [".", "docs"], "pattern": "none(1)", "causal": [True]}, "none"),
        ({"copies": [".", "docs"], "pattern": "causal()", "causal": [True], "window": 0}, "give one of them"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(given, reason, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=reason):
        compare_kernels.main(compare_kernels.Arguments(**given))


@pytest.fixture
def numbers_of_a_cpu(monkeypatch):
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype, **options: randn(*shape, **options))


@pytest.mark.usefixtures("numbers_of_a_cpu")
def test_a_speed_is_the_first_copys_time_over_anothers(monkeypatch, capsys):
    # of each copy forward and backward, in each of three turns
    given = {"before": ([2.0, 3.0, 2.5], [8.0, 9.0, 7.0]), "after": ([2.0, 1.0, 4.0], [10.0, 10.0, 10.0])}
    turns = iter([times for passes in given.values() for times in passes])
    monkeypatch.setattr(
        compare_kernels, "capture_forward", lambda function: SimpleNamespace(replay=iter(next(turns)))
    )
    monkeypatch.setattr(compare_kernels, "median_ms", lambda replay: next(replay))
    monkeypatch.setattr(compare_kernels, "steady_ms", lambda replay, alone: 2 * alone)

    def copy(shift: float) -> SimpleNamespace:
        return SimpleNamespace(
            attention_forward=lambda problem, q, k, v: (torch.ones(4) + shift, torch.zeros(4)),
            attention_backward=lambda *given: (torch.full((4,), 2.0), torch.ones(4), torch.ones(4)),
        )

    arguments = compare_kernels.Arguments(copies=["before", "after"], repeats=3)
    rows = compare_kernels.measure(arguments, SHAPE, {"before": copy(0.0), "after": copy(0.25)})
    assert [(row["copy"], row["pass"]) for row in rows] == [
        ("before", "forward"), ("before", "backward"), ("after", "forward"), ("after", "backward")
    ]  # fmt: skip
    assert [row["alone_ms"] for row in rows] == [2.5, 8.0, 2.0, 10.0]
    assert [row["steady_ms"] for row in rows] == [5.0, 16.0, 4.0, 20.0]
    assert [row["speed_alone"] for row in rows] == [1.0, 1.0, 1.25, 0.8]
    assert [row["speed_steady"] for row in rows] == [1.0, 1.0, 1.25, 0.8]
    assert [row["difference"] for row in rows] == [0.0, 0.0, 0.25, 0.25]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "after" in lines[2]
    assert "alone  1.250 /    2.000 ms, steady  1.250 /    4.000 ms" in lines[2]


@pytest.mark.usefixtures("numbers_of_a_cpu")
def test_turns_go_there_and_back_through_the_copies(monkeypatch):
    order, captured = [], iter("ab")
    monkeypatch.setattr(
        compare_kernels, "capture_forward", lambda function: SimpleNamespace(replay=next(captured))
    )
    monkeypatch.setattr(compare_kernels, "median_ms", lambda replay: order.append(replay) or 1.0)
    copy = SimpleNamespace(attention_forward=lambda *given: (torch.ones(4), torch.zeros(4)))
    arguments = compare_kernels.Arguments(copies=["a", "b"], passes=["forward"], steady=False)
    compare_kernels.measure(arguments, SHAPE, {"a": copy, "b": copy})
    assert "".join(order) == "abbaabba"


@pytest.mark.usefixtures("numbers_of_a_cpu")
def test_a_pattern_takes_the_place_of_the_causal_mask(monkeypatch):
    parse, problems = block_masks.parse, []
    monkeypatch.setattr(block_masks, "parse", lambda *given, device: parse(*given))
    monkeypatch.setattr(compare_kernels, "capture_forward", lambda function: SimpleNamespace(replay=None))
    monkeypatch.setattr(compare_kernels, "median_ms", lambda replay: 1.0)
    copy = SimpleNamespace(
        attention_forward=lambda problem, *given: problems.append(problem) or (torch.ones(4), torch.zeros(4))
    )
    for pattern in ("", "causal()"):
        arguments = compare_kernels.Arguments(
            copies=["a", "b"], passes=["forward"], pattern=pattern, steady=False
        )
        compare_kernels.measure(arguments, SHAPE, {"a": copy})
    assert [(problem.causal, len(problem.blocks)) for problem in problems] == [(True, 0), (False, 6)]


def test_short_calls_are_queued_many_at_a_time_and_long_ones_one_by_one(monkeypatch):
    clock, counts = [0.0], [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: counts.append(0))
    monkeypatch.setattr(compare_kernels.time, "perf_counter", lambda: clock[0])

    def calls_at_a_time(milliseconds: float) -> set[int]:
        def call() -> None:
            clock[0] += milliseconds / 1e3
            counts[-1] += 1

        counts[:] = [0]
        compare_kernels.steady_ms(call, milliseconds)
        return set(counts[:-1])

    assert calls_at_a_time(0.5) == {40}
    assert calls_at_a_time(15.0) == {2}
    assert calls_at_a_time(70.0) == {1}


def test_steady_calls_are_counted_behind_others_of_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock, calls = [0.0], []
    monkeypatch.setattr(compare_kernels.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        # the first ones are slow, as on a card whose clock has not settled
        clock[0] += 0.02 if clock[0] < 0.1 else 0.01
        calls.append(clock[0])

    assert compare_kernels.steady_ms(call, milliseconds=10.0) == pytest.approx(10.0)
    assert calls[-1] >= compare_kernels.BEFORE + compare_kernels.STEADY


@pytest.mark.gpu
@on_hopper
def test_on_a_gpu_a_changed_copy_is_timed_beside_the_project(changed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = compare_kernels.Arguments(
        copies=[".", str(changed)], head_dims=[128], seq_lens=[512], causal=[False], gpt2=False, repeats=1,
        out=str(tmp_path / "kernels.json"),
    )  # fmt: skip
    compare_kernels.main(arguments)
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [(row["copy"], row["pass"]) for row in rows] == [
        (copy, direction) for copy in (".", str(changed)) for direction in ("forward", "backward")
    ]
    for row in rows:
        assert 0.5 < row["speed_alone"] < 2
        assert 0.5 < row["speed_steady"] < 2
        # dq is added up in any order
        assert row["difference"] < 0.01


@pytest.mark.gpu
@on_hopper
def test_on_a_gpu_a_block_mask_is_timed_in_place_of_a_causal_one(changed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = {"copies": [".", str(changed)], "head_dims": [128], "seq_lens": [4096], "causal": [True]}
    for pattern in ("", "window(256)"):
        arguments = compare_kernels.Arguments(
            **given, pattern=pattern, passes=["forward"], gpt2=False, repeats=1, steady=False,
            out=str(tmp_path / f"kernels{len(pattern)}.json"),
        )  # fmt: skip
        compare_kernels.main(arguments)
    causal, listed = (
        json.loads((tmp_path / f"kernels{n}.json").read_text())["rows"][0]["alone_ms"] for n in (0, 11)
    )
    assert listed < causal / 2, "a sixth of the blocks"
