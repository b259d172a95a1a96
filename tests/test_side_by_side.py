"""Commands on several GPUs at a time; here the GPUs are names, and commands say which they saw."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from scripts import side_by_side
from scripts.side_by_side import places, run_side_by_side
from tests.test_train import ROOT

# writes when it began and ended, and its GPU, to a file of its name
SLEEP = """
import os, sys, time
began = time.time()
time.sleep(float(sys.argv[2]))
open(sys.argv[1], "w").write(f"{began} {time.time()} {os.environ['CUDA_VISIBLE_DEVICES']}")
"""


SLEEP_ALONE = "import sys, time; time.sleep(float(sys.argv[1]))"

# runs the command that follows, as a script does; the first word is the patience in seconds
RUN = """
import signal, sys, types
# a background job ignores Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)
# its import takes seconds, and nothing here needs it
sys.modules["torch"] = types.ModuleType("torch")
from scripts import side_by_side
side_by_side.SECONDS_TO_END = float(sys.argv[1])
list(side_by_side.run_side_by_side({"a": sys.argv[2:]}, [None]))
"""

# tells its process in a file, and in another one that it has saved its rows, which takes a while
SAVE = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    Path("begun").write_text(str(os.getpid()))
    time.sleep(60)
finally:
    time.sleep(0.5)
    Path("saved").touch()
"""


