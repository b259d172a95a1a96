import errno
import json
import math
import os
import threading
import zlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

import train.saving
from train.checkpoint import CheckpointConfig, list_checkpoints, load_tensors, run_tensors, verify_checkpoint
from train.distributed import Processes
from train.saving import (
    CheckpointSaver,
    _own_share,
    remove_unfinished,
    superfluous_checkpoints,
    take_checkpoint,
)

PROCESSES = Processes(0, 1, torch.device("cpu"), dist.HashStore(), None)


def settings(**changes) -> CheckpointConfig:
    return CheckpointConfig(
        **{"every_steps": 1, "keep_last": 2, "keep_every_steps": 0, "keep_best": False, "resume": "auto"}
        | changes
    )


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder, step, *, model=None, val_loss=None, config=None, **changes):
    model, optimizer = model or trained()
    with CheckpointSaver(folder, settings(**changes), PROCESSES) as saver:
        saver.save(
            run_tensors(model, optimizer),
            {"step": step, "val_loss": val_loss, "config": config or {}, "resume": "auto"},
        )
        assert saver.wait()
    return folder / f"step_{step:08d}"


def test_a_checkpoint_gives_back_weights_and_optimizer_bit_for_bit(tmp_path):
    model, optimizer = trained()
    path = save(tmp_path, 5, model=(model, optimizer))
    verify_checkpoint(path)
    torch.manual_seed(9)
    other = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 2))
    other_optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    load_tensors(path, other, other_optimizer)
    expected = run_tensors(model, optimizer)
    loaded = run_tensors(other, other_optimizer)
    assert len(expected) == 6 * 4, "each weight has a step and two moments"
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name


