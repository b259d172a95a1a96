import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from train.logger import RunLogger, WandbConfig, counted, duration, read_metrics, readable

SETTINGS = WandbConfig(mode="disabled", project="tests")
OFFLINE = WandbConfig(mode="offline", project="tests")


def line(step: int) -> dict:
    return {"step": step, "tokens": 512 * step, "train_loss": 1.0 / step, "val_loss": None}


def write(folder, steps, start_step=0, settings=SETTINGS):
    with RunLogger(folder, "test", 10, start_step, {"seed": 1}, settings) as logger:
        for step in steps:
            logger.log(line(step))
    return folder / "metrics.jsonl"


def test_each_logged_step_is_one_line_of_json(tmp_path):
    path = write(tmp_path, [1, 2])
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1), line(2)]


def test_numbers_that_are_not_finite_are_null_in_the_file_before_and_after_a_resumption(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log({"step": 1, "tokens": 512, "train_loss": math.nan, "grad_norm": math.inf})
    assert path.read_text() == '{"step": 1, "tokens": 512, "train_loss": null, "grad_norm": null}\n'
    # as older files have it
    path.write_text('{"step": 1, "tokens": 512, "train_loss": NaN, "grad_norm": Infinity}\n')
    assert read_metrics(path) == [{"step": 1, "tokens": 512, "train_loss": None, "grad_norm": None}]
    write(tmp_path, [], start_step=1)
    assert path.read_text() == '{"step": 1, "tokens": 512, "train_loss": null, "grad_norm": null}\n'


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path):
    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log(line(1))
        assert read_metrics(tmp_path / "metrics.jsonl") == [line(1)]