def begin(folder: Path, *command: str) -> tuple[subprocess.Popen, int]:
    """Starts a command in a session of its own, as in a terminal, and waits for the last one's process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    given_up = time.monotonic() + 60
    while not (folder / "begun").exists() or not (folder / "begun").read_text():
        assert process.poll() is None
        assert time.monotonic() < given_up
        time.sleep(0.02)
    return process, int((folder / "begun").read_text())


def runs(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_gpu_runs_one_command_at_a_time_and_all_of_them_run(tmp_path):
    seconds = {"a": 0.5, "b": 0.1, "c": 0.1, "d": 0.1, "e": 0.1}
    commands = {
        name: [sys.executable, "-c", SLEEP, str(tmp_path / name), str(time)] for name, time in seconds.items()
    }
    ended = list(run_side_by_side(commands, ["3", "GPU-1"]))
    assert {name for name, _, _ in ended} == set(commands)
    assert all(code == 0 and took >= seconds[name] for name, code, took in ended)
    runs = [(tmp_path / name).read_text().split() for name in commands]
    assert {gpu for *_, gpu in runs} == {"3", "GPU-1"}
    for gpu in ("3", "GPU-1"):
        times = sorted((float(began), float(end)) for began, end, its in runs if its == gpu)
        assert all(end <= began for (_, end), (began, _) in pairwise(times))


def test_a_command_sees_its_own_place_alone_where_the_caller_was_given_several(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    commands = {name: [sys.executable, "-c", SLEEP, str(tmp_path / name), "0"] for name in ("a", "b")}
    list(run_side_by_side(commands, ["4", "7"]))
    assert [(tmp_path / name).read_text().split()[-1] for name in commands] == ["4", "7"]


def test_sigterm_ends_the_caller_as_before_once_the_commands_have_ended():
    before = signal.getsignal(signal.SIGTERM)
    commands = {"a": [sys.executable, "-c", "pass"]}
    list(run_side_by_side(commands, [None]))
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_seconds_of_a_command_count_from_before_its_start(monkeypatch):
    launch = subprocess.Popen

    def slowly(*arguments, **options):
        process = launch(*arguments, **options)
        # as a busy machine may keep this process from going on
        process.wait()
        time.sleep(0.3)
        return process

    monkeypatch.setattr(subprocess, "Popen", slowly)
    [(name, code, seconds)] = run_side_by_side({"a": [sys.executable, "-S", "-c", ""]}, [None])
    assert (name, code) == ("a", 0)
    assert seconds >= 0.3


def test_a_command_that_needs_several_gpus_waits_for_them_and_is_not_overtaken(tmp_path):
    commands = {
        name: [sys.executable, "-c", SLEEP, str(tmp_path / name), seconds]
        for name, seconds in {"a": "0.3", "both": "0.2", "c": "0.1"}.items()
    }
    ended = [name for name, *_ in run_side_by_side(commands, ["0", "1"], {"both": 2})]
    assert ended == ["a", "both", "c"]
    runs = {name: (tmp_path / name).read_text().split() for name in commands}
    assert sorted(runs["both"][2].split(",")) == ["0", "1"]
    assert float(runs["a"][1]) <= float(runs["both"][0])
    assert float(runs["both"][1]) <= float(runs["c"][0])
    with pytest.raises(ValueError, match="both needs 3 GPUs, this machine has 2: leave it out"):
        next(run_side_by_side(commands, ["0", "1"], {"both": 3}))


def test_a_command_that_dies_is_told_and_the_others_run():
    commands = {
        "killed": [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        "wrong": [sys.executable, "-c", "raise SystemExit(3)"],
        "right": [sys.executable, "-c", ""],
    }
    codes = {name: code for name, code, _ in run_side_by_side(commands, [None])}
    assert codes == {"killed": -9, "wrong": 3, "right": 0}


def test_a_caller_that_gives_up_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "SECONDS_TO_END", 0.3)
    commands = {
        "quick": [sys.executable, "-c", ""],
        "slow": [sys.executable, "-c", SLEEP, str(tmp_path / "slow"), "60"],
    }
    ended = run_side_by_side(commands, ["0", "1"])
    assert next(ended)[0] == "quick"
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    ended.close()
    assert len(before - set(children.read_text().split())) == 1


def test_commands_save_what_they_have_when_ctrl_c_reaches_them_too(tmp_path):
    run = [sys.executable, "-c", RUN, "60"]
    process, leaf = begin(tmp_path, *run, sys.executable, "-c", SAVE)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == -signal.SIGINT
    assert (tmp_path / "saved").exists()
    assert not runs(leaf)


@pytest.mark.parametrize(
    ("patience", "numbers", "code"),
    [
        ("1", [signal.SIGINT], -signal.SIGINT),
        ("60", [signal.SIGTERM], 128 + signal.SIGTERM),
        # a second one ends the patience
        ("60", [signal.SIGINT, signal.SIGINT], -signal.SIGINT),
    ],
)
def test_a_script_that_is_stopped_alone_ends_its_commands_which_save_what_they_have(
    patience, numbers, code, tmp_path
):
    # of two scripts only the first is stopped, and the second one's command ends too
    first, second = [sys.executable, "-c", RUN, patience], [sys.executable, "-c", RUN, "60"]
    process, leaf = begin(tmp_path, *first, *second, sys.executable, "-c", SAVE)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3)
    assert process.wait(30) == code
    assert (tmp_path / "saved").exists()
    assert not runs(leaf)


def test_a_command_that_does_not_listen_is_killed(tmp_path):
    run = [sys.executable, "-c", RUN, "0.1"]
    deaf = SAVE.replace("default_int_handler", "SIG_IGN")
    process, leaf = begin(tmp_path, *run, sys.executable, "-c", deaf)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not runs(leaf)
    assert not (tmp_path / "saved").exists()


def test_places_are_the_gpus_that_a_process_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert places() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,2")
    assert places() == ["5", "GPU-7", "2"]
    assert places(2) == ["5", "GPU-7"]
    # CUDA sees none behind a name that it does not know
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,2,-1")
    assert places() == ["5", "GPU-7", "2"]
    with pytest.raises(ValueError, match="processes must be at most 3, .* got 4"):
        places(4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (places(), places(2)) == ([None], [None, None])
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        places(0)


def test_the_seconds_of_a_command_are_without_what_the_caller_does_meanwhile():
    commands = {
        name: [sys.executable, "-c", SLEEP_ALONE, seconds] for name, seconds in (("a", "0"), ("b", "1"))
    }
    told = run_side_by_side(commands, [None, None])
    name, _, first = next(told)
    time.sleep(6)
    _, _, second = next(told)
    assert name == "a"
    assert second < first + 5
