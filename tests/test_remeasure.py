"""Result files say how they came about, and scripts.remeasure does that again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import remeasure
from scripts.remeasure import comparison, repetition
from tests.test_train import ROOT, SMALL
from train import results

GENERATE = [
    "models=[tiny]", "seq_lens=[16]", "implementations=[sdpa]", "compiled=[false]", "tokens=2",
    "precision=fp32", "device=cpu",
]  # fmt: skip


def call(*words: str) -> subprocess.CompletedProcess:
    """python -m words in the working directory, on a CPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def write(path: Path, **changes) -> Path:
    result = {"command": "python -m scripts.benchmark_ring out=a/b.json", "n_gpus": 1, "rows": []}
    path.write_text(json.dumps(result | changes))
    return path


def test_a_benchmark_and_a_training_run_are_made_again_and_compared_and_the_old_files_stay(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for index in range(40):
        (tmp_path / "corpus" / f"{index:02}.txt").write_text(
            f"the number after {index} is {index + 1}\n" * 20
        )
    for made in (
        call("scripts.benchmark_generate", *GENERATE, "out=old/speed.json"),
        call("train", *SMALL, "total_tokens=1024", "device=cpu", "compile=false"),
    ):
        assert made.returncode == 0, made.stderr
    old = {path: path.read_bytes() for path in (Path("old/speed.json"), Path("runs/test/summary.json"))}

    again = call("scripts.remeasure", *map(str, old))
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in old} == old
    for path in old:
        new = json.loads((Path("remeasured") / path).read_text())
        assert len(new["rows"]) == len(json.loads(old[path])["rows"])
        assert f"{path}: " in again.stdout
    assert "token_ms" in again.stdout
    # the same run on the same machine ends alike
    loss = next(line.split() for line in again.stdout.splitlines() if "final_loss" in line)
    assert float(loss[1]) == pytest.approx(1.0, abs=1e-3)

    with pytest.raises(ValueError, match="is there already: move it away, or choose another out="):
        remeasure.main(remeasure.Arguments(files=[str(path) for path in old]))

    changed = call("scripts.remeasure", "old/speed.json", "out=changed", "tokens=3")
    assert changed.returncode == 0, changed.stderr
    command = json.loads(Path("changed/speed.json").read_text())["command"].split()
    assert [word for word in command if word.startswith("tokens=")] == ["tokens=3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"files: .*result.json cannot be read \(.*No such file.*\): correct it"),
        (b"\x89PNG", "result.json does not name a command, its GPUs and its rows: it is no result file"),
        (
            b'{"command": "python -m scripts.benchmark_attention", "n_gpus": 1}',
            "result.json does not name a command, its GPUs and its rows: it is no result file",
        ),
    ],
)
def test_what_is_no_result_file_is_named_and_refused(tmp_path, content, message):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        repetition(path, Path("new.json"))


def test_training_runs_get_names_that_can_be_given_and_none_that_another_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"one (1).json": "one__1_", "x,y.json": "x_y", "lr=1.json": "lr_1", "é.json": "_"}
    for old, name in names.items():
        result = write(Path(old), command="python -m train experiment=laptop")
        again = repetition(result, Path("remeasured", old))
        assert again.command[-1] == f"name=remeasured-{name}"
        assert again.left == Path("runs", f"remeasured-{name}", "summary.json")
    Path("rm/a").mkdir(parents=True)
    both = [write(Path(old), command="python -m train") for old in ("rm/a/b.json", "rm/a-b.json")]
    message = (
        "^rm/a/b.json and rm/a-b.json would both be made again as runs/remeasured-a-b/summary.json: name one"
    )
    with pytest.raises(ValueError, match=message):
        remeasure.main(remeasure.Arguments(files=list(map(str, both))))


