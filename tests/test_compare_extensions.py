"""The worked example at toy size: every stage, in any number of calls."""

import json
import sys
from pathlib import Path

import faults
import pytest

from scripts import compare_extensions

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


def call(*stages: str, methods: tuple[str, ...] = ("linear", "base", "yarn+window")) -> None:
    evaluation = {"sequences": 2, "scored": 16, "depths": [0.0, 1.0], "prompts": 1, "attention": "reference"}
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
    assert printed.count("| yarn+window |") == 1
    for name in ("comparison.png", "needles.png"):
        assert Path("out", name).read_bytes()[:4] == b"\x89PNG"


def test_the_methods_differ_in_their_positions_and_layers_alone():
    lines = [compare_extensions.extension("base", method, 64) for method in compare_extensions.ALL]
    common = set.intersection(*map(set, lines))
    assert common == {"experiment=example_long", "seq_len=64", "start.weights=runs/base"}
    assert len({tuple(sorted(set(line) - common)) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("stages", "methods", "message"),
    [
        (("draw",), ("yarn",), "stages must be of pretrain, extend, evaluate, report, got draw"),
        (("report",), ("rope",), "methods must be of none, linear, .* got 'rope'"),
        (("evaluate",), ("yarn",), "runs/example-64 has no checkpoint: run the stages pretrain and extend"),
    ],
)
def test_what_cannot_be_done_is_refused(started, stages, methods, message):
    with pytest.raises(ValueError, match=message):
        call(*stages, methods=methods)
