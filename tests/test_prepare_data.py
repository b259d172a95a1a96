"""scripts/prepare_data.py and conf/data/: every shipped corpus composes, mistakes are told in one line."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from scripts.prepare_data import CONF, parse

ROOT = Path(__file__).resolve().parent.parent
CORPORA = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.prepare_data", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_shipped_corpus_composes_with_a_folder_of_its_own(corpus):
    paths = ["data.paths=[a]"] if corpus == "text" else []
    config = parse([f"data={corpus}", "data.tokenizer=bytes", *paths])
    assert config.folder == f"datasets/{corpus}-bytes"


def test_the_corpora_are_the_five_that_are_promised():
    assert CORPORA == ["fineweb_edu", "openwebtext", "pypackages", "pystdlib", "text"]


def test_text_is_prepared_from_the_command_line(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    folder = tmp_path / "shards"
    arguments = ("data=text", f"data.paths=[{tmp_path}]", f"data.folder={folder}", "data.tokenizer=bytes")
    done = run(*arguments, "data.workers=1")
    assert done.returncode == 0, done.stderr
    assert f"{folder} train: 143 tokens, 19 documents" in done.stdout
    assert "prepared" in done.stderr


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.0), (3, 0.0), (3, 0.3), (3, 0.6)])
def test_ctrl_c_ends_with_one_line_and_leaves_nothing(workers, seconds, tmp_path):
    given = [f"data.folder={tmp_path / 'shards'}", f"data.workers={workers}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.prepare_data", *given], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # a shell starts what it puts into the background with Ctrl-C ignored, these tests too
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )  # fmt: skip
    first = process.stdout.readline()
    # workers are still being imported
    time.sleep(seconds)
    # as a terminal sends it, to all of them
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=150)[0]
    assert process.returncode == 130, first + rest
    assert rest.splitlines()[-1] == "stopped by Ctrl-C; the same command starts over"
    assert "Traceback" not in rest
    assert not any(tmp_path.iterdir())


@pytest.fixture
def of_two_texts(tmp_path) -> list[str]:
    """Arguments that prepare them in a folder whose name has a letter that ASCII lacks."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    folder = f'data.folder="{tmp_path}/sh\xe4rds"'
    return ["data=text", f"data.paths=[{tmp_path}]", folder, "data.tokenizer=bytes", "data.workers=1"]


def test_an_output_that_takes_no_more_ends_it_without_a_traceback(of_two_texts):
    for given in (["--help"], of_two_texts):
        command = [sys.executable, "-m", "scripts.prepare_data", *given]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"
        assert "Traceback" not in done.stderr
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes, "w") as unread:
            done = subprocess.run(command, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_folder_that_the_terminal_has_no_letters_for_is_printed_with_escapes(of_two_texts):
    command = [sys.executable, "-m", "scripts.prepare_data", *of_two_texts]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("/sh\\xe4rds train: ")) == (0, 1), done.stderr


def test_help_prints_every_key():
    done = run("--help")
    assert done.returncode == 0
    for key in (
        "source",
        "paths",
        "text_field",
        "folder",
        "tokenizer",
        "validation_fraction",
        "workers",
        "seed",
    ):
        assert f"\n{key}: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=text"], "error: data.paths must name files or folders, as in 'data.paths=[my_folder]'"),
        (
            # not the folder in which a text of the user's may lie
            ["data=text", "data.paths=[/nowhere]", "data.folder=/nowhere/prepared"],
            "error: data.paths names '/nowhere', which does not exist",
        ),
        (["data.seed=x"], "error: data.seed: Value 'x' of type 'str' could not be converted to Integer"),
        (["data.sede=1"], "error: data.sede is no key; did you mean data.seed"),
        (["data=nope"], "error: data=nope is no choice: there are fineweb_edu, openwebtext"),
        (
            ["data.tokenizer=gpt9"],
            "error: data.tokenizer must be one of ('gpt2', 'bytes') or a folder with tokenizer.json, got",
        ),
        (
            ["data.folder=2024_01"],
            "error: data.folder=2024_01 would be read as 202401: put quotes that the shell leaves around",
        ),
        (["seed=1"], "error: 'seed=1' is no argument of this script: use data=NAME and data.KEY=VALUE"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