def test_a_result_of_a_changed_tree_says_so_beside_its_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))

    def git(*words: str) -> str:
        given = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "results.py").write_text("before")
    git("add", ".")
    git("commit", "-m", "first")
    # a name for a commit is none of ours
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "--short", "HEAD")
    assert results.provenance(1)["commit"] == commit
    results.origin.cache_clear()
    first = results.write_result(tmp_path / "result.json", [{}])
    (tmp_path / "results.py").write_text("after")
    assert results.provenance(1)["commit"] == f"{commit}-dirty"
    # a run's own results are no change of what ran
    second = results.write_result(tmp_path / "result.json", [{}, {}])
    results.origin.cache_clear()
    assert first["commit"] == second["commit"] == commit


def test_several_gpus_are_launched_by_torchrun_and_results_go_to_out_alone(tmp_path):
    run = "python -u -m train data=pypackages 'attention.patterns=[\"window(9) | sinks(3)\"]' name=weak_2"
    result = write(tmp_path / "two.json", command=run, n_gpus=2)
    again = repetition(result, Path("remeasured/scaling/two.json"))
    assert again.command == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train",
        "data=pypackages", 'attention.patterns=["window(9) | sinks(3)"]', "name=remeasured-scaling-two",
    ]  # fmt: skip
    assert again.left == Path("runs/remeasured-scaling-two/summary.json")
    assert again.n_gpus == 2
    assert repetition(result, Path("/data/new/two.json")).left == Path("runs/data-new-two/summary.json")

    again = repetition(write(tmp_path / "ring.json"), Path("new/ring.json"))
    assert again.command == [sys.executable, "-m", "scripts.benchmark_ring", "out=new/ring.json"]
    paper = "python -m scripts.reproduce_paper table1 out=docs/results/h200/paper"
    again = repetition(write(tmp_path / "table1.json", command=paper), Path("new/paper/table1.json"))
    assert again.command[2:] == ["scripts.reproduce_paper", "table1", "out=new/paper"]


def test_other_arguments_replace_those_of_the_command(tmp_path):
    training = "python -m scripts.benchmark_training 'seq_lens=[4096]' warmup_steps=2 out=a/b.json"
    result = write(tmp_path / "b.json", command=training)
    again = repetition(result, Path("new/b.json"), ["warmup_steps=3", "repeats=9"])
    assert again.command[3:] == ["seq_lens=[4096]", "warmup_steps=3", "repeats=9", "out=new/b.json"]
    run = write(tmp_path / "run.json", command="python -m train data=text +optim.extra=1 ~model.dropout")
    again = repetition(run, Path("run.json"), ["optim.extra=2", "model.dropout=0"])
    assert again.command[3:] == ["data=text", "optim.extra=2", "model.dropout=0", "name=run"]
    with pytest.raises(ValueError, match="name= follows from out=, which names the folder"):
        repetition(run, Path("run.json"), ["name=other"])


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_run_of_a_sweep_is_left_to_the_command_that_made_them_all(flag, tmp_path):
    summary = write(tmp_path / "summary.json", command=f"python -m train {flag} seed=1,2 'name=s${{seed}}'")
    with pytest.raises(ValueError, match=f"summary.json is of one of the runs that .* {flag} seed=1,2"):
        repetition(summary, Path("new.json"))


def test_files_beside_the_new_one_may_be_replaced_only_if_that_is_asked_for_now(tmp_path):
    command = "python -m scripts.benchmark_ring overwrite=true out=a/b.json"
    result = write(tmp_path / "b.json", command=command)
    assert repetition(result, Path("new/b.json")).command[3:] == ["out=new/b.json"]
    again = repetition(result, Path("new/b.json"), ["overwrite=true"])
    assert again.command[3:] == ["overwrite=true", "out=new/b.json"]


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("python -m scripts.benchmark_ring", "new/a.json"),
        # these write no file unless they are told to
        ("python -m scripts.benchmark_training jobs=true", "new/a.json"),
        ("python -m scripts.benchmark_checkpoints", "new/a.json"),
        ("python -m scripts.plan 'compare=[b.json]'", "new/a.json"),
        ("python -m scripts.benchmark_ring out=rows", "new/a.json"),
        ("python -m scripts.evaluate_context model=m data=d", "new/a.json"),
        ("python -m scripts.compare_extensions 'stages=[evaluate]'", "new"),
        ("python -m scripts.reproduce_paper table1", "new"),
    ],
)
def test_a_script_gets_a_place_of_the_kind_that_it_writes(command, out, tmp_path):
    again = repetition(write(tmp_path / "a.json", command=command), Path("new/a.json"))
    assert again.command[-1] == f"out={out}"
    assert again.left == Path("new/a.json")


