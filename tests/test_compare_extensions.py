"""The worked example at toy size: every stage, in any number of calls."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import faults
import pytest

from scripts import compare_extensions, evaluate_context
from scripts.arguments import run_script
from tests.test_config import composed
from train.config import parse, write_config

LLAMA = ["model=llama", "model.n_kv_head=1", "model.mlp_width=64"]
REFERENCE = ["attention.implementation=reference", "model.dropout=0.0"]


@pytest.fixture
def started(tmp_path, monkeypatch) -> list[str]:
    """The runs that were trained, in this process and at toy size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    faults.write_corpus(tmp_path)
    names = []

    def train(name: str, overrides: list[str]) -> None:
        if not Path("runs", name, "summary.json").exists():
            names.append(name)
            # the same without the experiments, which are of a GPU's size
            rest = [x for x in overrides if not x.startswith("experiment=")]
            faults.run_training(faults.small_config(name, 4, *rest, *REFERENCE))

    monkeypatch.setattr(compare_extensions, "train", train)
    return names


def call(
    *stages: str, methods: tuple[str, ...] = ("before", "linear", "base", "yarn+window"), prompts: int = 1
) -> None:
    evaluation = {"sequences": 2, "scored": 16, "depths": [0.0, 1.0], "prompts": prompts}
    evaluation["attention"] = "reference"
    arguments = {"stages": list(stages), "methods": list(methods), "seq_lens": [128], "base_seq_len": 64}
    compare_extensions.main(
        compare_extensions.Arguments(**arguments, short=LLAMA, evaluation=evaluation, out="out")
    )


