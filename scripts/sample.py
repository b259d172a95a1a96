"""Continues a prompt with a trained model: python -m scripts.sample run=runs/NAME 'prompt=import '"""

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data.tokenizer import load_tokenizer
from model import GPT, AttentionConfig, ModelConfig
from scripts.arguments import argument, run_script
from train.checkpoint import load_tensors, newest_checkpoint, read_checkpoint, verify_checkpoint
from train.sample import SampleConfig, sample_text
from train.step import autocast_context


@dataclass
class Arguments:
    run: str = argument("", "run folder: its newest checkpoint is read")
    checkpoint: str = argument("", "a checkpoint's folder, in place of run")
    prompt: str = argument("def", "text to continue")
    tokens: int = argument(200, "tokens to generate")
    samples: int = argument(1, "how many continuations")
    temperature: float = argument(0.8, "0 takes the likeliest token")
    top_k: int | None = argument(50, "draw from the k likeliest tokens; null for all")
    top_p: float | None = argument(None, "draw from the likeliest tokens that hold this probability")
    seed: int = argument(1, "of the first sample; the next ones count up")
    device: str = argument("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    attention: str = argument("sdpa", "flash (on a GPU), sdpa or reference")


def main(arguments: Arguments) -> None:
    path = _find(arguments)
    config = read_checkpoint(path)["config"]
    model_config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), config["model"]))
    model = GPT(model_config, AttentionConfig(implementation=arguments.attention))
    load_tensors(path, model)
    model.to(arguments.device)
    tokenizer = load_tokenizer(config["data"]["tokenizer"])
    settings = SampleConfig(
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
    )
    for index in range(arguments.samples):
        with autocast_context(arguments.device, config["precision"]):
            text = sample_text(model, tokenizer, settings, arguments.seed + index)
        print(f"--- sample {index + 1} ---\n{text}")


def _find(arguments: Arguments) -> Path:
    if bool(arguments.run) == bool(arguments.checkpoint):
        raise ValueError("give either run=runs/NAME or checkpoint=FOLDER")
    if arguments.checkpoint:
        verify_checkpoint(Path(arguments.checkpoint))
        return Path(arguments.checkpoint)
    folder = Path(arguments.run) / "checkpoints"
    newest = newest_checkpoint(folder)
    if newest is None:
        raise ValueError(f"run={arguments.run}: {folder} holds no checkpoint")
    return newest


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