def test_the_differences_of_a_plot_and_its_picture_go_to_out_and_the_old_ones_stay(tmp_path):
    plot = "python -m scripts.plot_run 'runs=[runs/a,runs/b]' out=old/d.png title=both differences=old/d.json"
    again = repetition(write(tmp_path / "d.json", command=plot), Path("new/d.json"))
    assert again.left == Path("new/d.json")
    assert again.command[2:] == [
        "scripts.plot_run", "runs=[runs/a,runs/b]", "title=both", "out=new/d.png", "differences=new/d.json",
    ]  # fmt: skip


def test_every_committed_result_that_its_command_alone_makes_can_be_made_again():
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        others = ("soak.json", "differences.json", "comparison.json", "table2.part.json")
        if "same_curve" not in path.parts and path.name not in others:
            assert repetition(path, Path("new") / path.name).command[0] == sys.executable


def test_what_a_command_alone_would_not_make_is_refused_before_it_runs(tmp_path):
    paper = write(tmp_path / "a.part.json", command="python -m scripts.reproduce_paper a out=old")
    with pytest.raises(
        ValueError, match=r"a\.part\.json is of an experiment that did not finish: leave it out"
    ):
        repetition(paper, Path("new/a.part.json"))
    report = write(tmp_path / "b.json", command="python -m scripts.compare_extensions 'stages=[report]'")
    message = (
        r"b\.json is made of other results, by stages=\[report\]: repeat those, or add 'stages=\[evaluate"
    )
    with pytest.raises(ValueError, match=message):
        repetition(report, Path("new/b.json"))
    again = repetition(report, Path("new/b.json"), ["stages=[evaluate,report]"])
    assert again.command[3:] == ["stages=[evaluate,report]", "out=new"]
    # of a key that is given twice the last one counts
    twice = ["stages=[evaluate]", "stages=[report]"]
    with pytest.raises(ValueError, match=message):
        repetition(report, Path("new/b.json"), twice)
    again = repetition(report, Path("new/b.json"), twice[::-1])
    assert again.command[3:-1] == twice[::-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": "rm -r /"}, "comes from 'rm -r /': only train and scripts.* are repeated"),
        ({"command": "python -m http.server"}, "only train and scripts"),
        ({"command": None}, "comes from None: only train"),
        (
            {"command": "python -m scripts.sample run=a"},
            "scripts.sample, which has no out= for a new result: leave",
        ),
        ({"command": "python -m scripts.gone"}, "scripts.gone, which cannot be called (No module named"),
        ({"n_gpus": None}, "does not name a command, its GPUs and its rows: it is no result file"),
    ],
)
def test_other_commands_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        repetition(write(tmp_path / "a.json", **changes), tmp_path / "new.json")


def test_more_gpus_than_there_are_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remeasure, "places", lambda: ["0", "1"])
    path = write(tmp_path / "four.json", n_gpus=4)
    with pytest.raises(ValueError, match="four.json needs 4 GPUs, this machine has 2: leave it out"):
        remeasure.main(remeasure.Arguments(files=[str(path)]))
    assert not Path("remeasured").exists()


def test_results_that_are_named_in_several_ways_are_made_again_inside_of_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write(Path(folder, "result.json"))
    made = {}

    def run(commands, places, needed):
        made.update(commands)
        return iter(())

    monkeypatch.setattr(remeasure, "run_side_by_side", run)
    remeasure.main(remeasure.Arguments(files=["a/result.json", str(tmp_path / "b" / "result.json")]))
    assert [command[-1] for command in made.values()] == [
        "out=remeasured/a/result.json",
        "out=remeasured/b/result.json",
    ]
    made.clear()
    remeasure.main(remeasure.Arguments(files=["a/../b/result.json", "a/result.json"]))
    assert [command[-1] for command in made.values()] == [
        "out=remeasured/b/result.json",
        "out=remeasured/a/result.json",
    ]


