"""A sample of text from the model in training or from a checkpoint."""

from dataclasses import dataclass

import torch

from data.tokenizer import Tokenizer
from model import GPT, generate


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    # the sample continues this text; empty: it starts a new document
    prompt: str
    # tokens to generate; fewer if the model has no more positions; 0 for no sample
    tokens: int
    # 0 takes the likeliest token each time
    temperature: float
    # null for all tokens
    top_k: int | None
    top_p: float | None

    def __post_init__(self):
        if self.tokens < 0:
            raise ValueError(f"sample.tokens must be at least 0, got {self.tokens}")
        if self.temperature < 0:
            raise ValueError(f"sample.temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sample.top_k must be at least 1 or null, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"sample.top_p must be in (0, 1] or null, got {self.top_p}")


def sample_text(model: GPT, tokenizer: Tokenizer, config: SampleConfig, seed: int) -> str:
    """The prompt and its continuation, up to the end of the document or of the model's positions."""
    device = model.token_embedding.weight.device
    # a document of the training text begins after the end of the one before
    prompt = [tokenizer.end_of_text, *map(int, tokenizer.encode(config.prompt))]
    n_new = min(config.tokens, model.config.max_seq_len - len(prompt))
    if n_new < 0:
        raise ValueError(
            f"sample.prompt has {len(prompt)} tokens, the model {model.config.max_seq_len} positions: "
            "shorten it"
        )
    ids = generate(
        model,
        torch.tensor([prompt], device=device),
        n_new,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=torch.Generator(device).manual_seed(seed),
    )[0, 1:].tolist()
    generated = ids[len(prompt) - 1 :]
    if tokenizer.end_of_text in generated:
        ids = ids[: len(prompt) - 1 + generated.index(tokenizer.end_of_text)]
    return tokenizer.decode(ids)
