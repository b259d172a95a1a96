"""Where and how a script runs a trained model, checked before the model is read."""

import torch

from model.attention import IMPLEMENTATIONS
from train.config import DEVICES, PRECISIONS, one_of
from train.weights import locate


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
