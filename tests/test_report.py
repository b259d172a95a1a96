import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.tokenizer import load_tokenizer
from model.flops import flops_ledger
from tests.conftest import pytest_collection_modifyitems
from tests.report import read_cases, table
from tests.test_config import composed
from train import report
from train.config import parse
from train.distributed import Processes
from train.export import EXPORT
from train.logger import WANDB_ID
from train.profiler import NEEDED, TRACE
from train.throughput import PEAK_FLOPS, RunClock

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_holds_a_promise[1-2]"/>
<testcase classname="tests.test_a" name="test_holds_a_promise[3-4]">
<failure message="no">before
the error itself</failure>
</testcase>
<testcase classname="tests.test_b" name="test_other"><skipped message="one GPU"/></testcase>
<testcase classname="tests.test_b" name="test_setup"><error message="the worker crashed"/></testcase>
</testsuite></testsuites>"""


def test_every_case_is_counted_under_its_promise_by_its_result(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    lines = table(read_cases(tmp_path / "junit.xml"), {"gpu": "some"}).splitlines()
    assert "gpu some" in lines
    sums = lines.index("1 passed, 2 failed, 1 skipped")
    # what failed says why
    assert lines[sums + 2 : sums + 14] == [
        "```", "test_a::test_holds_a_promise[3-4]", "", "before", "the error itself", "```", "",
        "```", "test_b::test_setup", "", "the worker crashed", "```",
    ]  # fmt: skip
    assert lines[-3:] == [
        "| test_a | holds a promise | 1 | 1 |  |",
        "| test_b | other |  |  | 1 |",
        "| test_b | setup |  | 1 |  |",
    ]


RUN = """
import signal
import sys
from pathlib import Path
# these tests may run under nohup
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from tests.report import main
sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
"""


def reported(folder: Path, second: str, *, stop: signal.Signals | None = None) -> tuple[int, str]:
    """The exit code and the sums of a report of two tests, the first of which passes."""
    begun, table = folder / "begun", folder / "new" / "tests.md"
    (folder / "test_some.py").write_text(
        "import time\nfrom pathlib import Path\nimport pytest\n"
        "@pytest.mark.gpu\ndef test_first(): pass\n"
        f"@pytest.mark.gpu\ndef test_second():\n    Path({str(begun)!r}).touch()\n    {second}\n"
    )
    (folder / "run.py").write_text(RUN)
    tests, environment = [str(folder), "-q"], os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, folder / "run.py", str(table), *tests]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as report:
        deadline = time.monotonic() + 60
        while stop and not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if stop:
            report.send_signal(stop)
        output, _ = report.communicate(timeout=150)
    assert table.exists(), output
    return report.returncode, table.read_text().splitlines()[4]


def test_a_report_of_failures_ends_with_their_exit_code(tmp_path):
    assert reported(tmp_path, "assert False") == (1, "1 passed, 1 failed, 0 skipped")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_report_that_is_stopped_tells_what_has_run(stop, tmp_path):
    code, sums = reported(tmp_path, "time.sleep(60)", stop=stop)
    assert code == pytest.ExitCode.INTERRUPTED
    assert sums == "1 passed, 0 failed, 0 skipped, stopped before the end"


@pytest.mark.parametrize(
    ("sees_gpu", "run"), [(False, ["takes_any", "plain"]), (True, ["takes_any", "gpus"])]
)
def test_a_process_runs_the_gpus_tests_or_the_others_and_those_of_any_device(sees_gpu, run, monkeypatch):
    def item(name: str, marks: set, *fixtures: str) -> SimpleNamespace:
        def add_marker(mark):
            marks.add(mark if isinstance(mark, str) else mark.name)

        path = Path(f"{name}.py")
        return SimpleNamespace(path=path, fixturenames=fixtures, keywords=marks, add_marker=add_marker)

    items = [item("takes_any", set(), "seed", "device"), item("gpus", {"gpu"}, "seed"), item("plain", set())]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    pytest_collection_modifyitems(items)
    assert [item.path.stem for item in items if "skip" not in item.keywords] == run
    # what tests.report selects
    assert ("gpu" in items[0].keywords) == sees_gpu


@pytest.mark.parametrize(("logged", "lost"), [(1, None), (10, "2 to 10"), (None, "2 to 10")])
def test_only_lines_that_were_written_are_missed_whatever_the_interval_is_now(logged, lost, tmp_path, capsys):
    # an older checkpoint does not tell which line was the last
    info = {"step": 17, "config": {"logging": {"every_steps": 10}}, "resume": "auto"}
    info |= {} if logged is None else {"logged": logged}
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n{"step": 1, "tokens": 512}\n')
    report.tell_lost_metrics(tmp_path, info)
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path / 'metrics.jsonl'} lacks steps {lost}: ") if lost else told == ""


FLOPS = {"palm": 8e8, "causal": 6e8, "mask": 5e8, "kept": 7e8, "executed": 9e8}
PEAK = PEAK_FLOPS["H200"]["bf16"]


@pytest.mark.parametrize("pattern", ["dense", "window(16)"])
def test_the_operations_of_a_run_are_those_of_its_documents_its_recomputation_and_its_adapters(pattern):
    config = parse(composed(f"attention.patterns=['{pattern}']", "seq_len=64", "recompute=full"))
    config.separate_documents, config.lora.rank, config.lora.embeddings_and_norms = True, 4, True
    # one document a row, but for the last of those that are counted
    n_counted = report.COUNTED_SEQUENCES if config.attention.sparse else report.COUNTED_SEQUENCES + 8
    tokens = torch.zeros(report.COUNTED_SEQUENCES + 8, 64, dtype=torch.int64)
    tokens[n_counted - 1, 10::20] = load_tokenizer(config.data.tokenizer).end_of_text
    flops = report.run_flops(config, SimpleNamespace(batch=lambda step: (tokens, tokens)))
    documents = torch.zeros(n_counted, 64, dtype=torch.int32)
    documents[-1] = torch.tensor([0] * 10 + [1] * 20 + [2] * 20 + [3] * 14)
    options = {"recompute": "full", "lora_rank": 4, "lora_head": True, "document_ids": documents}
    assert flops == flops_ledger(config.model, config.attention, 64, **options)


@pytest.fixture
def four_gpus(monkeypatch) -> Processes:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(report, "peak_memory_bytes", lambda device: (3, 4))
    return Processes(0, 4, torch.device("cuda"), None, None)


def test_speed_is_that_of_all_gpus_and_utilization_that_of_each(four_gpus):
    seconds = {"step_seconds": 0.25, "data_seconds": 0.05}
    timer = SimpleNamespace(seconds=lambda: seconds)
    config = parse(composed("tokens_per_step=131072"))
    step = {"loss": 3.0, "val_loss": None, "learning_rate": 1e-3, "grad_norm": torch.tensor(0.5)}
    metrics = report.step_metrics(config, four_gpus, timer, FLOPS, done=10, skipped_steps=2, **step)
    assert metrics["tokens"] == 10 * 131072
    assert metrics["tokens_per_second"] == 4 * 131072
    assert metrics["tokens_per_second_per_gpu"] == 131072
    # of the pairs that patterns and documents keep
    assert metrics["mfu"] == pytest.approx(131072 * 7e8 / PEAK)
    assert seconds.items() <= metrics.items()


# with four windows the mean of the two in the middle
@pytest.mark.parametrize(("first_step", "per_second"), [(0, 1150.0), (20, 1300.0)])
def test_a_summary_is_of_its_launch_without_the_first_line_which_compiles(
    four_gpus, tmp_path, monkeypatch, first_step, per_second
):
    def line(step: int, speed: float, memory: int) -> dict:
        metrics = {"step": step, "tokens": step, "train_loss": 3.0, "tokens_per_second": speed}
        metrics |= {"tokens_per_second_per_gpu": speed / 4}
        metrics |= {"step_seconds": 1 / speed, "data_seconds": 0.1 / speed}
        return metrics | {"peak_memory_allocated_bytes": memory}

    speeds = {1: 10.0, 10: 1100.0, 20: 900.0, 30: 1200.0, 40: 1300.0}
    lines = [{"step": 0, "tokens": 0, "val_loss": 9.0}]
    lines += [line(step, speed, step) for step, speed in speeds.items()]
    monkeypatch.chdir(tmp_path)
    config = parse(composed("total_tokens=1310720", "tokens_per_step=32768", "sample.tokens=0"))
    saved = config.folder / "checkpoints" / "step_00000040"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").touch()
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    clock = RunClock(torch.device("cpu"), 0.0)
    report.finish_run(config, None, 2.0, clock, four_gpus, FLOPS, first_step=first_step)
    [row] = json.loads((config.folder / "summary.json").read_text())["rows"]
    assert row["tokens_per_second"] == per_second
    assert row["step_ms"] == pytest.approx(1000 / per_second, rel=0.01)
    assert row["data_ms"] == pytest.approx(100 / per_second, rel=0.01)
    for name, count in FLOPS.items():
        assert row[f"mfu_{name}"] == pytest.approx(per_second / 4 * count / PEAK)
    assert (row["peak_memory_bytes"], row["final_loss"]) == (40, 2.0)
    assert (row["n_gpus"], row["tokens"]) == (4, 1310720)


def test_what_is_set_aside_is_all_that_an_attempt_left(tmp_path):
    left = ["config.yaml", "config_from_step_2.yaml", "metrics.jsonl", "left_out.json", WANDB_ID, "loss.png"]
    for name in left:
        (tmp_path / name).touch()
    # locked by the run that starts over
    (tmp_path / "lock").touch()
    report.set_aside(tmp_path)
    assert sorted(path.name for path in (tmp_path / "attempt_1").iterdir()) == sorted(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt_1", "lock"]


@pytest.fixture
def finished(four_gpus, tmp_path, monkeypatch):
    """Ends a run of 40 steps that began at a step of it, with these settings; its exports."""
    monkeypatch.chdir(tmp_path)
    exports = []
    monkeypatch.setattr(report, "export_run", lambda *given: exports.append(given))

    def finish(first_step: int, **settings):
        config = parse(composed("total_tokens=1310720", "tokens_per_step=32768", "sample.tokens=0"))
        for key, value in settings.items():
            setattr(config, key, value)
        config.folder.mkdir(parents=True, exist_ok=True)
        line = {"step": 40, "tokens": 40, "train_loss": 3.0, "tokens_per_second": 4.0}
        line |= {"tokens_per_second_per_gpu": 1.0}
        line |= {"step_seconds": 1.0, "data_seconds": 0.1, "peak_memory_allocated_bytes": 1}
        (config.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        checkpoint = config.folder / "checkpoints" / "step_00000040"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "checkpoint.json").touch()
        clock = RunClock(torch.device("cpu"), 0.0)
        report.finish_run(config, None, 2.0, clock, four_gpus, FLOPS, first_step=first_step)
        return config.folder

    return SimpleNamespace(finish=finish, exports=exports)


def test_files_of_an_earlier_launch_are_not_told_as_this_ones(finished, capsys):
    folder = finished.finish(0)
    (folder / TRACE).touch()
    (folder / EXPORT).mkdir()
    capsys.readouterr()
    for first_step, profile, is_told in ((0, True, True), (0, False, False), (41 - NEEDED, True, False)):
        finished.finish(first_step, profile=profile)
        printed = capsys.readouterr().out
        assert (TRACE in printed) == is_told
        assert EXPORT not in printed
    finished.finish(0, export=True)
    assert f"to share     {folder / EXPORT}\n" in capsys.readouterr().out


def test_an_export_knows_the_weights_that_its_run_began_from(finished):
    config = parse(composed())
    config.start.weights = "published"
    folder = finished.finish(0, export=True, start=config.start)
    assert [given[1:] for given in finished.exports] == [(config.data.tokenizer, folder, "published")]


def test_a_run_that_was_finished_before_tells_no_speed(finished, capsys):
    finished.finish(0)
    assert "\nMFU " in capsys.readouterr().out
    finished.finish(40)
    assert "MFU " not in capsys.readouterr().out
