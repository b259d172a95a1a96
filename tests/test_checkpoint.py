import pytest
import torch

from train.checkpoint import check_fits, find_checkpoint, list_checkpoints, read_checkpoint, save_checkpoint

CONFIG = {
    "seed": 1,
    "seq_len": 16,
    "tokens_per_step": 64,
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "max_seq_len": 16, "dropout": 0.0},
    "data": {"tokenizer": "gpt2", "source": "pystdlib", "workers": None, "folder": "datasets/a"},
}


def save(folder, step, keep=2, config=CONFIG):
    torch.manual_seed(step)
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return layer, optimizer, save_checkpoint(folder, step, layer, optimizer, scaler, config, keep)


def changed(group, key, value):
    copy = {name: dict(part) if isinstance(part, dict) else part for name, part in CONFIG.items()}
    (copy[group] if group else copy)[key] = value
    return copy


def test_a_checkpoint_gives_back_weights_and_optimizer_bit_for_bit(tmp_path):
    layer, optimizer, path = save(tmp_path, 5)
    state = read_checkpoint(path)
    assert state["step"] == 5
    assert state["config"] == CONFIG
    for name, value in layer.state_dict().items():
        assert torch.equal(state["model"][name], value)
    for index, moments in optimizer.state_dict()["state"].items():
        assert torch.equal(state["optimizer"]["state"][index]["exp_avg"], moments["exp_avg"])


def test_only_the_newest_are_kept_and_nothing_half_written_remains(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000003.pt", "step_00000010.pt"]


def test_a_half_written_checkpoint_is_no_checkpoint(tmp_path):
    _, _, path = save(tmp_path, 1)
    (tmp_path / "step_00000002.partial").write_bytes(path.read_bytes()[:100])
    assert find_checkpoint(tmp_path, "auto") == path


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    _, _, path = save(tmp_path, 1)

    def full_disk(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [path]
    assert read_checkpoint(path)["step"] == 1


def test_auto_takes_the_newest_and_starts_anew_without_one(tmp_path):
    assert find_checkpoint(tmp_path / "none", "auto") is None
    save(tmp_path, 9)
    _, _, newest = save(tmp_path, 10)
    assert find_checkpoint(tmp_path, "auto") == newest


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="resume=never, but .* holds 1 checkpoints: choose another name="):
        find_checkpoint(tmp_path, "never")


@pytest.mark.parametrize("size", [0, 100, -10])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, size):
    _, _, path = save(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="step_00000001.pt is not a readable checkpoint .* truncated"):
        read_checkpoint(path)


def test_a_checkpoint_that_would_run_code_is_refused_and_does_not_run_it(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"format": 1, "model": Malicious()}, tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        read_checkpoint(tmp_path / "step_00000001.pt")
    assert not (tmp_path / "ran").exists()


def test_a_file_of_another_program_is_refused(tmp_path):
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt is not a nanoflash checkpoint of format 1"):
        read_checkpoint(tmp_path / "other.pt")


@pytest.mark.parametrize("same_run", [True, False])
def test_another_model_size_is_refused_by_each_key_that_differs(tmp_path, same_run):
    _, _, path = save(tmp_path, 1)
    message = "model.n_layer is 2 in the checkpoint and 12 in the configuration"
    with pytest.raises(ValueError, match=message):
        check_fits(read_checkpoint(path), path, changed("model", "n_layer", 12), same_run=same_run)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [("", "seed", 2), ("", "tokens_per_step", 128), ("data", "source", "pypackages")],
)
def test_another_stream_of_tokens_is_refused_unless_asked_for_by_path(tmp_path, group, key, value):
    _, _, path = save(tmp_path, 1)
    state, config = read_checkpoint(path), changed(group, key, value)
    with pytest.raises(ValueError, match=f"{key} is .* in the checkpoint and {value} in the configuration"):
        check_fits(state, path, config, same_run=True)
    check_fits(state, path, config, same_run=False)


@pytest.mark.parametrize(("group", "key", "value"), [("data", "workers", 4), ("model", "dropout", 0.1)])
def test_what_changes_neither_weights_nor_tokens_may_change(tmp_path, group, key, value):
    _, _, path = save(tmp_path, 1)
    check_fits(read_checkpoint(path), path, changed(group, key, value), same_run=True)
