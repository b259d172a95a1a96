import errno
import io
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from data.tokenizer import TOKENIZERS, load_tokenizer, shard_mark
from model import GPT, AttentionConfig, ModelConfig
from model.pretrained import read_pretrained_config
from train.export import EXPORT, export, export_run, refuse_to_replace
from train.weights import tokenizer_name


def model(patterns=("dense",), vocab_size=100, n_layer=2) -> GPT:
    config = ModelConfig(
        n_layer=n_layer, n_head=2, n_embd=32, vocab_size=vocab_size, max_seq_len=16, dropout=0.0
    )
    return GPT(config, AttentionConfig(implementation="reference", patterns=list(patterns)))


def write_tokenizer(folder: Path) -> None:
    """As that of a chat model: a text ends with token 0, a turn with token 2, which stops generation."""
    folder.mkdir()
    words = tokenizers.models.WordLevel({"<end>": 0, "<pad>": 1, "<turn>": 2, "word": 3}, unk_token="<pad>")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 1, "hidden_size": 8}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("patterns", [["dense"], ["window(8)", "dense"]])
def test_patterns_that_an_export_loses_are_told(patterns, tmp_path, capsys):
    export(model(patterns), "gpt2", tmp_path / "out", torch.float32)
    told = capsys.readouterr().err
    assert ("WARNING: attention.patterns=['window(8)', 'dense'] are no part" in told) == (len(patterns) > 1)