def test_shards_are_plain_safetensors(tmp_path):
    model, optimizer = trained()
    path = save(tmp_path, 1, model=(model, optimizer))
    loaded = load_file(path / "shard-00000.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in run_tensors(model, optimizer).items())
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint.json", "shard-00000.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_dtype_and_a_scalar_and_a_transposed_tensor_come_back(tmp_path, dtype):
    tensors = {"scalar": torch.tensor(3, dtype=dtype), "transposed": torch.arange(6).to(dtype).view(2, 3).t()}
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.save(tensors, {"step": 1, "val_loss": None})
    loaded = load_file(tmp_path / "step_00000001" / "shard-00000.safetensors")
    for name, value in tensors.items():
        assert torch.equal(loaded[name], value)


def test_shards_are_on_the_disk_before_the_marker_and_that_before_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "step_00000001", []
    marker = path / "checkpoint.json"

    def fsync(number: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{number}"))
        synced.append((name, marker.exists(), 0 if name.is_dir() else os.fstat(number).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 1)
    shard = path / "shard-00000.safetensors"
    assert synced == [
        (shard, False, shard.stat().st_size),
        (path / f".checkpoint.json.{os.getpid()}", False, marker.stat().st_size),
        (path, True, 0),
        (tmp_path, True, 0),
    ]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path, monkeypatch):
    write = train.saving._write

    goes_on = {f"step_0000000{step}": threading.Event() for step in (1, 2)}

    def slowly(file, *arguments):
        assert goes_on[Path(file.name).parent.name].wait(150), "training waits for what waits for it"
        return write(file, *arguments)

    monkeypatch.setattr(train.saving, "_write", slowly)
    weight = torch.zeros(4)
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.save({"weight": weight}, {"step": 1, "val_loss": None})
        weight += 1
        assert list_checkpoints(tmp_path) == []
        # the next save waits for this one
        threading.Timer(0.1, goes_on["step_00000001"].set).start()
        saver.save({"weight": weight}, {"step": 2, "val_loss": None})
        assert len(list_checkpoints(tmp_path)) == 1
        goes_on["step_00000002"].set()
    values = [load_file(path / "shard-00000.safetensors")["weight"][0] for path in list_checkpoints(tmp_path)]
    assert values == [0, 1]


def test_after_preparation_a_save_allocates_no_host_memory(tmp_path, monkeypatch):
    tensors = {"weight": torch.arange(4.0), "moment": torch.ones(2, 3)}
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.prepare(tensors)
        assert saver.wait() is True
        monkeypatch.delattr(torch, "empty_like")
        saver.save(tensors, {"step": 1, "val_loss": None})
    loaded = load_file(tmp_path / "step_00000001" / "shard-00000.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


def test_a_copy_that_the_host_has_no_memory_for_costs_the_checkpoint_and_is_told_at_once(tmp_path, capsys):
    weight = torch.ones(3)
    # more than any machine can address
    huge = {"weight": torch.ones(1).expand(1 << 50)}
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.prepare(huge)
        assert saver.wait() is False
        assert "WARNING: rank 0: no copies for checkpoints, to be tried again (" in capsys.readouterr().err
        saver.save(huge, {"step": 1, "val_loss": None})
        assert saver.wait() is False
        assert "step 1 was not written (no memory for a copy on the host" in capsys.readouterr().err
        saver.save({"weight": weight}, {"step": 2, "val_loss": None})
        assert saver.wait() is True
    verify_checkpoint(tmp_path / "step_00000002")


def test_memory_that_the_driver_does_not_lock_is_used_as_it_is_and_none_of_it_stays_locked(
    tmp_path, monkeypatch, capsys
):
    """With a stand-in for the driver, which locks one tensor and no more."""
    locked = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: bool(locked) or locked.append(address),
        cudaHostUnregister=lambda address: locked.remove(address),
    )

    def check(code):
        if code:
            raise RuntimeError("the limit is reached")

    for name, stand_in in {
        "cudart": lambda: driver,
        "check_error": check,
        "device": nullcontext,
        "current_stream": lambda: SimpleNamespace(synchronize=lambda: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tensors = {"weight": torch.arange(4.0), "moment": torch.ones(2, 3)}
    with CheckpointSaver(tmp_path, settings(), replace(PROCESSES, device=torch.device("cuda"))) as saver:
        saver.prepare(tensors)
        assert saver.wait() is True
        assert "is not locked (the limit is reached), and each save will" in capsys.readouterr().err
        assert not locked
        saver.save(tensors, {"step": 1, "val_loss": None})
        assert saver.wait() is True
    loaded = load_file(tmp_path / "step_00000001" / "shard-00000.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    assert capsys.readouterr().err == ""


def test_what_is_kept_is_the_newest_every_nth_and_the_best(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: 1.5, 7: None, 8: 2.5, 9: 2.5}
    model = trained()
    for step, loss in losses.items():
        save(tmp_path, step, model=model, val_loss=loss, keep_last=2, keep_every_steps=4, keep_best=True)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["2", "4", "8", "9"]
    assert [path.name[-1] for path in superfluous_checkpoints(tmp_path, settings(keep_last=1), 9)] == [
        "2",
        "4",
        "8",
    ]


def test_the_best_checkpoint_is_that_of_losses_of_the_same_tokens(tmp_path):
    model = trained()
    for step, loss, tokens in ((1, 2.0, 64), (2, 2.1, 64), (3, 3.1, 4096), (4, 3.0, 4096), (5, 3.2, 4096)):
        config = {"seq_len": 64, "evaluation": {"tokens": tokens}}
        save(tmp_path, step, model=model, val_loss=loss, config=config, keep_last=1, keep_best=True)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["1", "4", "5"]


def test_a_disk_that_fails_for_a_moment_behind_a_save_costs_no_run_and_no_checkpoint(
    tmp_path, monkeypatch, capsys
):
    save(tmp_path, 1)
    read_text = Path.read_text

    def stale(path, *given, **options):
        if path.name == "checkpoint.json":
            raise OSError(errno.ESTALE, "stale")
        return read_text(path, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", stale)
        save(tmp_path, 2, keep_last=1)
    assert f"{tmp_path} cannot be read ([Errno 116] stale): older checkpoints stay" in capsys.readouterr().err
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "2"]
    save(tmp_path, 3, keep_last=1)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3"]


def test_a_checkpoint_whose_removal_is_cut_off_is_none_any_more(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1)

    def cut_off(path):
        (path / "shard-00000.safetensors").unlink()
        raise OSError(errno.EIO, "cut off")

    monkeypatch.setattr(train.saving.shutil, "rmtree", cut_off)
    save(tmp_path, 2, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002"]
    assert "step_00000001 was not removed ([Errno 5] cut off)" in capsys.readouterr().err


def test_of_a_checkpoint_that_was_moved_and_linked_the_link_alone_is_removed(tmp_path):
    folder, disk = tmp_path / "checkpoints", tmp_path / "disk"
    path, elsewhere = save(folder, 1), disk / "step_00000001"
    disk.mkdir()
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert take_checkpoint(folder, "auto") == path
    save(folder, 2, keep_last=1)
    assert [path.name for path in folder.iterdir()] == ["step_00000002"]
    verify_checkpoint(elsewhere)


def test_a_link_to_a_checkpoint_that_is_away_stays_and_its_step_is_saved_beside_it(tmp_path):
    path = save(tmp_path, 1)
    away = tmp_path / "step_00000002"
    away.symlink_to(tmp_path / "disk" / "step_00000002")
    remove_unfinished(tmp_path)
    assert away.is_symlink()
    assert take_checkpoint(tmp_path, "auto") == path
    verify_checkpoint(save(tmp_path, 2))
    assert (tmp_path / "step_00000002.damaged-1").is_symlink()


def test_the_best_is_the_lowest_of_the_finite_losses(tmp_path):
    model = trained()
    for step, loss in enumerate([math.nan, 3.0, 2.0, -math.inf, 3.5, math.inf], 1):
        save(tmp_path, step, model=model, val_loss=loss, keep_last=2, keep_best=True)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["3", "5", "6"]
    # a checkpoint of a time when NaN was written
    marker = tmp_path / "step_00000005" / "checkpoint.json"
    marker.write_text(marker.read_text().replace('"val_loss": 3.5', '"val_loss": NaN'))
    save(tmp_path, 7, model=model, val_loss=4.0, keep_last=1, keep_best=True)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["3", "7"]


def test_a_checkpoint_just_written_stays_although_a_damaged_one_is_later(tmp_path):
    paths = [save(tmp_path, step) for step in (2, 3)]
    shard = paths[-1] / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    # a run that went on from step 2 is stopped soon
    written = save(tmp_path, 1, keep_last=1)
    assert written.exists()
    assert paths[-1].exists()


def test_a_checkpoint_that_was_skipped_as_damaged_is_set_aside_and_counts_for_nothing(tmp_path, capsys):
    losses = {20: 3.0, 23: 1.0}
    paths = [save(tmp_path, step, val_loss=loss, keep_best=True) for step, loss in losses.items()]
    shard = paths[-1] / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="step_00000023 is damaged"):
        take_checkpoint(tmp_path, str(paths[-1]))
    assert take_checkpoint(tmp_path, "auto") == paths[0]
    assert "step_00000023 is kept as step_00000023.damaged-1" in capsys.readouterr().err
    left = []
    for step in (22, 24, 26):
        save(tmp_path, step, val_loss=2.0 + step / 100, keep_best=True)
        left.append([path.name.lstrip("step_0") for path in sorted(tmp_path.iterdir())])
    assert left == [
        ["20", "22", "23.damaged-1"],
        ["22", "23.damaged-1", "24"],
        ["22", "23.damaged-1", "24", "26"],
    ]


def test_a_damaged_marker_neither_stops_a_save_nor_is_removed(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2)]
    (paths[0] / "checkpoint.json").write_text("{")
    for step in (3, 4, 5):
        save(tmp_path, step)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "4", "5"]


def test_a_checkpoint_that_cannot_be_set_aside_is_not_lost(tmp_path, monkeypatch, capsys):
    path = save(tmp_path, 1)

    def refuse(path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(train.saving, "_set_aside", refuse)
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.save({"weight": torch.ones(3)}, {"step": 1, "val_loss": None})
        assert saver.wait() is False
    verify_checkpoint(path)
    assert "Read-only file system" in capsys.readouterr().err


def test_a_write_that_fails_is_reported_and_leaves_the_checkpoint_before_it(tmp_path, monkeypatch, capsys):
    path = save(tmp_path, 1)

    def full(file, data, checksum):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointSaver(tmp_path, settings(keep_last=1), PROCESSES) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(train.saving, "_write", full)
            saver.save({"weight": torch.ones(3)}, {"step": 2, "val_loss": None})
            assert saver.wait() is False
        assert (
            "checkpoint of step 2 was not written (rank 0: [Errno 28] No space left"
            in capsys.readouterr().err
        )
        assert list(tmp_path.iterdir()) == [path]
        verify_checkpoint(path)
        # there is room again
        saver.save({"weight": torch.ones(3)}, {"step": 3, "val_loss": None})
        assert saver.wait() is True


def test_an_error_of_the_program_is_not_taken_for_a_full_disk(tmp_path):
    saver = CheckpointSaver(tmp_path, settings(), PROCESSES)
    saver.save({"weight": torch.ones(2, dtype=torch.complex64)}, {"step": 1, "val_loss": None})
    with pytest.raises(BaseException, match="complex64"):
        saver.wait()


def test_after_a_save_that_failed_no_memory_stays_locked_and_its_thread_ends(tmp_path, monkeypatch):
    unlocked = []
    monkeypatch.setattr(train.saving, "unlock_pages", unlocked.extend)
    saver = CheckpointSaver(tmp_path, settings(), PROCESSES)
    saver._locked = [1234]
    saver.save({"weight": torch.ones(2, dtype=torch.complex64)}, {"step": 1, "val_loss": None})
    with pytest.raises(BaseException, match="complex64"):
        saver.__exit__()
    assert unlocked == [1234]
    with pytest.raises(RuntimeError, match="after shutdown"):
        saver.prepare({})


def test_a_checkpoint_in_the_way_is_set_aside_and_an_unfinished_one_replaced(tmp_path, capsys):
    path = save(tmp_path, 1)
    (path / "shard-00000.safetensors").write_bytes(b"damaged")
    save(tmp_path, 1)
    aside = tmp_path / "step_00000001.damaged-1"
    assert (aside / "shard-00000.safetensors").read_bytes() == b"damaged"
    assert "step_00000001 is kept as step_00000001.damaged-1" in capsys.readouterr().err
    (path / "checkpoint.json").unlink()
    save(tmp_path, 1)
    assert "step_00000001 was never finished: writing it again" in capsys.readouterr().err
    assert list_checkpoints(tmp_path) == [path]


def test_each_tensor_that_all_processes_hold_is_saved_by_one_of_them_and_evenly():
    tensors = {f"{index}": torch.zeros(size) for index, size in enumerate((900, 1000, 800, 10, 20, 30))}
    shares = [_own_share(tensors, Processes(rank, 3, torch.device("cpu"), None, None)) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    sizes = [sum(tensor.numel() for tensor in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 220


def test_the_marker_holds_plain_values_only(tmp_path):
    path = save(tmp_path, 3, val_loss=2.5)
    info = json.loads((path / "checkpoint.json").read_text())
    assert (info["format"], info["step"], info["val_loss"]) == (2, 3, 2.5)
    assert set(info["shards"]["shard-00000.safetensors"]) == {"bytes", "crc32"}


def test_a_disk_that_takes_a_part_of_each_write_gets_all_of_it():
    taken, content = bytearray(), bytes(range(100))
    file = SimpleNamespace(write=lambda piece: taken.extend(piece[:3]) or len(piece[:3]))
    assert train.saving._write(file, content, 7) == zlib.crc32(content, 7)
    assert taken == content


@pytest.mark.parametrize(
    "change",
    [{"corpus": "b"}, {"config": {"seq_len": 32, "evaluation": {"tokens": 64}}}],
    ids=["text", "length"],
)
def test_losses_of_another_text_or_length_are_not_compared(change, tmp_path):
    then = {"corpus": "a", "config": {"seq_len": 64, "evaluation": {"tokens": 64}}}
    now = then | change
    for step, loss, info in ((1, 2.0, then), (2, 2.5, then), (3, 3.1, now), (4, 3.0, now), (5, 3.2, now)):
        with CheckpointSaver(tmp_path, settings(keep_last=1, keep_best=True), PROCESSES) as saver:
            saver.save({"weight": torch.ones(1)}, {"step": step, "val_loss": loss, "resume": "auto", **info})
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["1", "4", "5"]


def test_nothing_is_saved_where_another_process_has_no_memory_for_its_part(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "any", lambda self, flag: True)
    with CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        saver.save({"weight": torch.ones(1)}, {"step": 1, "val_loss": None})
        assert not saver.wait()
    assert not list_checkpoints(tmp_path)


def test_an_error_of_the_save_before_is_raised_by_the_next(tmp_path):
    refused = partial(pytest.raises, CheckpointException, match="complex64")
    # and once more at the end
    with refused(), CheckpointSaver(tmp_path, settings(), PROCESSES) as saver:
        # no format of ours holds it
        saver.save({"weight": torch.ones(1, dtype=torch.complex64)}, {"step": 1, "val_loss": None})
        with refused():
            saver.save({"weight": torch.ones(2)}, {"step": 2, "val_loss": None})