def test_a_command_that_leaves_no_result_has_failed_and_the_others_are_compared(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    for name in ("a", "b", "c"):
        write(Path("old", f"{name}.json"), rows=[{"ms": 2.0}])

    def run(commands, places, needed):
        for name in commands:
            if name != "old/a.json":
                path = Path(commands[name][-1].removeprefix("out="))
                path.parent.mkdir(exist_ok=True)
                write(path, rows=[{"ms": 3.0}])
            yield name, int(name == "old/b.json"), 7.0

    monkeypatch.setattr(remeasure, "run_side_by_side", run)
    with pytest.raises(ValueError, match=r"^old/a.json, old/b.json failed, as printed above"):
        remeasure.main(remeasure.Arguments(files=["old/a.json", "old/b.json", "old/c.json"]))
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == ["old/a.json: failed after 7 s", "old/b.json: failed after 7 s", "old/c.json: 7 s"]
    assert told[3].split()[:2] == ["ms", "1.500"]


def test_no_files_are_refused():
    with pytest.raises(ValueError, match="files is empty: name result files"):
        remeasure.main(remeasure.Arguments())


def test_values_are_compared_row_by_row_and_other_rows_not_at_all(tmp_path):
    shared = {"n": 3, "none": None, "ok": True}
    rows = [{"name": name, "ms": ms, "bytes": 100, **shared} for name, ms in (("a", 2.0), ("b", 4.0))]
    old = write(tmp_path / "old.json", rows=rows)
    again = [{**rows[0], "ms": 3.0}, {**rows[1], "bytes": 110}]
    new = write(tmp_path / "new.json", rows=again)
    compared = [line.split() for line in comparison(old, new).splitlines()]
    assert compared == [
        ["ms", "1.250", "(1.000", "to", "1.500)"],
        ["bytes", "1.050", "(1.000", "to", "1.100)"],
    ]
    # there is no ratio to a value of 0
    was_zero = write(tmp_path / "zero.json", rows=[{**rows[0], "ms": 0.0}, rows[1]])
    compared = [line.split() for line in comparison(was_zero, new).splitlines()]
    assert ["ms", "1.000", "(1.000", "to", "1.000)"] in compared
    assert "1 rows where" in comparison(old, short := write(tmp_path / "short.json", rows=rows[:1]))
    assert "2 rows where" in comparison(short, old)


def test_rows_of_something_else_are_not_compared_and_numbers_that_are_gone_are_counted(tmp_path):
    rows = [
        {"implementation": name, "causal": True, "ms": 2.0, "bytes": 7} for name in ("ours", "cudnn", "flex")
    ]
    old = write(tmp_path / "old.json", rows=rows)
    again = [rows[0], {**rows[2], "ms": 1.0}, {**rows[2], "causal": False}]
    other = comparison(old, write(tmp_path / "new.json", rows=again)).splitlines()
    assert [line.split() for line in other[:-1]] == [["ms", "1.000", "(1.000", "to", "1.000)"]]
    assert other[-1] == "  2 rows not compared, the first: row 2 of implementation=flex, which was cudnn"

    again = [{**rows[0], "ms": None}, {**rows[1], "ms": 4.0}, {"implementation": "flex", "causal": True}]
    gone = comparison(old, write(tmp_path / "new.json", rows=again)).splitlines()
    assert gone[0].split() == ["ms", "2.000", "(2.000", "to", "2.000)"]
    assert [line.split(maxsplit=1) for line in gone[1:]] == [
        ["ms", "no number in 2 rows that had one"],
        ["bytes", "no number in 1 row that had one"],
    ]

    # what was asked for may differ
    changes = ["implementations=[sdpa]", "causal=false"]
    new = write(
        tmp_path / "new.json", rows=[{**row, "implementation": "sdpa", "causal": False} for row in rows]
    )
    assert "3 rows not compared" in comparison(old, new)
    assert comparison(old, new, changes).split() == ["ms", "1.000", "(1.000", "to", "1.000)"]
