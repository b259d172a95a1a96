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
from train.weights import is_hugging_face, published_folder

# copied from a tokenizer's folder: its own files, the chat template, and where generation stops
TOKENIZER_FILES = (
    "*token*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
SETTINGS = "tokenizer_config.json"
# inside a run's folder
EXPORT = "hugging_face"


def export(
    model: GPT, tokenizer: str, out: Path, dtype: torch.dtype = torch.float32, *, start: str | None = None
) -> None:
    """Writes a model to the folder out, new or empty; if it cannot be written, nothing is left behind.

    tokenizer: as load_tokenizer takes it; GPT-2's has no files. start: the weights that training began from,
    None if from random ones. Raises ValueError as load_tokenizer, read_model_config and export_pretrained.
    """
    if model.attention.sparse:
        warn(
            f"attention.patterns={list(model.attention.patterns)} are no part of a Hugging Face "
            "folder: read from there, every layer sees every key, as it did not in training"
        )
    ids = token_ids(tokenizer, model.config.vocab_size, start)
    files = {} if tokenizer in TOKENIZERS else tokenizer_files(Path(tokenizer), model.config.max_seq_len)
    export_pretrained(model, out, dtype=dtype, token_ids=ids, files=files)


def tokenizer_files(folder: Path, max_seq_len: int) -> dict[str, bytes]:
    """What is copied from a tokenizer's folder, by path in it.

    transformers truncates texts at model_max_length: an extended model's has room for all its positions.
    """
    paths = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    if SETTINGS in files:
        settings = read_settings(folder / SETTINGS)
        limit = settings.get("model_max_length")
        # absent, or no number: none that could be too small
        if isinstance(limit, int | float) and limit < max_seq_len:
            settings["model_max_length"] = max_seq_len
            files[SETTINGS] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def refuse_to_replace(run: Path) -> None:
    """Raises ValueError if a new run's folder already holds an export, which is not that run's."""
    if (run / EXPORT).exists() and not (run / "checkpoints").exists():
        raise ValueError(
            f"export=true would write to {run / EXPORT}, which no run of this name has made: choose another "
            "name=, move that folder, or use export=false"
        )


def export_run(model: GPT, tokenizer: str, run: Path, start: str | None) -> None:
    """Exports into a run's folder; replaces the files of an earlier export, and leaves what else is there.

    start: as in export.
    """
    out = run / EXPORT
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    export(model, tokenizer, partial, start=start)
    out.mkdir(exist_ok=True)
    old_weights = {path.name for path in weight_files(out)}
    for path in [path for path in partial.rglob("*") if path.is_file()]:
        place = out / path.relative_to(partial)
        place.parent.mkdir(exist_ok=True)
        path.replace(place)
        old_weights.discard(path.name)
    for name in old_weights:
        (out / name).unlink()
    shutil.rmtree(partial)


def token_ids(tokenizer: str, vocab_size: int, start: str | None) -> dict[str, int | list[int] | None]:
    """The tokens that begin and end a text, for config.json: the tokenizer folder's, as far as there are any.

    start: as in export. Before a text a model has seen what the published model has that it comes from, or
    else the end of the text before.
    """
    end = load_tokenizer(tokenizer).end_of_text
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    if tokenizer in TOKENIZERS:
        return ids
    folder, published = Path(tokenizer), published_folder(start)
    ids |= _ids_in(folder, ("eos_token_id", "pad_token_id"), vocab_size)
    if published is not None:
        ids["bos_token_id"] = None
        # the model may be gone by now, or lie elsewhere
        ids |= _ids_in(published if is_hugging_face(published) else folder, ("bos_token_id",), vocab_size)
    return ids


def _ids_in(folder: Path, names: tuple[str, ...], vocab_size: int) -> dict[str, int | list[int]]:
    """Of these entries of a folder's config.json those that name tokens of the model."""
    path, found = folder / "config.json", {}
    theirs = read_settings(path) if path.is_file() else {}
    for name in names:
        given = theirs.get(name)
        numbers = given if isinstance(given, list) else [given]
        known = [number for number in numbers if isinstance(number, int) and number in range(vocab_size)]
        if known:
            found[name] = known if isinstance(given, list) else known[0]
    return found
