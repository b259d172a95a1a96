"""The third use from end to end: train short, export, go on with longer sequences, measure, export again."""

import json
import re
import shutil
import sys
from pathlib import Path

import faults
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.manifest import read_manifest
from data.shards import read_shard
from data.tokenizer import shard_mark
from model import AttentionConfig
from model.extend import extended_config
from model.rope import frequencies
from scripts import evaluate_context, export_hf, sample
from scripts.arguments import run_script
from train.weights import load_model

LLAMA = ["model=llama", "model.dropout=0.0", "model.n_kv_head=1", "model.mlp_width=64"]


def write_tokenizer(folder: Path) -> int:
    """One of 300 tokens, as Llama 3's is written; returns their number."""
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train_from_iterator([Path(__file__).read_text()], trainer)
    folder.mkdir()
    vocabulary.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return vocabulary.get_vocab_size()


def call(script, *arguments: str) -> None:
    sys.argv = ["script", *arguments]
    run_script(script.main, script.Arguments, "")


@pytest.mark.parametrize(
    ("shape", "method"), [(["model.dropout=0.0"], "repeat"), (LLAMA, "yarn")], ids=["gpt2", "llama"]
)
def test_a_model_is_taken_to_longer_sequences_and_out_again(shape, method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    faults.write_corpus(tmp_path)
    short_loss = faults.run_training(faults.small_config("short", 20, *shape))
    call(export_hf, "model=runs/short", "out=short")
    assert "without a tokenizer: its tokens are a text's bytes in UTF-8" in capsys.readouterr().out

    longer = ["model.dropout=0.0", "seq_len=64", "start.weights=short", f"start.positions={method}"]
    val_loss = faults.run_training(faults.small_config("long", 20, *longer))
    metrics = [json.loads(line) for line in Path("runs/long/metrics.jsonl").read_text().splitlines()]
    # it starts with what the short run had learned, a uniform guess being 5.5, and goes on from there
    assert metrics[0]["val_loss"] == pytest.approx(short_loss, abs=0.3)
    assert val_loss < metrics[0]["val_loss"] - 0.1
    call(export_hf, "model=runs/long", "out=long")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("long")
    ours = load_model("long", AttentionConfig(implementation="sdpa"))
    tokens = torch.randint(257, (1, 64))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)

    folder = next(Path("datasets").glob("text-*"))
    call(
        evaluate_context, "model=runs/long", f"data={folder}", "sequences=2", "scored=8",
        "lengths=[64]", "depths=[0.5]", "prompts=2", "attention=sdpa", "out=context.json",
    )  # fmt: skip
    call(
        evaluate_context, "model=runs/long", f"data={folder}", "sequences=2", "scored=8", "seq_len=32",
        "window=64", "lengths=[64]", "depths=[0.5]", "prompts=1", "attention=sdpa", "out=shorter.json",
    )  # fmt: skip
    monkeypatch.setattr(evaluate_context, "text_rows", lambda *_: pytest.fail("too late"))
    n_tokens = read_manifest(folder)["splits"]["val"]["tokens"]
    given = {"model": "runs/long", "data": str(folder), "out": "new.json", "attention": "sdpa"}
    for lengths, message in (
        ({"seq_len": 65}, "^seq_len must be from 2 to the model's 64 positions, got 65"),
        ({"lengths": [65]}, r"^lengths must be from 64 to the model's 64 positions, got \[65\]"),
        (
            {"seq_len": 8, "lengths": [64]},
            "^lengths must be at most 32, the tokens of 4 windows of 8",
        ),
        (
            {"scored": 33},
            "^scored must be at most 32, half of seq_len=64, got 33: lower it, or raise seq_len",
        ),
        ({"seq_len": 32, "window": 31, "lengths": [64]}, r"^window must be at least seq_len=32, .* got 31"),
        # the last token of a window has a target behind it
        ({"window": n_tokens}, rf"^window must be .* below the {n_tokens} tokens of .* got {n_tokens}"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_context.main(evaluate_context.Arguments(**given, **lengths))
    other = Path(shutil.copytree(folder, "other"))
    manifest = (other / "manifest.json").read_text().replace('"tokenizer": "bytes"', '"tokenizer": "gpt2"')
    (other / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match="data=other is in tokens of gpt2, the model reads those of bytes"):
        evaluate_context.main(evaluate_context.Arguments(model="runs/long", data="other", out="o.json"))
    with pytest.raises(
        ValueError, match="checkpoint=long has its tokenizer in long, where no tokenizer.json"
    ):
        sample.main(sample.Arguments(checkpoint="long"))
    rows = json.loads(Path("context.json").read_text())["rows"]
    shorter = json.loads(Path("shorter.json").read_text())["rows"]
    # the same starts and ends of the same windows, by a model that takes half as many tokens
    for kind, key, most in (("position", "end", 32), ("context", "context", 16)):
        whole = {row[key]: row["loss"] for row in rows if row["kind"] == kind and row[key] <= most}
        half = {row[key]: row["loss"] for row in shorter if row["kind"] == kind and row[key] <= most}
        assert len(half) > 2
        assert half == pytest.approx(whole)
    assert max(row["context"] for row in shorter if row["kind"] == "context") == 24
    assert {row["scored"] for row in rows + shorter} == {8}
    kinds = {row["kind"] for row in rows}
    assert kinds == {"position", "context", "effective_context", "passkey", "key_value"}
    assert all(0.0 < row["loss"] < 20.0 for row in rows if "loss" in row)
    assert Path("context.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_a_model_is_taken_to_longer_sequences_in_stages(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    faults.write_corpus(tmp_path)
    first = faults.small_config("first", 2, *LLAMA)
    faults.run_training(first)
    longer = ["model.dropout=0.0", f"start.positions={method}"]
    faults.run_training(faults.small_config("second", 2, *longer, "seq_len=64", "start.weights=runs/first"))
    call(export_hf, "model=runs/second", "out=second")
    at_once = extended_config(first.model, 128, method)
    for weights in ("second", "runs/second"):
        third = faults.small_config("third", 2, *longer, "seq_len=128", f"start.weights={weights}")
        # a folder holds ntk as the base that it amounts to
        if (weights, method) != ("second", "ntk"):
            assert third.model == at_once
        actual, expected = (frequencies(model.rotary, model.head_dim) for model in (third.model, at_once))
        torch.testing.assert_close(actual, expected)
    faults.run_training(third)
    call(export_hf, "model=runs/third", "out=third")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("third")
    ours = load_model("runs/third", AttentionConfig(implementation="sdpa"))
    tokens = torch.randint(257, (1, 128))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    other = {"linear": "yarn", "ntk": "linear", "yarn": "ntk"}[method]
    refused = ["start.weights=runs/third", f"start.positions={other}", "pose_seq_len=256"]
    with pytest.raises(ValueError, match=f"^start.positions={other}: .* start.positions={method} to extend"):
        faults.small_config("refused", 2, *refused)


def test_text_in_the_tokens_of_a_published_model_goes_in_and_comes_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    faults.write_corpus(tmp_path)
    vocab_size = write_tokenizer(tmp_path / "published")
    tokenizer = ["data.tokenizer=published", "data.folder=datasets/published", "seq_len=64", *LLAMA]
    config = faults.small_config("first", 5, *tokenizer, "export=true", f"model.vocab_size={vocab_size}")
    faults.run_training(config)
    # and once more, at the same end of the same run
    faults.run_training(config)
    call(export_hf, "model=runs/first", "out=exported")
    at_the_end = Path("runs/first/hugging_face")
    assert {path.name for path in at_the_end.iterdir()} == {path.name for path in Path("exported").iterdir()}
    assert (at_the_end / "model.safetensors").read_bytes() == Path("exported/model.safetensors").read_bytes()
    assert (at_the_end / "tokenizer.json").is_file()
    capsys.readouterr()
    call(sample, "checkpoint=exported", "prompt=def", "tokens=5", "attention=sdpa")
    assert capsys.readouterr().out.startswith("def")
    for other in ("gpt2", "bytes"):
        with pytest.raises(
            ValueError, match=f"exported, not those of data.tokenizer={other}: use data.token"
        ):
            faults.run_training(
                faults.small_config("second", 5, "start.weights=exported", f"data.tokenizer={other}")
            )
    # the same tokens from a file that is written otherwise
    file = Path("exported/tokenizer.json")
    file.write_text(json.dumps(json.loads(file.read_text()), indent=8))
    options = ["sequences=1", "scored=8", "lengths=[64]", "depths=[0.5]", "prompts=1", "attention=sdpa"]
    call(evaluate_context, "model=exported", "data=datasets/published", *options)
    assert Path("context.json").is_file()
    # shards belong to a tokenizer's content, a run to its place
    Path("published").rename("moved")
    with pytest.raises(
        ValueError, match="model=runs/first has its tokenizer in published, where no tokenizer"
    ):
        export_hf.main(export_hf.Arguments(model="runs/first", out="again"))
    call(export_hf, "model=runs/first", "out=again", "tokenizer=moved")
    assert Path("again/tokenizer.json").is_file()
    moved = [
        "data.tokenizer=moved",
        "data.folder=datasets/published",
        "start.weights=exported",
        "export=true",
    ]
    faults.run_training(faults.small_config("third", 5, *moved, "model.dropout=0.0"))


def test_an_evaluation_drops_nothing_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    faults.run_training(faults.small_config("run", 2, "model.dropout=0.5", "seq_len=64"))
    folder = next(Path("datasets").glob("text-*"))
    given = {"model": "runs/run", "data": str(folder), "device": "cpu", "precision": "fp32", "prompts": 1}
    for out in ("a.json", "b.json"):
        evaluate_context.main(evaluate_context.Arguments(**given, sequences=1, depths=[0.5], out=out))
    first, second = (json.loads(Path(out).read_text())["rows"] for out in ("a.json", "b.json"))
    assert first == second


def test_an_evaluation_tells_where_there_is_less_text_than_it_is_to_score(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    faults.run_training(faults.small_config("run", 1, "seq_len=64"))
    written, loaders, text_rows = [], [], evaluate_context.text_rows
    monkeypatch.setattr(evaluate_context, "write_result", lambda out, rows, **facts: written.append(facts))
    monkeypatch.setattr(
        evaluate_context,
        "text_rows",
        lambda model, loader, *given: loaders.append(loader) or text_rows(model, loader, *given),
    )
    folder = next(Path("datasets").glob("text-*"))
    given = {"model": "runs/run", "data": str(folder), "device": "cpu", "precision": "fp32", "prompts": 1}
    told = (
        r"(?m)^sequences=100000, but the validation split has \d+ windows of 512 tokens: all of them are sc"
    )
    for sequences in (1, 10**5):
        arguments = evaluate_context.Arguments(
            **given, window=512, sequences=sequences, depths=[0.5], out=f"{sequences}.json"
        )
        evaluate_context.main(arguments)
        assert bool(re.search(told, capsys.readouterr().out)) == (sequences > 1)
    # the windows are the text from its beginning, in its order
    tokens = torch.cat([loaders[0].batch(index)[0][0] for index in range(len(loaders[0]))])
    [shard] = read_manifest(folder)["splits"]["val"]["shards"]
    text = read_shard(folder / shard["file"], tokenizer=shard_mark("bytes"))
    assert len(tokens) >= 2 * 512
    assert tokens.tolist() == text[: len(tokens)].tolist()
    # on no GPU, though there may be one
    assert [facts["n_gpus"] for facts in written] == [0, 0]