def test_every_method_is_trained_measured_and_compared_and_nothing_twice(started, capsys):
    call("pretrain", "extend", methods=("linear",))
    call("extend", "evaluate")
    assert started == ["example-64", "example-128-linear", "example-128-base", "example-128-yarn-window"]
    capsys.readouterr()
    call("pretrain", "extend", "evaluate", "report")
    assert len(started) == 4
    printed = capsys.readouterr().out
    assert printed.count("measured before") == 4
    rows = json.loads(Path("out/comparison.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["before", "linear", "base", "yarn+window"]
    assert len({row["tokens"] for row in rows}) == 1
    assert all(0 < row["val_loss"] < 6 and 0 <= row["passkey_accuracy"] <= 1 for row in rows)
    # the model as it was pretrained sees less of the same windows
    assert [(row["window"], row["seq_len"]) for row in rows] == [(128, 64), *[(128, 128)] * 3]
    assert printed.count("| yarn+window |") == 1
    for name in ("comparison_128.png", "needles_128.png"):
        assert Path("out", name).read_bytes()[:4] == b"\x89PNG"


def test_a_report_is_of_all_results_whichever_call_measured_them(started, capsys):
    call("pretrain", "extend", "evaluate", "report", methods=("before", "yarn+window"))
    # of other methods and nobody's
    for name in ("example-128-rope", "example-128-before-window", "example-yarn"):
        Path("out", f"{name}.json").write_text("{}")
    capsys.readouterr()
    call("extend", "evaluate", "report", methods=("linear",))
    rows = json.loads(Path("out/comparison.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["before", "linear", "yarn+window"]
    assert capsys.readouterr().out.count("| 128 |") == 3


def test_the_methods_differ_in_their_positions_and_layers_alone():
    cases = [compare_extensions.Case("base", method, 64) for method in compare_extensions.ALL[1:]]
    lines = [compare_extensions.extension(case) for case in cases]
    common = set.intersection(*map(set, lines))
    assert common == {"experiment=example_long", "seq_len=64", "start.weights=runs/base"}
    assert len({tuple(sorted(set(line) - common)) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("stages", "methods", "message"),
    [
        (("draw",), ("yarn",), "stages must be of pretrain, extend, evaluate, report, got draw"),
        (("report",), ("rope",), "methods must be before, or of none, linear, .* got 'rope'"),
        (("evaluate",), ("before",), "runs/example-64 has no checkpoint: run the stages pretrain and extend"),
    ],
)
def test_what_cannot_be_done_is_refused(started, stages, methods, message):
    with pytest.raises(ValueError, match=message):
        call(*stages, methods=methods)


@pytest.mark.parametrize("key", ["stages", "methods", "seq_lens"])
def test_an_empty_list_is_refused_before_anything_is_trained(started, key):
    with pytest.raises(ValueError, match=f"^nothing to measure: {key} must not be empty, name one"):
        compare_extensions.main(compare_extensions.Arguments(**{key: []}))
    assert started == []


@pytest.mark.parametrize("out", ["", "file", "file/below", "nowhere"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(started, out):
    Path("file").write_text("mine")
    Path("nowhere").symlink_to("missing")
    given = {"stages": ["pretrain"], "methods": ["before"], "seq_lens": [128], "base_seq_len": 64, "out": out}
    with pytest.raises(ValueError, match=f"^out(={out}| must name a folder, got '{out}').*choose another pl"):
        compare_extensions.main(compare_extensions.Arguments(**given))
    assert started == []
    assert Path("file").read_text() == "mine"


def test_windows_too_short_for_the_first_model_are_refused_before_anything_is_trained(started):
    given = {"stages": ["pretrain"], "methods": ["before"], "seq_lens": [128, 32], "base_seq_len": 64}
    with pytest.raises(ValueError, match=r"seq_lens must be at least base_seq_len=64, .* got \[128, 32\]"):
        compare_extensions.main(compare_extensions.Arguments(**given))
    assert started == []
    # its own length is long enough
    compare_extensions.check_windows(compare_extensions.Arguments(**given | {"seq_lens": [128, 64]}))


@pytest.mark.parametrize("text", ["no JSON", "{}", "[]", '{"rows": []}', '{"rows": [1]}'])
def test_a_file_that_is_no_result_is_named_before_anything_is_trained(started, text):
    Path("out").mkdir()
    Path("out/example-128-linear.json").write_text(text)
    with pytest.raises(ValueError, match="^out/example-128-linear.json is no result of .*: move it away, or"):
        call("pretrain", "extend", methods=("linear",))
    assert started == []


@pytest.mark.parametrize("method", ["none", "yarn", "linear+window"])
def test_a_length_at_which_a_method_has_no_effect_is_refused_before_anything_is_trained(started, method):
    given = {"methods": ["before", "base", method], "seq_lens": [128, 96], "base_seq_len": 96}
    message = (
        rf"^seq_lens must be above base_seq_len=96 for methods=\[{re.escape(method)}\], .* got \[128, 96\]"
    )
    with pytest.raises(ValueError, match=message):
        compare_extensions.main(compare_extensions.Arguments(**given))
    assert started == []


@pytest.mark.parametrize(
    ("base_seq_len", "evaluation", "message"),
    [
        (32, {}, "recall needs 64 tokens, .* takes 32: raise base_seq_len and seq_lens, or leave before out"),
        (64, {"lengths": [64, 128]}, r"evaluation.lengths=\[64, 128\] must be at most the 64 tokens"),
    ],
)
def test_recall_that_a_model_has_no_room_for_is_refused_before_anything_is_trained(
    started, base_seq_len, evaluation, message
):
    given = {"methods": ["before", "linear"], "seq_lens": [128], "evaluation": evaluation}
    with pytest.raises(ValueError, match=message):
        compare_extensions.main(compare_extensions.Arguments(**given, base_seq_len=base_seq_len))
    assert started == []


def test_results_of_another_first_model_are_not_taken_for_this_ones(started):
    call("pretrain", "extend", "evaluate", methods=("before", "linear"))
    given = {"methods": ["linear"], "seq_lens": [128], "base_seq_len": 96, "out": "out"}
    with pytest.raises(ValueError, match="runs/example-128-linear began from runs/example-64, not from"):
        compare_extensions.main(compare_extensions.Arguments(**given))
    with pytest.raises(ValueError, match="out/example-128-before.json is of runs/example-64, not of"):
        compare_extensions.main(compare_extensions.Arguments(**given | {"methods": ["before"]}))
    assert len(started) == 2


def test_results_of_other_weights_and_settings_are_not_taken_for_those_asked_for(started, tmp_path):
    call("pretrain", "extend", "evaluate", methods=("before", "linear"))
    result = Path("out/example-128-linear.json")
    before = json.loads(result.read_text())
    assert before["weights"].startswith("step 4, shards ")
    with pytest.raises(
        ValueError, match="was measured with evaluation.prompts=1, and this call asks for 2: move"
    ):
        call("evaluate", methods=("linear",), prompts=2)
    # which a report does not ask about
    call("report", methods=("linear",), prompts=2)
    # trained anew, as after a change of long=
    run, old = Path("runs/example-128-linear"), tmp_path / "old"
    run.rename(old)
    with pytest.raises(ValueError, match="linear.json is of a runs/example-128-linear that is not there"):
        call("extend", methods=("linear",))
    result.rename("kept.json")
    call("extend", methods=("linear",))
    Path("kept.json").rename(result)
    # bit for bit the same weights are the same
    call("extend", "evaluate", "report", methods=("linear",))
    result.write_text(json.dumps(before | {"weights": "step 4, shards 12345678"}))
    for stage in ("evaluate", "report"):
        with pytest.raises(ValueError, match="linear.json is of other weights than runs/.*-linear has: move"):
            call(stage, methods=("linear",))
    # older results say neither
    result.write_text(json.dumps({key: before[key] for key in before if key not in ("weights", "settings")}))
    for stage in ("evaluate", "report"):
        call(stage, methods=("linear",), prompts=2)


def test_an_extension_does_not_outlive_the_model_that_it_began_from(started, tmp_path):
    call("pretrain", "extend", methods=("linear",))
    Path("runs/example-64").rename(tmp_path / "old")
    with pytest.raises(ValueError, match="-linear began from a runs/example-64 that is not there: move"):
        call("pretrain", "extend", methods=("linear",))
    assert started == ["example-64", "example-128-linear"]


def test_a_finished_run_of_other_settings_is_not_taken_for_the_one_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/example-2048")
    folder.mkdir(parents=True)
    given = ["experiment=example_short", "seq_len=2048", "attention=strided", "optim.learning_rate=1e-4"]
    write_config(parse(composed(*given)), folder, 0)
    (folder / "summary.json").write_text("{}")
    compare_extensions.train(folder.name, given)
    assert "example-2048: finished before" in capsys.readouterr().out
    for other in ("total_tokens=1000", "optim.learning_rate=2e-4", "attention=window"):
        key = other.split("=")[0]
        with pytest.raises(
            ValueError, match=f"config.yaml has {key}=.*, and this call asks for .*: move runs/"
        ):
            compare_extensions.train(folder.name, [*given, other])
    # a run of fewer tokens is not the one of as many as the experiment has
    write_config(parse(composed(*given, "total_tokens=1048576")), folder, 0)
    with pytest.raises(ValueError, match="config.yaml has total_tokens=1048576, and this call asks for"):
        compare_extensions.train(folder.name, given)


def test_a_report_without_the_runs_says_what_it_lacks(started):
    call("pretrain", "extend", "evaluate", methods=("linear",))
    Path("runs").rename("elsewhere")
    with pytest.raises(ValueError, match="runs/example-128-linear/metrics.jsonl is not there: the report"):
        call("report", methods=("linear",))


def test_recall_that_was_not_measured_at_the_models_own_length_is_left_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "example-128-yarn"
    folder.mkdir(parents=True)
    line = {"step": 1, "tokens": 100, "tokens_per_second_per_gpu": 5.0, "val_loss": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    measured = [
        {"kind": "context", "seq_len": 128, "context": 0, "loss": 3.0},
        {"kind": "effective_context", "seq_len": 128, "context": 0},
        {"kind": "passkey", "seq_len": 128, "length": 64, "accuracy": 1.0, "loss": 0.1},
        {"kind": "key_value", "seq_len": 128, "length": 128, "accuracy": 0.5, "loss": 2.0},
        {"kind": "key_value", "seq_len": 128, "length": 128, "accuracy": 1.0, "loss": 1.0},
    ]
    row = compare_extensions.summary(compare_extensions.Case("example-64", "yarn", 128), measured)
    assert (row["passkey_accuracy"], row["passkey_loss"]) == (None, None)
    assert (row["key_value_accuracy"], row["key_value_loss"]) == (0.75, 1.5)
    assert "| - | - | 1.500 |" in compare_extensions.table([row])


def test_a_loss_that_was_not_finite_is_left_open_and_out_of_the_means(started, capsys):
    call("pretrain", "extend", "evaluate", methods=("linear",))
    name = "example-128-linear"
    # as they are written: null, beside an accuracy of 0
    metrics = Path("runs", name, "metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**line, "val_loss": None}) + "\n" for line in lines))
    result = json.loads(Path("out", f"{name}.json").read_text())
    recall = [row for row in result["rows"] if row["kind"] == "passkey"]
    for row in result["rows"]:
        if "loss" in row and row is not recall[0]:
            row["loss"] = None
        elif row["kind"] == "effective_context":
            row["context"] = None
    Path("out", f"{name}.json").write_text(json.dumps(result))
    capsys.readouterr()
    call("report", methods=("linear",))
    (row,) = json.loads(Path("out/comparison.json").read_text())["rows"]
    assert row["passkey_loss"] == recall[0]["loss"]
    for key in ("val_loss_at_start", "val_loss", "loss_with_whole_context", "effective_context"):
        assert row[key] is None
    assert row["key_value_loss"] is None
    assert "| linear | 128 | 128 | - | - | - | - | 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (
            {"prompt": 5},
            "evaluation={'prompt': 5} is not of scripts.evaluate_context: prompt is no argument: did you "
            "mean prompts. python -m scripts.evaluate_context --help lists them$",
        ),
        # train has one of these names, and none like the other
        ({"optim": 1}, "optim is no argument: python -m scripts.evaluate_context --help lists them$"),
        ({"foo": 1}, "foo is no argument: python -m scripts.evaluate_context --help lists them$"),
        ({"prompts": "many"}, "is not of scripts.evaluate_context: prompts: Value 'many' .* Integer"),
        ({"prompts": 0}, "prompts must be at least 1, got 0"),
        ({"model": "mine"}, "evaluation.model differs from run to run, got mine: leave it out"),
        ({"window": 64}, "evaluation.window differs from run to run, got 64: leave it out"),
    ],
)
def test_an_evaluation_is_checked_before_anything_is_trained(started, evaluation, message):
    given = {"stages": ["pretrain", "evaluate"], "methods": ["before"], "evaluation": evaluation}
    with pytest.raises(ValueError, match=message):
        compare_extensions.main(compare_extensions.Arguments(**given))
    assert started == []


def test_on_several_gpus_each_takes_a_method(started, monkeypatch):
    call("pretrain")
    commands = {}

    def run_side_by_side(given, places):
        commands.update(given)
        for name, command in given.items():
            if name.endswith("-base"):
                continue
            assert command[1:3] == ["-m", "scripts.compare_extensions"]
            monkeypatch.setattr(sys, "argv", command[2:])
            # a process of its own sees one GPU
            monkeypatch.setattr(compare_extensions, "places", lambda: ["1"])
            run_script(compare_extensions.main, compare_extensions.Arguments, "")
        return [(name, name.endswith("-base"), 1.0) for name in given]

    monkeypatch.setattr(compare_extensions, "places", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(compare_extensions, "run_side_by_side", run_side_by_side)
    with pytest.raises(ValueError, match="example-128-base failed, see above"):
        call("pretrain", "extend", "evaluate", "report", methods=("before", "linear", "base"))
    assert list(commands) == ["example-128-linear", "example-128-base", "example-128-before"]
    # what failed is not in the report
    rows = json.loads(Path("out/comparison.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["before", "linear"]


def test_a_precision_that_is_asked_for_is_not_taken_for_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, case = tmp_path / "result.json", compare_extensions.Case("example-64", "linear", 128)

    def given(**evaluation) -> compare_extensions.Arguments:
        return compare_extensions.Arguments(stages=["evaluate"], evaluation=evaluation)

    settings = asdict(compare_extensions.evaluation(given(precision="fp16")))
    path.write_text(json.dumps({"rows": [{"model": f"runs/{case.run}"}], "settings": settings}))
    # unless it is given, the precision follows from the machine
    for usual in (given(), given(precision="fp16")):
        compare_extensions.check_measured(case, path, usual)
    with pytest.raises(ValueError, match="with evaluation.precision=fp16, and this call asks for fp32: move"):
        compare_extensions.check_measured(case, path, given(precision="fp32"))


def test_lines_are_by_length_and_begin_with_the_model_as_pretrained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(compare_extensions, "report", lambda cases, out: told.extend(cases))
    methods = {"stages": ["report"], "methods": ["yarn", "before", "linear"]}
    compare_extensions.main(compare_extensions.Arguments(**methods, seq_lens=[256, 128], base_seq_len=64))
    assert [(case.seq_len, case.method) for case in told] == [
        (length, method) for length in (128, 256) for method in ("before", "yarn", "linear")
    ]


def test_the_pictures_of_a_length_are_of_its_own_results(tmp_path, monkeypatch):
    drawn = {}
    for name in ("draw_comparison", "draw_needles"):
        monkeypatch.setattr(
            compare_extensions, name, lambda chosen, path, name=name: drawn.update({path.name: chosen})
        )
    monkeypatch.setattr(compare_extensions, "summary", lambda case, found: {"method": case.method})
    monkeypatch.setattr(compare_extensions, "table", str)
    cases = [compare_extensions.Case("example-64", "yarn", length) for length in (128, 256)]
    cases.append(compare_extensions.Case("example-64", "linear", 128))
    for case in cases:
        (tmp_path / f"{case.name}.json").write_text(json.dumps({"rows": [case.name]}))
    compare_extensions.report(cases, tmp_path)
    short, long = {"yarn": ["example-128-yarn"], "linear": ["example-128-linear"]}, ["example-256-yarn"]
    assert drawn["comparison_128.png"] == drawn["needles_128.png"] == short
    assert drawn["comparison_256.png"] == drawn["needles_256.png"] == {"yarn": long}


def test_a_run_is_evaluated_on_its_own_text_unless_another_is_given(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(compare_extensions, "run_config", lambda name: {"data": {"folder": "own"}})
    monkeypatch.setattr(evaluate_context, "main", lambda arguments: read.append(arguments.data))
    for evaluation in ({}, {"data": "another"}):
        arguments = compare_extensions.Arguments(evaluation=evaluation)
        case = compare_extensions.Case("example-64", "linear", 128)
        compare_extensions.evaluate(case, tmp_path / "new.json", arguments)
    assert read == ["own", "another"]


def test_recall_is_no_longer_than_the_shortest_extension():
    given = {"methods": ["linear"], "seq_lens": [256, 128], "base_seq_len": 64}
    for length in (128, 256):
        arguments = compare_extensions.Arguments(**given, evaluation={"lengths": [length]})
        if length == 128:
            compare_extensions.check_recall(arguments)
            continue
        with pytest.raises(ValueError, match=r"evaluation.lengths=\[256\] must be at most the 128 tokens"):
            compare_extensions.check_recall(arguments)


def test_a_line_has_the_losses_of_the_least_and_of_the_whole_context(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "example-128-yarn"
    folder.mkdir(parents=True)
    lines = [{"step": n, "tokens": n, "tokens_per_second_per_gpu": 5.0, "val_loss": 3.0 - n} for n in (0, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = {64: 2.0, 0: 4.0, 128: 1.5}
    measured = [{"kind": "context", "seq_len": 128, "context": n, "loss": x} for n, x in losses.items()]
    measured += [{"kind": "effective_context", "seq_len": 128, "context": 64}]
    row = compare_extensions.summary(compare_extensions.Case("example-64", "yarn", 128), measured)
    assert (row["loss_with_least_context"], row["loss_with_whole_context"]) == (4.0, 1.5)
    assert (row["val_loss_at_start"], row["val_loss"]) == (3.0, 2.0)
