"""Which trained model a script runs, where and how, checked before the model is read."""

from pathlib import Path

import torch

from data.tokenizer import TOKENIZERS, is_tokenizer, load_tokenizer, same_tokens
from model.attention import IMPLEMENTATIONS
from train.config import DEVICES, PRECISIONS
from train.overrides import one_of
from train.weights import locate, tokenizer_name


def check_inference(device: str, precision: str, attention: str, key: str = "attention") -> None:
    """Raises ValueError for unknown values, and for what this machine cannot run.

    attention: "" leaves the choice to the model. key: the name of the argument that gave it.
    """
    one_of("precision", precision, PRECISIONS)
    one_of("device", device, DEVICES)
    if attention:
        one_of(key, attention, IMPLEMENTATIONS)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU: use device=cpu")
    if attention == "flash" and device != "cuda":
        raise ValueError(f"{key}=flash runs on a GPU, got device={device}: use {key}=sdpa")


def find_model(key: str, source: str) -> Path:
    """The checkpoint or Hugging Face folder that source names; for a run, its newest checkpoint.

    Call it once: each call reports the damaged checkpoints that it skips, and a run may still be writing new
    ones. Raises ValueError, naming the argument key, for a source that holds no model.
    """
    if not source:
        raise ValueError(f"{key} must name a run's folder, a checkpoint or a Hugging Face folder, got ''")
    try:
        return locate(source)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def model_tokenizer(model: str, place: Path, given: str) -> str:
    """The name of the tokenizer for the model at place: the given one, or else the model's own.

    model: the argument that names the model, as KEY=VALUE. Raises ValueError for a tokenizer that does not
    exist, and for one whose tokens differ from those of the model's own, if the latter can be found.
    """
    own = tokenizer_name(place)
    if not is_tokenizer(given or own):
        choices = f"tokenizer={', '.join(TOKENIZERS)} or a folder with tokenizer.json"
        if given:
            raise ValueError(f"tokenizer={given} holds no tokenizer.json: give {choices}")
        raise ValueError(f"{model} has its tokenizer in {own}, where no tokenizer.json is: give {choices}")
    if given and is_tokenizer(own) and not same_tokens(load_tokenizer(given), load_tokenizer(own)):
        raise ValueError(
            f"tokenizer={given} gives other tokens than {own}, which {model} reads: leave it out"
        )
    return given or own
