"""What processes on several hosts must have in common: train/agreement.py, train/run_lock.py."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.test_config import composed
from tests.together import run_together
from train import agreement, run_lock
from train.agreement import refuse_other_code, refuse_other_settings
from train.config import parse
from train.distributed import Processes
from train.run_lock import lock_run

WORDS = ["experiment=laptop", "model.vocab_size=257", "data.tokenizer=bytes"]
SPARSE = ["attention=window", "attention.implementation=reference"]


def processes_of(rank: int) -> Processes:
    return Processes(rank, dist.get_world_size(), torch.device("cpu"), dist.HashStore(), None)


def settings(*words: str):
    return parse(composed(*WORDS, *words))


def check_settings(rank: int, words: list[list[str]], message: str | None) -> None:
    if message is None:
        refuse_other_settings(settings(*words[rank]), processes_of(rank))
        return
    with pytest.raises(ValueError, match=message):
        refuse_other_settings(settings(*words[rank]), processes_of(rank))


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([["seed=3"], ["seed=3"], ["seed=3"]], None),
        # a host may have its text elsewhere, and rank 0 alone reports
        ([["wandb.mode=disabled"], ["data.folder=/elsewhere"], ["data.workers=1"]], None),
        (
            [[], [], ["optim.learning_rate=0.5"]],
            "^optim.learning_rate is 0.004 on rank 0 and 0.5 on rank 2: start every process with the same",
        ),
        ([[], ["seed=7"], []], "^seed is 1 on rank 0 and 7 on rank 1"),
        (
            [[], ["model.n_layer=2"], []],
            "^model.n_layer is . on rank 0 and 2 on rank 1, and 1 more differ: start every process with",
        ),
        ([SPARSE, [], []], "^attention.* on rank 0 and .* on rank 1"),
        ([[], [], ["name=another"]], "^name is pystdlib-.* on rank 0 and another on rank 2"),
    ],
)
def test_processes_with_other_settings_are_refused_by_all_with_the_key_and_both_values(
    of_ranks, message, tmp_path
):
    run_together(check_settings, 3, tmp_path / "meeting", of_ranks, message)


TREE = {"train/loop.py": "step()", "model/gpt.py": "GPT()", "kernels/portable/forward.py": "dot()"}


def check_code(rank: int, trees: list[Path], versions: list[str], message: str | None) -> None:
    agreement.ROOT, torch.__version__ = trees[rank], versions[rank]
    if message is None:
        refuse_other_code(processes_of(rank))
        return
    with pytest.raises(ValueError, match=message):
        refuse_other_code(processes_of(rank))


@pytest.mark.parametrize(
    ("changes", "torch_of_last", "message"),
    [
        # neither the tests nor a host's own notes run
        ({"tests/test_loop.py": "", "train/notes.txt": "fast"}, "2.13.0", None),
        # nor what an editor leaves
        ({"train/.ipynb_checkpoints/loop.py": "old()", "model/.gpt.py": "draft()"}, "2.13.0", None),
        ({}, "2.11.0", "^torch is 2.13.0 on rank 0 and 2.11.0 on rank 2: install the same versions on every"),
        (
            {"kernels/portable/forward.py": "dot(fast)"},
            "2.13.0",
            r"^the digest of kernels/portable/forward.py is \w{8} on rank 0 and \w{8} on rank 2: give every "
            "host the same commit, with the same changes to it",
        ),
        (
            {"train/new.py": "", "train/loop.py": "steps()"},
            "2.13.0",
            r"^the digest of train/loop.py is \w{8} on rank 0 and \w{8} on rank 2, and 1 more differ",
        ),
        ({"data/new.py": ""}, "2.13.0", "^the digest of data/new.py is None on rank 0 and .* on rank 2"),
    ],
)
def test_processes_with_other_code_are_refused_by_all_with_the_library_or_file(
    changes, torch_of_last, message, tmp_path
):
    trees = [tmp_path / "all", tmp_path / "all", tmp_path / "last"]
    for tree, files in (("all", TREE), ("last", TREE | changes)):
        for name, text in files.items():
            path = tmp_path / tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    versions = ["2.13.0", "2.13.0", torch_of_last]
    run_together(check_code, 3, tmp_path / "meeting", trees, versions, message)


def test_a_link_to_nowhere_by_which_an_editor_locks_a_file_stops_no_run(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / ".#loop.py").symlink_to("someone@host.1234")
    (tmp_path / "train" / "gone.py").symlink_to("elsewhere.py")
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    refuse_other_code(Processes(0, 1, torch.device("cpu"), dist.HashStore(), None))


def lock_in(rank: int, folders: list[Path], message: str | None) -> None:
    run_lock.PATIENCE = 1.0
    os.chdir(folders[rank])
    if message is None:
        with lock_run(Path("runs/a"), processes_of(rank)):
            assert Path("runs/a/lock").read_text().startswith("process ") or rank == 0
            dist.barrier()
        return
    with pytest.raises(ValueError, match=message), lock_run(Path("runs/a"), processes_of(rank)):
        pass


def test_hosts_that_share_the_run_folder_lock_it_together(tmp_path):
    run_together(lock_in, 3, tmp_path / "meeting", [tmp_path] * 3, None)


@pytest.mark.parametrize("has_own", [False, True])
def test_a_host_with_a_run_folder_of_its_own_is_refused_before_training(has_own, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    (own / "runs" / "a").mkdir(parents=True)
    if has_own:
        (own / "runs" / "a" / "lock").write_text("process 1 on own\n")
    message = "^runs/a is not the same folder on all hosts: .* start them in a folder that the hosts share"
    run_together(lock_in, 2, tmp_path / "meeting", [shared, own], message)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_run_folder_that_may_not_be_written_is_told_with_where_to_start_the_command(
    code, tmp_path, monkeypatch
):
    def refuse(path, *arguments, **options):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    message = f"^runs/a cannot be written .*{os.strerror(code)}.*: start the command in .* PYTHONPATH"
    alone = Processes(0, 1, torch.device("cpu"), dist.HashStore(), None)
    with pytest.raises(OSError, match=message), lock_run(Path("runs/a"), alone):
        pass


def test_a_full_disk_under_the_run_folder_keeps_its_own_error(tmp_path, monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    alone = Processes(0, 1, torch.device("cpu"), dist.HashStore(), None)
    with pytest.raises(OSError, match="No space left") as caught, lock_run(Path("runs/a"), alone):
        pass
    assert caught.value.errno == errno.ENOSPC


def lock_late(rank: int, folders: list[Path]) -> None:
    os.chdir(folders[rank])
    if rank == 1:
        # as where a directory of NFS is remembered without what rank 0 has just made
        read_text, until = Path.read_text, time.monotonic() + 1.0

        def late(path: Path, **options) -> str:
            if time.monotonic() < until:
                raise FileNotFoundError(path)
            return read_text(path, **options)

        Path.read_text = late
    with lock_run(Path("runs/a"), processes_of(rank)):
        assert rank == 0 or time.monotonic() >= until


def test_a_host_that_sees_the_folder_a_moment_later_waits_for_it(tmp_path):
    run_together(lock_late, 2, tmp_path / "meeting", [tmp_path] * 2)


def ask_the_first(rank: int) -> None:
    processes = Processes(rank, 2, torch.device("cpu"), dist.HashStore(), None)

    def fails():
        raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises(ValueError if rank else OSError, match="the disk is gone") as told:
        processes.from_main(fails)
    # by which a launch tells what may pass from what would come again
    assert isinstance(told.value if rank == 0 else told.value.__cause__, OSError)


def test_what_the_system_does_to_the_first_process_is_told_to_all_as_such(tmp_path):
    run_together(ask_the_first, 2, tmp_path / "meeting")


def test_a_lock_names_its_holder_alone(tmp_path):
    # of an earlier process, whose name is as long or longer
    (tmp_path / "lock").write_text("process 1 on another host\n")
    with run_lock._locked(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{run_lock._own_name()}\n"