def test_a_resumed_run_appends_and_drops_the_steps_it_will_do_again(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    path = write(tmp_path, [3, 4, 5], start_step=2)
    assert [m["step"] for m in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_half_a_line_at_the_end_is_passed_over(tmp_path):
    path = write(tmp_path, [1, 2])
    path.write_text(path.read_text() + '{"step": 3, "tr')
    assert [m["step"] for m in read_metrics(path)] == [1, 2]
    assert [m["step"] for m in read_metrics(write(tmp_path, [3], start_step=2))] == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = write(tmp_path, [1, 2])
    path.write_text("broken\n" + path.read_text())
    with pytest.raises(ValueError, match="metrics.jsonl, line 1 is not JSON: 'broken'; take the line out"):
        read_metrics(path)


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    path = write(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes() + b"\xff\x00\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 3 is not JSON: .*; take the line out"):
        read_metrics(path)


@pytest.mark.parametrize(
    "broken",
    [
        "null", "[1]", '{"tokens": 5}', '{"step": "2", "tokens": 5}', '{"step": 2}',
        '{"step": 2, "tokens": null}',
        '{"step": 2, "tokens": 5, "train_loss": "x"}', '{"step": 2, "tokens": 5, "val_loss": []}',
    ],
)  # fmt: skip
def test_a_line_that_is_of_no_step_is_named(tmp_path, broken):
    path = write(tmp_path, [1, 2])
    path.write_text(f"{path.read_text()}{broken}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 3 must be an object .* got .*: take the line"):
        write(tmp_path, [3], start_step=2)


def test_wandb_writes_an_offline_run_beside_the_metrics(tmp_path):
    write(tmp_path, [1, 2], settings=OFFLINE)
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert runs[0].stat().st_size > 0


def test_a_run_without_wandb_leaves_nothing_of_it_and_does_not_need_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    write(tmp_path, [1, 2])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert not capsys.readouterr().err


def test_a_run_that_starts_anew_leaves_no_line_of_an_attempt_without_a_checkpoint(tmp_path):
    write(tmp_path, [1, 2])
    assert [m["step"] for m in read_metrics(write(tmp_path, [1], start_step=0))] == [1]


@contextmanager
def room_for_half_a_line(path: Path) -> Iterator[None]:
    """No file may grow beyond what this one has and 20 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_delays_lines_and_halves_none(tmp_path, capsys):
    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        path = tmp_path / "metrics.jsonl"
        logger.log(line(1))
        with room_for_half_a_line(path):
            logger.log(line(2))
            logger.log(line(3))
            assert read_metrics(path) == [line(1)]
            assert path.read_text().endswith("\n")
        logger.log(line(4))
    assert [m["step"] for m in read_metrics(path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written") == 1


def test_a_file_system_that_is_away_delays_lines_and_halves_none(tmp_path, capsys):
    class Away:
        """Takes half of a line, and nothing more."""

        def __init__(self, file):
            self.file, self.name = file, file.name

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            raise OSError("Input/output error")

        def truncate(self, size):
            raise OSError("Input/output error")

    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log(line(1))
        logger._file = Away(logger._file)
        logger.log(line(2))
        logger._file = logger._file.file
        logger.log(line(3))
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1), line(2), line(3)]
    assert "metrics.jsonl cannot be written (Input/output error)" in capsys.readouterr().err


def test_lines_that_found_no_room_are_written_at_the_end_if_there_is_room_then(tmp_path, capsys):
    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log(line(1))
        with room_for_half_a_line(tmp_path / "metrics.jsonl"):
            logger.log(line(2))
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1), line(2)]
    assert "lacks" not in capsys.readouterr().err


def test_what_is_synced_is_brought_to_the_disk(tmp_path, monkeypatch):
    synced = []
    with RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log(line(1))
        monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
        logger.sync()
    assert synced == [str(tmp_path / "metrics.jsonl")]


def test_lines_that_a_disk_full_to_the_end_has_no_room_for_are_counted(tmp_path, capsys):
    with ExitStack() as full, RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS) as logger:
        logger.log(line(1))
        full.enter_context(room_for_half_a_line(tmp_path / "metrics.jsonl"))
        logger.log(line(2))
        logger.log(line(3))
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1)]
    assert "metrics.jsonl lacks its last 2 lines, which did not fit on the disk" in capsys.readouterr().err


class Broken:
    """A wandb that fails where it is told to."""

    def __init__(self, where: str):
        self.where = where
        self.calls = []

    def Settings(self, **given):  # noqa: N802, wandb's name
        return given

    def _call(self, name):
        self.calls.append(name)
        if name == self.where:
            raise OSError(f"wandb {name}")

    def init(self, **given):
        self.given = given
        self._call("init")
        return self

    def log(self, metrics, step):
        self.logged = metrics, step
        self._call("log")

    def finish(self):
        self._call("finish")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_wandb_may_fail_anywhere_and_the_metrics_are_whole(tmp_path, monkeypatch, capsys, where):
    wandb = Broken(where)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert [m["step"] for m in read_metrics(write(tmp_path, [1, 2, 3], settings=OFFLINE))] == [1, 2, 3]
    assert f"WARNING: wandb failed (OSError: wandb {where}): going on" in capsys.readouterr().err
    assert wandb.calls.count("log") <= (1 if where == "log" else 3), "it is not asked again"


def test_wandb_gets_the_numbers_that_there_are_at_their_step(tmp_path, monkeypatch):
    wandb = Broken("nowhere")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, [7], settings=OFFLINE)
    assert wandb.logged == ({"step": 7, "tokens": 3584, "train_loss": 1.0 / 7}, 7), (
        "no evaluation, no val_loss"
    )


def test_wandb_may_be_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert [m["step"] for m in read_metrics(write(tmp_path, [1, 2], settings=OFFLINE))] == [1, 2]
    assert "WARNING: wandb failed (ModuleNotFoundError" in capsys.readouterr().err


def log_while_wandb_is_killed(folder: Path) -> None:
    with RunLogger(folder, "test", 10, 0, {}, OFFLINE) as logger:
        logger.log(line(1))
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        services = [pid for pid in children if b"wandb" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert services
        for pid in services:
            os.kill(int(pid), signal.SIGKILL)
        for step in (2, 3):
            logger.log(line(step))


def test_a_wandb_process_that_is_killed_does_not_stop_the_run(tmp_path, monkeypatch):
    # in a process of its own: wandb watches imports, and would fail in those of the tests that follow
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    process = multiprocessing.get_context("spawn").Process(target=log_while_wandb_is_killed, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_resumed_run_is_the_same_run_in_wandb(tmp_path, monkeypatch):
    ids = []
    for start_step in (0, 2):
        wandb = Broken("nowhere")
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        write(tmp_path, [start_step + 1], start_step, OFFLINE)
        ids.append(wandb.given["id"])
        assert wandb.given["resume"] == "allow"
    assert ids[0] == ids[1]
    # a disk that was full took its name, and not what it holds
    (tmp_path / "wandb_id").write_text("")
    write(tmp_path, [3], 2, OFFLINE)
    assert len(wandb.given["id"]) == 8
    assert (tmp_path / "wandb_id").read_text().splitlines() == [wandb.given["id"], tmp_path.name]


def test_a_copied_run_folder_is_another_run_in_wandb_and_a_renamed_one_the_same(tmp_path, monkeypatch):
    wandb = Broken("nowhere")
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def wandb_id(name: str, start_step: int = 1) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name, [start_step + 1], start_step, OFFLINE)
        return wandb.given["id"]

    first = wandb_id("first", 0)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    copied = wandb_id("copy")
    assert copied != first
    assert wandb_id("copy") == copied, "it has an id of its own now"
    assert wandb_id("first") == first
    (tmp_path / "first").rename(tmp_path / "renamed")
    assert wandb_id("renamed") == first
    shutil.copytree(tmp_path / "renamed", tmp_path / "another")
    assert wandb_id("another") not in (first, copied)
    # of a time when the name was not kept
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "wandb_id").write_text("12345678")
    assert wandb_id("old") == "12345678"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (987, "987"),
        (12345, "12.3K"),
        (4.56e6, "4.56M"),
        (1.2e12, "1200G"),
        (999_600, "1M"),
        (999.4, "999"),
    ],
)
def test_large_numbers_are_readable(value, text):
    assert readable(value) == text


def test_one_thing_is_not_counted_in_the_plural():
    counts = [(1, "process"), (2, "process"), (4, "micro-batch"), (0, "step"), (1000, "token")]
    assert [counted(*count) for count in counts] == [
        "1 process", "2 processes", "4 micro-batches", "0 steps", "1,000 tokens",
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