def test_an_export_ends_a_text_where_its_tokenizer_does(tmp_path):
    write_tokenizer(tmp_path / "published")
    export(model(vocab_size=4), str(tmp_path / "published"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (0, 1)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.generation_config.eos_token_id == [0, 2]
    export(model(vocab_size=50257), "gpt2", tmp_path / "gpt2")
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (50256, 50256)


def test_an_export_begins_a_text_as_the_model_has_learned_to(tmp_path):
    published = tmp_path / "published"
    write_tokenizer(published)
    config = json.loads((published / "config.json").read_text())
    for begin, place in ((3, "with"), (None, "without")):
        (published / "config.json").write_text(json.dumps(config | {"bos_token_id": begin}))
        # from random weights, in which a text follows the end of the one before, and from published ones
        for start, expected in ((None, 0), (str(published), begin), (str(tmp_path / "gone"), begin)):
            out = tmp_path / f"{place} {Path(start or 'nothing').name}"
            export(model(vocab_size=4), str(published), out, start=start)
            assert json.loads((out / "config.json").read_text())["bos_token_id"] == expected


def test_tokens_that_the_model_lacks_are_left_out_of_its_export(tmp_path):
    published = tmp_path / "published"
    write_tokenizer(published)
    theirs = {"bos_token_id": 4, "eos_token_id": [0, 4], "pad_token_id": 5000}
    (published / "config.json").write_text(json.dumps(theirs))
    export(model(vocab_size=4), str(published), tmp_path / "out", start=str(published))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (None, [0], None)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_all_chat_templates_are_exported_and_folders_of_such_names_are_not(tmp_path):
    published = tmp_path / "published"
    write_tokenizer(published)
    more = published / "additional_chat_templates"
    for folder in (more, published / "chat_templates"):
        folder.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    # an export of the same run may be there
    for _ in range(2):
        export_run(model(vocab_size=4), str(published), tmp_path, None)
    found = {str(path.relative_to(tmp_path / EXPORT)) for path in (tmp_path / EXPORT).rglob("*")}
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} < found
    assert "chat_templates" not in found


@pytest.mark.parametrize("is_there", [False, True])
def test_a_disk_that_is_full_for_the_tokenizer_leaves_nothing_of_an_export(is_there, tmp_path, monkeypatch):
    published, out = tmp_path / "published", tmp_path / "out" / "here"
    write_tokenizer(published)
    (published / "additional_chat_templates").mkdir()
    (published / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    if is_there:
        out.mkdir(parents=True)

    def full(path: Path, content: bytes) -> None:
        path.touch()
        if path.name == "tool_use.jinja":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        OSError, match=r"here was not written \(.*No space.*\): make room there, or choose ano"
    ):
        export(model(vocab_size=4), str(published), out)
    left = {path.name for path in tmp_path.rglob("*")} - {path.name for path in published.rglob("*")}
    assert left == {"published", *(("out", "here") if is_there else ())}


def test_the_files_of_models_and_tokenizers_are_utf8_in_every_locale(tmp_path, monkeypatch):
    published = tmp_path / "published"
    write_tokenizer(published)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((published / name).read_text()) | {"greeting": "café"}
        (published / name).write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    # what pathlib takes where no encoding is given
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    export(model(vocab_size=4), str(published), tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    text = config.read_text(encoding="utf-8").removeprefix("{")
    config.write_text('{"greeting": "café",' + text, encoding="utf-8")
    assert read_pretrained_config(tmp_path / "out").vocab_size == 4


@pytest.mark.parametrize(("limit", "exported"), [(8, 16), (16, 16), (1e30, 1e30), (None, None), ("8", "8")])
def test_an_exported_tokenizer_has_room_for_all_positions_of_the_model(limit, exported, tmp_path):
    published = tmp_path / "published"
    write_tokenizer(published)
    settings = {"eos_token": "<end>", "model_max_length": limit}
    (published / "tokenizer_config.json").write_text(json.dumps(settings))
    export(model(vocab_size=4), str(published), tmp_path / "out")
    copied = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert copied == settings | {"model_max_length": exported}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_folder_called_as_a_known_tokenizer_is_read_with_its_own(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path(name))
    tokenizer = load_tokenizer(tokenizer_name(name))
    assert tokenizer.vocab_size == 4
    # what its text carries is not taken for that of the known one, nor refused
    assert tokenizer.name == shard_mark(tokenizer_name(name)) != name
    export(model(vocab_size=4), tokenizer_name(Path(name)), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_tokenizer_that_is_gone_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="or a folder with tokenizer.json, got 'gone'"):
        export(model(), "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_the_precision_cannot_hold_is_named_with_the_way_out(tmp_path):
    large = model(vocab_size=257)
    with torch.no_grad():
        large.blocks[1].mlp.expand.weight[0, 0] = -1e5
    message = (
        r"transformer\.h\.1\.mlp\.c_fc\.weight has values up to 1e\+05, of which float16 makes infinity: use "
        "precision=bf16 or fp32"
    )
    with pytest.raises(ValueError, match=message):
        export(large, "bytes", tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()
    export(large, "bytes", tmp_path / "out", torch.bfloat16)
    export(model(vocab_size=257), "bytes", tmp_path / "fp16", torch.float16)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "must hold an object, got list")])
def test_a_damaged_configuration_beside_the_tokenizer_is_named(text, message, tmp_path):
    write_tokenizer(tmp_path / "published")
    (tmp_path / "published" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"published/config.json {message}.*: copy it again from its model"):
        export(model(vocab_size=4), str(tmp_path / "published"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_earlier_export_of_the_run_is_replaced_and_what_else_lies_there_stays(tmp_path):
    export_run(model(n_layer=1), "gpt2", tmp_path, None)
    out = tmp_path / "hugging_face"
    mine = {"README.md", "model.safetensors.bak", "model_of_last_week.safetensors"}
    for name in mine:
        (out / name).write_text("mine")
    # of an export in several files
    (out / "model-00001-of-00002.safetensors").write_bytes(b"old")
    export_run(model(n_layer=2), "gpt2", tmp_path, None)
    assert {path.name for path in out.iterdir()} == {*mine, "config.json", "model.safetensors"}
    assert json.loads((out / "config.json").read_text())["n_layer"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["hugging_face"]


def test_a_new_run_does_not_export_over_a_folder_that_it_has_not_made(tmp_path):
    refuse_to_replace(tmp_path)
    (tmp_path / "hugging_face").mkdir()
    with pytest.raises(ValueError, match="hugging_face, which no run of this name has made: choose another"):
        refuse_to_replace(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    refuse_to_replace(tmp_path)
