import json
import pickle
import re
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from data.tokenizer import shard_mark
from train import checkpoint
from train.checkpoint import (
    FORMAT_VERSION,
    check_fits,
    find_checkpoint,
    list_checkpoints,
    load_tensors,
    newest_checkpoint,
    read_checkpoint,
    refuse_other_run,
    verify_checkpoint,
)
from train.weights import locate

CONFIG = {
    "seed": 1,
    "seq_len": 16,
    "tokens_per_step": 64,
    "separate_documents": False,
    "pose_seq_len": None,
    "attention": {"implementation": "flash", "patterns": ["dense", "window(8)"], "block_size": 128},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "max_seq_len": 16, "dropout": 0.0},
    "data": {"tokenizer": "gpt2", "source": "pystdlib", "workers": None, "folder": "datasets/a"},
    "optim": {"algorithm": "adamw"},
    "start": {"weights": "published", "positions": "repeat"},
    "lora": {"rank": 0, "alpha": 16.0, "embeddings_and_norms": True},
}


def write(folder, step, content=b"weights", **info):
    """A checkpoint of one shard with any content."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "shard-00000.safetensors").write_bytes(content)
    shards = {"shard-00000.safetensors": {"bytes": len(content), "crc32": zlib.crc32(content)}}
    given = {"format": FORMAT_VERSION, "step": step, "config": CONFIG, "resume": "auto", "shards": shards}
    (path / "checkpoint.json").write_text(json.dumps(given | info))
    return path


def changed(group, key, value):
    copy = {name: dict(part) if isinstance(part, dict) else part for name, part in CONFIG.items()}
    (copy[group] if group else copy)[key] = value
    return copy


def test_auto_takes_the_newest_and_starts_anew_without_one(tmp_path):
    assert find_checkpoint(tmp_path / "none", "auto") is None
    write(tmp_path, 9)
    newest = write(tmp_path, 10)
    assert find_checkpoint(tmp_path, "auto") == newest


def test_the_newest_is_that_of_the_last_step_also_beyond_eight_digits(tmp_path):
    steps = [99_999_999, 100_000_000, 1_000_000_000, 5]
    paths = {step: write(tmp_path, step) for step in steps}
    (tmp_path / "step_7").mkdir()
    assert list_checkpoints(tmp_path) == [paths[step] for step in sorted(steps)]
    assert find_checkpoint(tmp_path, "auto") == paths[1_000_000_000]


def test_a_folder_without_its_marker_is_no_checkpoint(tmp_path):
    whole = write(tmp_path, 1)
    (write(tmp_path, 2) / "checkpoint.json").unlink()
    assert list_checkpoints(tmp_path) == [whole]
    assert newest_checkpoint(tmp_path) == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, not 7"),
        (b"weight", "has 6 bytes, not 7"),
        (b"weightz", "has another checksum than when it was written"),
        (None, "is missing"),
    ],
)
def test_a_damaged_shard_is_named_and_its_checkpoint_skipped_and_left_alone(
    tmp_path, capsys, content, message
):
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    shard = newest / "shard-00000.safetensors"
    shard.unlink() if content is None else shard.write_bytes(content)
    expected = f"step_00000002 is damaged: shard-00000.safetensors {message}"
    with pytest.raises(ValueError, match=expected):
        verify_checkpoint(newest)
    assert newest_checkpoint(tmp_path) == older
    assert expected in capsys.readouterr().err
    assert newest.is_dir()
    with pytest.raises(ValueError, match=expected):
        find_checkpoint(tmp_path, str(newest))


def test_all_damaged_is_an_error_and_not_a_new_run(tmp_path):
    for step in (1, 2):
        (write(tmp_path, step) / "shard-00000.safetensors").unlink()
    with pytest.raises(ValueError, match="all 2 checkpoints are damaged .* move them away to start over"):
        find_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: checkpoint.json is not JSON"),
        ("[]", "is not a nanoflash checkpoint of format 2"),
        ('{"format": 2}', "is damaged: checkpoint.json lacks step, shards"),
        ('{"format": 2, "step": 1, "shards": []}', "is damaged: checkpoint.json lacks shards"),
    ],
)
def test_a_marker_that_cannot_be_read_is_refused(tmp_path, text, message):
    path = write(tmp_path, 1)
    (path / "checkpoint.json").write_text(text)
    for read in (read_checkpoint, verify_checkpoint):
        with pytest.raises(ValueError, match=message):
            read(path)


def test_a_run_that_started_from_a_named_checkpoint_continues_from_its_own(tmp_path):
    other = write(tmp_path / "other", 7)
    assert find_checkpoint(tmp_path / "run", str(other)) == other
    own = write(tmp_path / "run", 9, resume=str(other))
    assert find_checkpoint(tmp_path / "run", str(other)) == own
    # its own, but from before it was told to start there
    write(tmp_path / "run", 10)
    assert find_checkpoint(tmp_path / "run", str(other)) == other


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match="resume=never, but .* holds 1 checkpoints: choose another name="):
        refuse_other_run(tmp_path, "never", CONFIG)


def test_a_run_named_to_resume_from_is_refused_with_its_newest_checkpoint(tmp_path):
    folder = tmp_path / "first" / "checkpoints"
    write(folder, 9)
    newest = write(folder, 10)
    for named, instead in (
        (folder.parent, newest),
        (folder, newest),
        (tmp_path, "a folder .../step_00000500"),
    ):
        message = f"^checkpoint.resume={named} is not a checkpoint, it has no checkpoint.json: give {instead}"
        with pytest.raises(ValueError, match=message):
            refuse_other_run(tmp_path / "second" / "checkpoints", str(named), CONFIG)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_finished_run_without_its_checkpoints_is_not_written_over(tmp_path, resume):
    refuse_other_run(tmp_path / "checkpoints", resume, CONFIG)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="summary.json is of a finished run whose checkpoints are gone"):
        refuse_other_run(tmp_path / "checkpoints", resume, CONFIG)


@pytest.mark.parametrize("own", ["auto", "elsewhere"])
def test_going_back_below_later_checkpoints_of_another_attempt_is_refused(tmp_path, own):
    """They would count as newer than what the run saves from there on, which would be removed."""
    run = tmp_path / "run"
    named = write(run, 7)
    write(run, 9, resume=str(named))
    refuse_other_run(run, str(named), CONFIG)
    write(run, 10, resume=own)
    with pytest.raises(ValueError, match="goes back to step 7, but .*10 is later .*: choose another name="):
        refuse_other_run(run, str(named), CONFIG)


def test_a_checkpoint_of_another_run_does_not_replace_those_that_are_there(tmp_path):
    """They would be among the oldest, which are removed for new ones."""
    named, run = write(tmp_path / "other", 7), tmp_path / "run"
    refuse_other_run(run, str(named), CONFIG)
    write(run, 8, resume=str(named))
    refuse_other_run(run, str(named), CONFIG)
    (run / "step_00000008").rename(tmp_path / "away")
    write(run, 6)
    with pytest.raises(ValueError, match="of another run than .*6, .* would replace: choose another name="):
        refuse_other_run(run, str(named), CONFIG)


def test_a_whole_shard_is_read_once_and_an_altered_one_again(tmp_path, monkeypatch):
    path, read = write(tmp_path, 1), []
    monkeypatch.setattr(
        checkpoint, "zlib", SimpleNamespace(crc32=lambda *a: read.append(a) or zlib.crc32(*a))
    )
    for _ in range(3):
        verify_checkpoint(path)
    assert len(read) == 1
    (path / "shard-00000.safetensors").write_bytes(b"wEights")
    with pytest.raises(ValueError, match="has another checksum"):
        verify_checkpoint(path)


def test_a_marker_that_cannot_be_read_does_not_keep_a_run_from_its_older_checkpoint(tmp_path, capsys):
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    (newest / "checkpoint.json").write_text("{")
    refuse_other_run(tmp_path, "auto", CONFIG)
    with pytest.raises(ValueError, match="seed is 1"):
        refuse_other_run(tmp_path, "auto", changed("", "seed", 2))
    assert find_checkpoint(tmp_path, "auto") == older
    assert "checkpoint.json is not JSON" in capsys.readouterr().err


class Malicious:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_a_shard_that_would_run_code_is_refused_and_does_not_run_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    for content in (pickle.dumps(Malicious()), b"\x80\x02" + pickle.dumps(Malicious())):
        path = write(tmp_path / str(len(content)), 1, content)
        # its checksum is right: it is the format that does not run
        verify_checkpoint(path)
        with pytest.raises(Exception, match="(?i)header|deserializ"):
            load_tensors(path, model)
    torch.save({"model.weight": Malicious()}, tmp_path / "saved")
    with pytest.raises(Exception, match="(?i)header|deserializ"):
        load_tensors(write(tmp_path, 2, (tmp_path / "saved").read_bytes()), model)
    assert not (tmp_path / "ran").exists()


def test_nothing_here_or_in_the_saving_can_unpickle():
    import train.checkpoint
    import train.saving

    for module in (train.checkpoint, train.saving):
        text = Path(module.__file__).read_text()
        assert "torch.load" not in text
        assert "import pickle" not in text


def test_weights_load_without_the_optimizer_and_from_any_safetensors_writer(tmp_path):
    model = torch.nn.Linear(2, 3)
    path = write(tmp_path, 1)
    save_file(
        {"model.weight": torch.full((3, 2), 2.0), "model.bias": torch.ones(3)},
        path / "shard-00000.safetensors",
    )
    load_tensors(path, model)
    assert torch.equal(model.weight, torch.full((3, 2), 2.0))
    assert torch.equal(model.bias, torch.ones(3))


@pytest.mark.parametrize("same_run", [True, False])
def test_another_model_size_is_refused_by_each_key_that_differs(tmp_path, same_run):
    path = write(tmp_path, 1)
    # no way of going on is offered that would be refused too
    way_out = "choose another name= for a new run, or"
    if not same_run:
        # another name alone would take the same checkpoint
        way_out = "choose another name= for a new run without checkpoint.resume=, or"
    message = (
        "model.n_layer is 2 in the checkpoint and 12 in the configuration: "
        f"{way_out} the checkpoint's own values$"
    )
    with pytest.raises(ValueError, match=message):
        check_fits(read_checkpoint(path), path, changed("model", "n_layer", 12), same_run=same_run)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("", "seed", 2),
        ("", "tokens_per_step", 128),
        ("data", "source", "pypackages"),
        ("start", "weights", "elsewhere"),
        ("attention", "patterns", ["window(8)", "dense"]),
        ("attention", "block_size", 64),
        ("", "separate_documents", True),
        ("", "pose_seq_len", 32),
    ],
)
def test_another_stream_of_tokens_or_view_of_it_is_refused_unless_asked_for_by_path(
    tmp_path, group, key, value
):
    path = write(tmp_path, 1)
    config = changed(group, key, value)
    value = re.escape(str(value))
    message = f"{key} is .* in the checkpoint and {value} in the configuration: .*checkpoint.resume={path}"
    with pytest.raises(ValueError, match=message):
        refuse_other_run(tmp_path, "auto", config)
    refuse_other_run(tmp_path / "elsewhere", str(path), config)


def test_learned_positions_that_are_extended_already_are_not_extended_otherwise(tmp_path):
    write(tmp_path, 1)
    message = (
        "start.positions is repeat in the checkpoint and interpolate .*: choose another name= [^=]*values$"
    )
    with pytest.raises(ValueError, match=message):
        refuse_other_run(tmp_path, "auto", changed("start", "positions", "interpolate"))
    # rotary ones are part of the model, and older checkpoints do not say
    for older in (
        {"model": CONFIG["model"] | {"rotary": {"base": 1e4}}},
        {"start": {"weights": "published"}},
    ):
        then, folder = CONFIG | older, tmp_path / min(older)
        write(folder, 1, config=then)
        refuse_other_run(folder, "auto", then | {"start": CONFIG["start"] | {"positions": "interpolate"}})


def test_a_checkpoint_that_its_run_removes_is_told_as_that(tmp_path):
    path = write(tmp_path / "runs" / "live" / "checkpoints", 7)
    weights = torch.nn.Linear(2, 2)
    shutil.rmtree(path)
    words = "a run removes all but its newest checkpoints (checkpoint.keep_last), give the command again"
    for read, told in (
        (lambda: load_tensors(path, weights), "was removed while it was read"),
        (lambda: read_checkpoint(path), "is not there"),
        (lambda: locate(path), "is not there"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{path} {told}: {words}")):
            read()


def test_steps_of_another_size_are_refused_in_the_same_folder_with_the_way_out(tmp_path):
    run, other = tmp_path / "run", changed("", "tokens_per_step", 128)
    path = write(run, 7)
    with pytest.raises(ValueError, match=f"resume={path} to go on with .* on purpose, under another name="):
        refuse_other_run(run, "auto", other)
    message = "tokens_per_step is 64 in .* and 128 in the configuration, .*: choose another name= .*{}, or "
    with pytest.raises(ValueError, match=message.format(f"checkpoint.resume={path}")):
        refuse_other_run(run, str(path), other)
    # nor when it goes on from its own
    own = write(tmp_path / "new", 9, resume=str(path))
    refuse_other_run(tmp_path / "new", str(path), CONFIG)
    with pytest.raises(ValueError, match=message.format(f"checkpoint.resume={own}")):
        refuse_other_run(tmp_path / "new", str(path), other)


def test_a_checkpoint_of_a_time_when_no_digest_was_kept_fits_any_text(tmp_path):
    for step, then in ((1, {}), (2, {"corpus": "a"})):
        path = write(tmp_path, step, **then)
        check_fits(read_checkpoint(path), path, CONFIG, same_run=True, corpus="a")
    path = write(tmp_path, 3)
    check_fits(read_checkpoint(path), path, CONFIG, same_run=True, corpus="b")


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("data", "workers", 4),
        # which no source of Python files reads
        ("data", "dataset_name", "given in vain"),
        ("model", "dropout", 0.1),
        ("start", "weights", "./published/"),
        ("attention", "implementation", "reference"),
    ],
)
def test_what_changes_neither_weights_nor_tokens_may_change(tmp_path, group, key, value):
    write(tmp_path, 1)
    refuse_other_run(tmp_path, "auto", changed(group, key, value))


def test_a_tokenizer_folder_may_move_and_another_tokenizer_may_not_take_its_place(tmp_path):
    marks = {}
    for name, text in (("published", "1"), ("moved", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
        marks[name] = shard_mark(str(tmp_path / name))
    configs = {name: changed("data", "tokenizer", str(tmp_path / name)) for name in marks}
    path = write(tmp_path, 1, config=configs["published"], tokenizer=marks["published"])
    shutil.rmtree(tmp_path / "published")
    for same_run in (True, False):
        check_fits(read_checkpoint(path), path, configs["moved"], same_run=same_run)
        message = rf"data.tokenizer is .*published \(json:.*\) in the .* and .*other \({marks['other']}\) in"
        with pytest.raises(ValueError, match=message):
            check_fits(read_checkpoint(path), path, configs["other"], same_run=same_run)
    # of a time when it was not kept: the shards of the same text are bound to their tokenizer
    path = write(tmp_path, 2, config=configs["published"])
    check_fits(read_checkpoint(path), path, configs["moved"], same_run=True)
    for given, same_run in ((configs["moved"], False), (CONFIG, True)):
        with pytest.raises(ValueError, match="data.tokenizer is .*published in the checkpoint and"):
            check_fits(read_checkpoint(path), path, given, same_run=same_run)


def test_a_tokenizer_with_another_end_of_text_may_not_take_its_place(tmp_path):
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    configs = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        vocabulary.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        configs[name] = changed("data", "tokenizer", str(tmp_path / name))
    then = {"config": configs["a"], "tokenizer": shard_mark(str(tmp_path / "a"))}
    path = write(tmp_path, 1, **then, end_of_text=0)
    for same_run in (True, False):
        check_fits(read_checkpoint(path), path, configs["a"], same_run=same_run)
        message = r"data.tokenizer is .*a \(end of text 0\) in the .* and .*b \(end of text 1\) in"
        with pytest.raises(ValueError, match=message):
            check_fits(read_checkpoint(path), path, configs["b"], same_run=same_run)
    # of a time when it was not kept
    path = write(tmp_path, 2, **then)
    check_fits(read_checkpoint(path), path, configs["b"], same_run=True)


def test_a_checkpoint_from_before_there_were_patterns_goes_on_with_dense_layers_of_any_block_size(tmp_path):
    new = ("attention", "separate_documents", "pose_seq_len")
    path = write(tmp_path, 1, config={key: value for key, value in CONFIG.items() if key not in new})
    dense = changed("attention", "patterns", ["dense"])
    dense["attention"]["block_size"] = 64
    check_fits(read_checkpoint(path), path, dense, same_run=True)
    with pytest.raises(ValueError, match=r"attention.patterns is \['dense'\] in the checkpoint"):
        check_fits(read_checkpoint(path), path, CONFIG, same_run=True)
