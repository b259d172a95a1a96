import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import ROOT, SMALL, wait_for, write_corpus

from train.terminal import words_may_fail


class Full(io.StringIO):
    """A stream to a disk that is full after some writes."""

    def __init__(self, writes: int):
        super().__init__()
        self.writes = writes

    def write(self, text):
        if self.writes == 0:
            raise OSError("no space left on device")
        self.writes -= 1
        return super().write(text)

    def flush(self):
        if self.writes == 0:
            raise OSError("no space left on device")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_words_that_find_no_room_are_lost_and_no_error(name, monkeypatch):
    stream = Full(writes=2)
    stream.fileno = lambda: pytest.fail("it was full, but came back")
    monkeypatch.setattr(sys, name, stream)
    with words_may_fail():
        for word in ("kept", "lost", "lost too"):
            print(word, file=getattr(sys, name), flush=True)
        stream.writes = -1
        print("later", file=getattr(sys, name))
    assert getattr(sys, name) is stream
    assert stream.getvalue() == "kept\nlater\n"


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch):
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    with words_may_fail():
        print("naïve")
    assert content.getvalue() == b"na\\xefve\n"


def test_a_warning_of_the_model_is_one_line_and_those_of_packages_keep_their_place(tmp_path):
    write_corpus(tmp_path)
    # blocks of 64, of which one layer with a window reaches its own and the one before
    given = [*SMALL, "attention=reference", 'attention.patterns=["window(16)"]', "attention.block_size=64"]
    given += ["seq_len=256", "tokens_per_microbatch=256", "total_tokens=512", "name=run"]
    run = (
        "import runpy, warnings; runpy.run_module('train', run_name='__main__'); warnings.warn('of another')"
    )
    process = subprocess.run(
        [sys.executable, "-c", run, *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    # before them is what the preparation of the text tells
    told, other = process.stderr.splitlines()[-2:]
    assert told.startswith("WARNING: 70.0% of block pairs are reached in 1 layers: some tokens never hear of")
    assert other == "<string>:1: UserWarning: of another"


# each by a shell, as a user would close them
CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")


def run_without(closed: str, *command: str, folder: Path) -> int:
    """The exit code of Python with these arguments, with some standard streams closed."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=150,
    )
    return done.returncode


@pytest.mark.parametrize("closed", CLOSED)
def test_no_file_gets_the_number_of_a_stream_that_was_closed_nor_what_is_written_to_it(closed, tmp_path):
    program = (
        "import os, subprocess, sys; from train.terminal import open_closed_streams; open_closed_streams()\n"
        "file = open('file', 'w'); assert file.fileno() > 2\n"
        "assert sys.stdin.read() == ''; print('out'); print('err', file=sys.stderr, flush=True)\n"
        "os.write(1, b'out'); os.write(2, b'err'); sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', 'import os; [os.fstat(i) for i in range(3)]'], check=True)\n"
    )
    assert run_without(closed, "-c", program, folder=tmp_path) == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("closed", CLOSED[1:])
def test_a_run_trains_and_a_refused_one_tells_its_code_whichever_streams_are_closed(closed, tmp_path):
    write_corpus(tmp_path)
    given = [*SMALL, "name=run", "total_tokens=1024"]
    # which begins with the preparation of the text
    assert run_without(closed, "-m", "train", *given, folder=tmp_path) == 0
    assert (tmp_path / "runs" / "run" / "summary.json").exists()
    assert run_without(closed, "-m", "train", *given, "seed=-1", folder=tmp_path) == 2


@pytest.mark.parametrize("closed", CLOSED[1:])
def test_a_script_ends_with_its_code_whichever_streams_are_closed(closed, tmp_path):
    assert run_without(closed, "-m", "scripts.plan", "gpu=H200", folder=tmp_path) == 0
    assert run_without(closed, "-m", "scripts.plan", "gpu=H200", "colour=red", folder=tmp_path) == 2


def test_ctrl_c_saves_a_run_whose_output_goes_to_a_pipe_that_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    given = [*SMALL, "name=piped", "total_tokens=51200000", "checkpoint.every_steps=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *given, "logging.every_steps=1"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # a shell starts what it puts into the background with Ctrl-C ignored, these tests too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    lines = []
    wait_for(lambda: lines.append(process.stdout.readline()) or "step " in lines[-1], lambda: "".join(lines))
    # as `tee` does, which Ctrl-C ends too
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(150) == 75
    (saved,) = Path("runs/piped/checkpoints").iterdir()
    assert (saved / "checkpoint.json").exists()


def test_what_a_reader_that_has_gone_did_not_take_is_no_error_at_the_end():
    run = (
        "import sys; from train.terminal import words_may_fail\n"
        "input()\nwith words_may_fail():\n    print('lost')\n    sys.exit(75)"
    )
    # Python that does not buffer has nothing left to write at its end
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", run], env={**env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert (process.wait(60), process.stderr.read()) == (75, "")
