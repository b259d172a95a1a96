"""Exports a trained model as a Hugging Face folder, with its tokenizer if that has files."""

import json
import shutil
from pathlib import Path

import torch

from data.tokenizer import TOKENIZERS, load_tokenizer
from data.tokenizer_json import read_settings
from model import GPT
from model.pretrained import export_pretrained, weight_files
from train.terminal import warn

# copied from a tokenizer's folder: its own files, the chat template, and where generation stops
TOKENIZER_FILES = (
    "*token*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# inside a run's folder
EXPORT = "hugging_face"


def export(model: GPT, tokenizer: str, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a model to the folder out, new or empty.

    tokenizer: as load_tokenizer takes it; GPT-2's has no files. Raises ValueError as load_tokenizer and
    export_pretrained.
    """
    if model.attention.sparse:
        warn(
            f"attention.patterns={list(model.attention.patterns)} are no part of a Hugging Face "
            "folder: read from there, every layer sees every key, as it did not in training"
        )
    export_pretrained(model, out, dtype=dtype, token_ids=token_ids(tokenizer))
    if tokenizer in TOKENIZERS:
        return
    for pattern in TOKENIZER_FILES:
        for path in Path(tokenizer).glob(pattern):
            shutil.copy(path, out / path.name)
    raise_token_limit(out / "tokenizer_config.json", model.config.max_seq_len)


def raise_token_limit(path: Path, max_seq_len: int) -> None:
    """Gives a tokenizer room for an extended model: transformers truncates texts at model_max_length."""
    if not path.is_file():
        return
    settings = read_settings(path)
    limit = settings.get("model_max_length")
    # absent, or no number: none that could be too small
    if isinstance(limit, int | float) and limit < max_seq_len:
        settings["model_max_length"] = max_seq_len
        # the copy of a read-only file cannot be written to
        path.unlink()
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_to_replace(run: Path) -> None:
    """Raises ValueError if a new run's folder already holds an export, which is not that run's."""
    if (run / EXPORT).exists() and not (run / "checkpoints").exists():
        raise ValueError(
            f"export=true would write to {run / EXPORT}, which no run of this name has made: choose another "
            "name=, move that folder, or use export=false"
        )


def export_run(model: GPT, tokenizer: str, run: Path) -> None:
    """Exports into a run's folder; replaces the files of an earlier export, and leaves what else is there."""
    out = run / EXPORT
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    export(model, tokenizer, partial)
    out.mkdir(exist_ok=True)
    old_weights = {path.name for path in weight_files(out)}
    for path in partial.iterdir():
        path.replace(out / path.name)
        old_weights.discard(path.name)
    for name in old_weights:
        (out / name).unlink()
    partial.rmdir()


def token_ids(tokenizer: str) -> dict[str, int | list[int] | None]:
    """The tokens that begin and end a text, for config.json: the tokenizer folder's, if it has any."""
    end = load_tokenizer(tokenizer).end_of_text
    ids = {
        "bos_token_id": end if tokenizer in TOKENIZERS else None,
        "eos_token_id": end,
        "pad_token_id": None,
    }
    config = Path(tokenizer, "config.json")
    if tokenizer not in TOKENIZERS and config.is_file():
        theirs = read_settings(config)
        ids |= {name: theirs[name] for name in TOKEN_IDS if theirs.get(name) is not None}
    return ids
