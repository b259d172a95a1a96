"""Makefile: what make hands to python -m train and to pytest, shown by a Python that prints its arguments."""

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
        write_program(tmp_path / "bin" / name, ASKS_FOR_A_GPU.format(1) + 'printf "%s\\n" "$@"\n')
    for stamp in (".runtime", "triton-3.6.0", ".development"):
        (tmp_path / stamp).touch()
    return tmp_path


# exits with 0 if there is one
ASKS_FOR_A_GPU = '#!/bin/sh\n[ "$1" = -c ] && exit {}\n'
# prints the GPUs that pytest sees and the tests that it runs
SHOWS_PYTEST = """case "$*" in *" -m gpu") tests=gpu;; *) tests=all;; esac
echo "gpus=${{CUDA_VISIBLE_DEVICES-all}} tests=$tests"
[ $tests = all ] || exit {}
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make(target: str, venv: Path, *words: str) -> subprocess.CompletedProcess:
    command = ["make", "--silent", target, f"VENV={venv}", *words]
    # without the variables of a make test around it
    names = ("MAKEFLAGS", "MAKEOVERRIDES", "CUDA_VISIBLE_DEVICES")
    outside = {key: value for key, value in os.environ.items() if key not in names}
    return subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)


def trained_with(venv: Path, *words: str) -> list[str]:
    """The arguments behind `-m train`, one a line."""
    done = make("train", venv, *words)
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
    done = make("train", venv, f"NGPU={processes}")
    assert done.returncode == 2
    assert done.stdout == ""
    expected = f"error: NGPU must be a number of processes, 1 or more, got '{processes}': write NGPU=2\n"
    assert done.stderr.startswith(expected)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_tests_that_need_no_gpu_see_none_and_the_others_run_behind_them_where_there_is_one(venv, has_gpu):
    write_program(venv / "bin" / "python", ASKS_FOR_A_GPU.format(int(not has_gpu)) + SHOWS_PYTEST.format(0))
    done = make("test", venv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["gpus= tests=all", "gpus=all tests=gpu"][: 1 + has_gpu]


@pytest.mark.parametrize(("code", "succeeds"), [(1, False), (2, False), (5, True)])
def test_a_gpus_tests_fail_the_command_unless_there_were_none_of_them(venv, code, succeeds):
    write_program(venv / "bin" / "python", ASKS_FOR_A_GPU.format(0) + SHOWS_PYTEST.format(code))
    assert (make("test", venv).returncode == 0) == succeeds
