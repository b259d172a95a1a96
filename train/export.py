"""A trained model as a Hugging Face folder, with its tokenizer where that has files."""

import shutil
import sys
from pathlib import Path

import torch

from data.tokenizer import TOKENIZERS
from model import GPT
from model.pretrained import export_pretrained


def export(model: GPT, tokenizer: str, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes the folder out, new or empty; tokenizer: as load_tokenizer takes it, GPT-2's has no files.

    Raises ValueError as export_pretrained.
    """
    if model.attention.sparse:
        print(
            f"WARNING: attention.patterns={list(model.attention.patterns)} are no part of a Hugging Face "
            "folder: read from there, every layer sees every key, as it did not in training",
            file=sys.stderr,
        )
    export_pretrained(model, out, dtype=dtype)
    if tokenizer in TOKENIZERS:
        return
    for path in Path(tokenizer).glob("*token*.json"):
        shutil.copy(path, out / path.name)
