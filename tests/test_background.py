"""data/background.py: text is prepared by another process, which ends with this one, however it ends."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from data import background
from data.background import prepare_beside
from data.prepare import LOCK, DataConfig, prepare
from tests.test_prepare import alive, children, contents, large_corpus, text_config, wait_for

ROOT = Path(__file__).resolve().parent.parent
# prepares text beside work that never ends; if "deaf", Ctrl-C is ignored, and the work is short
ENDLESS = """
import json, pathlib, signal, sys, time
from data.background import prepare_beside
from data.prepare import DataConfig
# ignored in what a shell runs in the background
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[3] == "deaf" else signal.default_int_handler)
def work():
    pathlib.Path(sys.argv[2]).touch()
    if sys.argv[3] != "deaf":
        time.sleep(1000)
prepare_beside(DataConfig(**json.loads(sys.argv[1])), work)
"""


@pytest.fixture
def config(tmp_path) -> DataConfig:
    return text_config(large_corpus(tmp_path / "text", 1), tmp_path / "shards")


def refused() -> None:
    pytest.fail("work was begun")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bytes_are_those_of_prepare_and_work_is_done_before_it_returns(config, tmp_path, workers):
    done = []
    folder = prepare_beside(replace(config, workers=workers), lambda: done.append(os.getpid()))
    assert done == [os.getpid()]
    assert contents(folder) == contents(prepare(replace(config, folder=str(tmp_path / "alone"))))
    assert not others()


def others() -> list[int]:
    """This process's children that prepare text."""
    return [pid for pid in children(os.getpid()) if b"spawn_main" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_text_is_prepared_while_work_is_done(config):
    partial = Path(f"{config.folder}.partial")

    def work():
        # not before this returns, if they took turns
        wait_for(lambda: Path(config.folder).exists())
        assert not partial.exists()

    prepare_beside(config, work)


def test_work_is_not_begun_where_there_is_nothing_to_prepare(config):
    folder = prepare(config)
    before = contents(folder)
    assert prepare_beside(config, refused) == folder
    assert contents(folder) == before


@pytest.mark.parametrize("where", ["paths", "folder"])
def test_what_prepare_refuses_at_once_is_refused_before_work_is_begun(config, tmp_path, where):
    bad = replace(config, paths=[str(tmp_path / "absent")])
    if where == "folder":
        (tmp_path / "file").touch()
        bad = replace(config, folder=str(tmp_path / "file" / "shards"))
    with pytest.raises(ValueError, match=f"data.{where}") as alone:
        prepare(bad)
    with pytest.raises(ValueError, match=f"data.{where}") as beside:
        prepare_beside(bad, refused)
    assert str(beside.value) == str(alone.value)
    assert isinstance(beside.value.__cause__, OSError) == (where == "folder")


def test_an_error_that_is_found_later_is_raised_after_work(config, tmp_path):
    (tmp_path / "empty.txt").touch()
    done = []
    with pytest.raises(ValueError, match="holds no text, left out: {'empty': 1}"):
        prepare_beside(replace(config, paths=[str(tmp_path / "empty.txt")]), lambda: done.append(True))
    assert done == [True]
    assert names(tmp_path) == {"text", "empty.txt"}


def test_a_full_disk_is_told_as_the_same_kind_of_error(config, tmp_path):
    # the children of this one may write no larger files
    code = (
        "import json, resource, signal, sys\n"
        "from data.background import prepare_beside\nfrom data.prepare import DataConfig\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    prepare_beside(DataConfig(**json.loads(sys.argv[1])), lambda: None)\n"
        "except OSError as error:\n    print(type(error).__name__, error, error.__cause__)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(asdict(config))]
    output = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=150).stdout
    assert output.startswith(f"OSError data.folder={config.folder!r} was not written ("), output
    assert output.count(os.strerror(errno.EFBIG)) == 2, output
    assert names(tmp_path) == {"text"}


def test_work_that_fails_stops_the_preparation_and_nothing_is_left(tmp_path):
    config = text_config(large_corpus(tmp_path / "text", 48), tmp_path / "shards", workers=2)

    def fail():
        raise RuntimeError("as of a compiler")

    with pytest.raises(RuntimeError, match="as of a compiler"):
        prepare_beside(config, fail)
    assert names(tmp_path) == {"text"}
    assert not others()


def start_endless(config: DataConfig, sign: Path, how: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", ENDLESS, json.dumps(asdict(config)), str(sign), how]
    # a group of its own, to which a terminal would send Ctrl-C
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, process_group=0)


@pytest.mark.parametrize("ends_by", ["a terminal", "SIGINT", "SIGTERM", "SIGKILL"])
def test_preparation_ends_with_the_process_that_asked_for_it_and_nothing_is_left(tmp_path, ends_by):
    config = text_config(
        large_corpus(tmp_path / "text", 48), tmp_path / "shards", workers=2, shard_tokens=4_000_000
    )
    process = start_endless(config, tmp_path / "begun")
    wait_for(lambda: (tmp_path / "begun").exists() and (tmp_path / "shards.partial").exists())
    started = [pid for child in children(process.pid) for pid in (child, *children(child))]
    if ends_by == "a terminal":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[ends_by])
    errors = process.communicate(timeout=30)[1]
    wait_for(lambda: not any(map(alive, started)), seconds=10)
    assert names(tmp_path) == {"text", "begun"}, errors
    is_ctrl_c = ends_by in ("a terminal", "SIGINT")
    # that of this process, which a caller answers, and of no other
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == is_ctrl_c, errors


