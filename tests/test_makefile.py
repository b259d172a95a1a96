"""Makefile: what make train hands to python -m train, shown by a Python that prints its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def venv(tmp_path) -> Path:
    """An environment newer than its requirements, on a machine without a GPU."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "torchrun"):
        # -c asks whether there is a GPU
        text = '#!/bin/sh\n[ "$1" = -c ] && exit 1\nprintf "%s\\n" "$@"\n'
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".runtime").touch()
    return tmp_path


def make_train(venv: Path, *words: str) -> subprocess.CompletedProcess:
    command = ["make", "--silent", "train", f"VENV={venv}", *words]
    # without the variables of a make test around it
    outside = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    return subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)


def trained_with(venv: Path, *words: str) -> list[str]:
    """The arguments behind `-m train`, one a line."""
    done = make_train(venv, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("-m\ntrain\n")[1].splitlines()


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", []),
        ("seq_len=512 seed=1", ["seq_len=512", "seed=1"]),
        ("data=text 'data.paths=[kernels, model]'", ["data=text", "data.paths=[kernels, model]"]),
        ("data.paths=[kernels]", ["data.paths=[kernels]"]),
        ("sample.prompt='import torch'", ["sample.prompt=import torch"]),
        ("'sample.prompt=\"def f(x):\"' seed=1", ['sample.prompt="def f(x):"', "seed=1"]),
        ("'name=seed$${seed}'", ["name=seed${seed}"]),
        # a flag, behind which argparse wants all overrides in one piece
        ("--multirun seed=1,2", ["--multirun", "seed=1,2"]),
    ],
)
def test_quoted_words_of_args_reach_training_as_a_shell_would_give_them(venv, processes, given, words):
    assert trained_with(venv, f"NGPU={processes}", f"ARGS={given}") == [*words, "experiment=laptop"]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("'sample.prompt=see experiment=1'", ["experiment=laptop"]), ("+experiment=laptop", [])],
)
def test_only_a_word_of_its_own_chooses_an_experiment(venv, given, chosen):
    assert trained_with(venv, f"ARGS={given}") == [given.strip("'"), *chosen]


def test_an_experiment_in_args_takes_the_place_of_the_laptops(venv):
    words = "seed=1 experiment=same_curve 'name=a b'"
    assert trained_with(venv, f"ARGS={words}") == ["seed=1", "experiment=same_curve", "name=a b"]


@pytest.mark.parametrize("processes", ["two", "0", "-1", "1.5", "2 3", ""])
def test_what_is_no_number_of_processes_is_refused_by_name_and_trains_nothing(venv, processes):
    done = make_train(venv, f"NGPU={processes}")
    assert done.returncode == 2
    assert done.stdout == ""
    expected = f"error: NGPU must be a number of processes, 1 or more, got '{processes}': write NGPU=2\n"
    assert done.stderr.startswith(expected)
