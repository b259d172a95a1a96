"""Where and how a script runs a trained model, checked before the model is read."""

import torch

from data.tokenizer import TOKENIZERS, is_tokenizer, load_tokenizer, same_tokens
from model.attention import IMPLEMENTATIONS
from train.config import DEVICES, PRECISIONS, one_of
from train.weights import locate, tokenizer_name


def check_inference(device: str, precision: str, attention: str) -> None:
    """Raises ValueError for a word that is none of ours, and for what this machine cannot run.

    attention: "" where the model decides.
    """
    one_of("precision", precision, PRECISIONS)
    one_of("device", device, DEVICES)
    if attention:
        one_of("attention", attention, IMPLEMENTATIONS)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU: use device=cpu")
    if attention == "flash" and device != "cuda":
        raise ValueError(f"attention=flash runs on a GPU, got device={device}: use attention=sdpa")


def check_model(key: str, source: str) -> None:
    """Raises ValueError, which names the argument, for a source that holds no model."""
    if not source:
        raise ValueError(f"{key} must name a run's folder, a checkpoint or a Hugging Face folder, got ''")
    try:
        locate(source)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def model_tokenizer(key: str, source: str, given: str) -> str:
    """The name of the tokenizer that was given for the model in source, or of its own where none was.

    key: the argument that names source. Raises ValueError for one that is not there, and for other tokens
    than the model's own where those can be found.
    """
    own = tokenizer_name(source)
    if not is_tokenizer(given or own):
        choices = f"tokenizer={', '.join(TOKENIZERS)} or a folder with tokenizer.json"
        if given:
            raise ValueError(f"tokenizer={given} holds no tokenizer.json: give {choices}")
        raise ValueError(
            f"{key}={source} has its tokenizer in {own}, where no tokenizer.json is: give {choices}"
        )
    if given and is_tokenizer(own) and not same_tokens(load_tokenizer(given), load_tokenizer(own)):
        raise ValueError(
            f"tokenizer={given} gives other tokens than {own}, which {key}={source} reads: leave it out"
        )
    return given or own