def test_ctrl_c_that_a_process_ignores_does_not_stop_its_preparation(tmp_path):
    config = text_config(large_corpus(tmp_path / "text", 48), tmp_path / "shards", workers=2)
    process = start_endless(config, tmp_path / "begun", "deaf")
    wait_for(lambda: (tmp_path / "begun").exists())
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert names(tmp_path) == {"text", "begun", "shards"}


class WordlessError(ValueError):
    """As of a library: its words do not travel, or it does not arrive at all."""

    def __init__(self, text: str, place: int):
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (WordlessError("told in words", 3), ValueError, "told in words"),
        (FileNotFoundError(2, "No such file", "a.txt"), FileNotFoundError, "[Errno 2] No such file: 'a.txt'"),
        (ChildProcessError("a worker ended"), OSError, "a worker ended"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
    ids=["words", "file", "child", "memory"],
)
def test_errors_arrive_with_their_words_and_where_they_come_from(config, monkeypatch, error, kind, text):
    def refuse(*arguments, **options):
        raise error from OSError("a cause")

    monkeypatch.setattr(background, "prepare", refuse)
    ours, theirs = multiprocessing.Pipe()
    # in a thread of this process, where no signal comes
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(background, "_stop_with", lambda pipe: None)
    background._prepare(theirs, config, logging.getLogger("data").level)
    arrived, cause = ours.recv()
    assert isinstance(arrived, kind)
    assert str(arrived) == text
    assert str(cause) == "a cause"
    assert "in refuse" in arrived.__notes__[0]


def test_a_process_that_waits_for_another_ones_text_ends_with_the_one_that_asked_for_it(config, tmp_path):
    partial = tmp_path / "shards.partial"
    partial.mkdir()
    with (partial / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start_endless(config, tmp_path / "begun")
        wait_for(lambda: [pid for pid in children(process.pid) if b"spawn_main" in command_of(pid)])
        waiting = children(process.pid)
        # time to come to the lock
        time.sleep(1.5)
        process.kill()
        process.communicate(timeout=30)
        wait_for(lambda: not any(map(alive, waiting)), seconds=10)
    assert not (tmp_path / "begun").exists()


def test_a_preparation_in_which_a_library_swallows_the_interrupt_is_ended_nevertheless():
    code = (
        "import multiprocessing, signal, threading, time\nfrom data import background\n"
        "background.SECONDS_TO_STOP = 0.2\n"
        "signal.signal(signal.SIGINT, background._interrupt)\n"
        "ours, theirs = multiprocessing.Pipe()\n"
        "threading.Thread(target=background._stop_with, args=(theirs,), daemon=True).start()\n"
        "ours.close()\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=50).returncode == 1


def test_a_killed_preparation_is_told_with_the_way_out(tmp_path):
    config = text_config(large_corpus(tmp_path / "text", 48), tmp_path / "shards", workers=1)

    def kill():
        for pid in others():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(ChildProcessError, match=r"ended with code -9; -9 most .*: lower data\.workers"):
        prepare_beside(config, kill)
    # as after a run that was killed
    assert not Path(config.folder).exists()


@pytest.mark.parametrize("call", ["prepare(config)", "prepare_beside(config, lambda: None)"])
def test_a_script_that_prepares_text_where_it_is_imported_is_run_once(config, tmp_path, call):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nprint('runs')\n"
        "from data.background import prepare_beside\nfrom data.prepare import DataConfig, prepare\n"
        f"config = DataConfig(**json.loads(sys.argv[1]))\nprint({call})\n"
    )
    command = [sys.executable, str(script), json.dumps(asdict(replace(config, workers=2)))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
    assert done.stdout == f"runs\n{config.folder}\n", done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_done_is_logged_as_by_prepare(config):
    code = (
        "import json, logging, sys\n"
        "from data.background import prepare_beside\nfrom data.prepare import DataConfig\n"
        "logging.getLogger('data').setLevel(sys.argv[2])\n"
        "prepare_beside(DataConfig(**json.loads(sys.argv[1])), lambda: None)\n"
    )
    for level, times in (("INFO", 1), ("ERROR", 0)):
        given = json.dumps(asdict(replace(config, folder=f"{config.folder}_{level}")))
        command = [sys.executable, "-c", code, given, level]
        errors = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=150).stderr
        assert errors.count("prepared ") == times, errors
