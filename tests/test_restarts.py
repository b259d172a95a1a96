"""What torchrun starts again after a run has ended, by real launches of torchrun with --max-restarts."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from faults import ROOT, SMALL, two_hosts, wait_for, write_corpus

from train import restarts
from train.restarts import comes_again, tell, was_refused

ENDS_AT_ONCE = "not started again: it would end the same way, with code 2"
TWO = ("--standalone", "--nproc-per-node=2")
launched: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    yield
    while launched:
        # passed on to the workers; nothing where it has ended
        launched.pop().terminate()


def launch(
    *overrides: str, restarts: int = 1, options: tuple[str, ...] = TWO, fault: str = ""
) -> subprocess.Popen:
    """A launch of torchrun. fault: Python that its workers run before anything else."""
    paths = [str(ROOT)]
    if fault:
        # Python imports a module of this name as it starts
        customized = Path("customized")
        customized.mkdir()
        condition = "import os\nif 'RANK' in os.environ:\n"
        (customized / "sitecustomize.py").write_text(condition + textwrap.indent(fault, "    "))
        paths.insert(0, str(customized.resolve()))
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, f"--max-restarts={restarts}"]
    process = subprocess.Popen(
        [*launcher, "-m", "train", *SMALL, "name=run", "total_tokens=10240", *overrides],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    launched.append(process)
    return process


def output_of(process: subprocess.Popen) -> str:
    """What a launch that fails has printed. torchrun ends with 1, and names the code of its workers."""
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output
    return output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lr=3", "lr is no key; did you mean optim.learning_rate?"),
        ("seq_len=0", "seq_len must be"),
        # found by rank 0, when all have joined
        ("data.paths=[missing]", "data.paths names 'missing', which does not exist"),
    ],
)
def test_what_is_refused_is_told_once_however_late_rank_0_is_and_started_again_it_ends_at_once(given, words):
    slow_first = 'if os.environ["RANK"] == "0":\n    import time\n    time.sleep(2)\n'
    output = output_of(launch(given, fault=slow_first))
    assert output.count("error: ") == output.count(f"error: {words}") == 1, output
    assert output.count(ENDS_AT_ONCE) == 1, output
    assert output.index(words) < output.index(ENDS_AT_ONCE)
    assert "exitcode  : 2 " in output
    assert sorted(os.listdir()) == ["corpus", "customized"], "nothing is left behind"


def test_a_run_whose_numbers_are_not_finite_does_not_train_again_up_to_the_same_step():
    output = output_of(launch("optim.learning_rate=1e30", restarts=2))
    assert "error: the loss is " in output
    assert output.count("validation loss") == 1, output
    assert output.count(ENDS_AT_ONCE) == 2, output


def test_a_run_that_one_rank_has_no_memory_for_is_not_started_again():
    fault = """
        import torch, model.gpt
        def forward(*given, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if os.environ["RANK"] == "1":
            model.gpt.GPT.forward = forward
    """
    output = output_of(launch(fault=textwrap.dedent(fault)))
    assert output.count("error: out of memory on rank 1: ") == 1, output
    assert output.count(ENDS_AT_ONCE) == 1, output


def test_what_goes_wrong_behind_the_last_step_is_told_once_by_all_processes():
    process = launch("total_tokens=2048")
    process.communicate(timeout=150)
    assert process.returncode == 0
    # as if the disk were full while the loss curve is drawn
    Path("runs/run/loss.png").unlink()
    Path("runs/run/loss.png").mkdir()
    output = output_of(launch("total_tokens=4096", restarts=0))
    assert output.count("error: ") == output.count("error: [Errno 21] Is a directory") == 1, output
    assert "Connection closed" not in output
    # what the run is for was written before
    assert json.loads(Path("runs/run/summary.json").read_text())["rows"][0]["tokens"] == 4096


def listens(address: tuple[str, int]) -> bool:
    with socket.socket() as client:
        return client.connect_ex(address) == 0


def disk_away() -> None:
    Path("runs").write_text("no folder")


def lock_held() -> None:
    Path("runs/run").mkdir(parents=True)
    # until this process, of the tests, ends
    fcntl.lockf(os.open("runs/run/lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


@pytest.mark.parametrize(("fault", "words"), [(disk_away, "[Errno "), (lock_held, "runs/run is in use by")])
def test_a_run_that_was_ended_by_what_may_pass_is_started_again(fault, words):
    fault()
    output = output_of(launch())
    assert output.count("error: ") == output.count(f"error: {words}") == 2, output
    assert ENDS_AT_ONCE not in output


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_host_without_the_error_ends_at_once_too_where_another_one_was_refused(restarts):
    store, options = two_hosts()
    # the first torchrun keeps the store
    well = launch("seed=1", restarts=restarts, options=options)
    wait_for(lambda: listens(store), lambda: f"no torchrun listens on {store}")
    # its process begins later, and the other one waits for it
    slowly = "import time\ntime.sleep(2)\n"
    refused = launch("seq_len=0", restarts=restarts, options=options, fault=slowly)
    of_refused, of_well = output_of(refused), output_of(well)
    assert of_refused.count("error: ") == of_refused.count("error: seq_len") == 1, of_refused
    told = of_well.count("error: another process of this run was refused: make the change")
    assert of_well.count("error: ") == told, of_well
    assert told or restarts, of_well
    # torchrun of the other host may have closed the rendezvous before this one's joins it again
    assert "exitcode  : 2 " in of_well or (restarts and "RendezvousClosedError" in of_well), of_well


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("head_dim must be"), True),
        (FloatingPointError("the loss is nan"), True),
        (MemoryError("out of memory"), True),
        (OSError("no space left on device"), False),
        (ConnectionError("the network is away"), False),
        (raised(ValueError("data.dataset cannot be opened"), ConnectionError()), False),
        (raised(ValueError("start.weights"), raised(ValueError("not readable"), OSError())), False),
        (raised(ValueError("start.weights"), ValueError("no model")), True),
        (RuntimeError("connection closed by peer"), False),
    ],
    ids=repr,
)
def test_an_error_of_the_configuration_or_of_its_numbers_comes_again_and_one_of_the_system_may_not(
    error, expected
):
    assert comes_again(error) is expected


@pytest.fixture
def store(monkeypatch):
    """torchrun's store, and what torchrun tells two processes of it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    return store


def test_a_process_ends_by_a_refusal_that_was_told_and_comes_again_and_by_no_other(store):
    tell("error: the disk is full", is_ours=True, again=False)
    assert not was_refused()
    tell("error: no key", is_ours=True, again=True)
    assert was_refused()


def test_an_error_of_a_host_is_told_by_its_first_process_or_where_that_is_late_by_another(
    store, monkeypatch, capsys
):
    monkeypatch.setattr(restarts, "PATIENCE", timedelta(seconds=0.1))
    tell("error: by the second", is_ours=False, again=True)
    assert capsys.readouterr().err == "error: by the second\n"
    assert was_refused()
    tell("error: by the third", is_ours=False, again=True)
    assert not capsys.readouterr().err
    monkeypatch.setenv("GROUP_RANK", "1")
    tell("error: by another host", is_ours=False, again=True)
    assert capsys.readouterr().err == "error: by another host\n"


def test_an_elastic_launch_goes_on_with_another_number_of_processes(store, monkeypatch):
    tell("error: no key", is_ours=True, again=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not was_refused()


def test_where_torchrun_keeps_nothing_the_first_process_tells_and_no_note_is_made(store, monkeypatch, capsys):
    before = store.num_keys()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    tell("error: no key", is_ours=False, again=True)
    assert not capsys.readouterr().err
    tell("error: no key", is_ours=True, again=True)
    assert capsys.readouterr().err == "error: no key\n"
    assert not was_refused()
    assert store.num_keys() == before


def test_a_store_that_is_gone_is_told_in_one_line_and_keeps_no_error_from_being_told(
    store, monkeypatch, capsys
):
    monkeypatch.setattr(restarts, "CONNECT_TIMEOUT", timedelta(seconds=0.1))
    # where nobody listens
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConnectionError, match=r"^torchrun's store is gone \(.+\): see why .* goes on$"):
        was_refused()
    tell("error: no key", is_ours=True, again=True)
    assert capsys.readouterr().err == "error: no key\n"
