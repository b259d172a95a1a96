import json

import pytest

from train.logger import RunLogger, WandbConfig, duration, read_metrics, readable

SETTINGS = WandbConfig(mode="disabled", project="tests")


def line(step: int) -> dict:
    return {"step": step, "train_loss": 1.0 / step, "val_loss": None}


def write(folder, steps, start_step=0, settings=SETTINGS):
    logger = RunLogger(folder, "test", 10, start_step, {"seed": 1}, settings)
    for step in steps:
        logger.log(line(step))
    logger.close()
    return folder / "metrics.jsonl"


def test_each_logged_step_is_one_line_of_json(tmp_path):
    path = write(tmp_path, [1, 2])
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1), line(2)]


def test_a_line_can_be_read_as_soon_as_it_is_logged(tmp_path):
    logger = RunLogger(tmp_path, "test", 10, 0, {}, SETTINGS)
    logger.log(line(1))
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1)]
    logger.close()


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
    with pytest.raises(ValueError, match="metrics.jsonl, line 1 is not JSON: 'broken'"):
        read_metrics(path)


def test_wandb_writes_an_offline_run_beside_the_metrics(tmp_path):
    write(tmp_path, [1, 2], settings=WandbConfig(mode="offline", project="tests"))
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert runs[0].stat().st_size > 0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (987, "987"), (12345, "12.3K"), (4.56e6, "4.56M"), (1.2e12, "1200G")]
)
def test_large_numbers_are_readable(value, text):
    assert readable(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
