"""Sampling from a GPT with a key-value cache."""

import torch
from torch import Tensor

from model.attention import LayerCache
from model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    n_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt and n_new sampled tokens, (B, T + n_new) int64, for a prompt (B, T), T >= 1.

    temperature 0 takes the likeliest token; top_k keeps the k likeliest; top_p keeps the smallest set of
    likeliest tokens that holds probability p (Holtzman et al., arXiv:1904.09751). The model's mode is
    left as it was found. Raises ValueError if the whole exceeds the model's positions.
    """
    batch, prompt_len = tokens.shape
    capacity = prompt_len + n_new
    _check(model, prompt_len, n_new, temperature, top_k, top_p)
    was_training = model.training
    model.eval()
    try:
        caches = _empty_caches(model, batch, capacity, tokens.device)
        new, positions = tokens, torch.arange(prompt_len, device=tokens.device)
        for position in range(prompt_len, capacity):
            logits = model.next_token_logits(new, positions, caches).float()
            new = _sample(logits, temperature, top_k, top_p, generator)
            tokens = torch.cat((tokens, new), dim=1)
            positions = torch.tensor([position], device=tokens.device)
    finally:
        model.train(was_training)
    return tokens


def _empty_caches(model: GPT, batch: int, capacity: int, device: torch.device) -> list[LayerCache]:
    config = model.config
    shape = (batch, capacity, config.n_kv_head, config.head_dim)
    dtype = model.token_embedding.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return [LayerCache(zeros(), zeros()) for _ in range(config.n_layer)]


def _sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token id a row, (B, 1), from logits (B, V) float32."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    values, ids = (logits / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        values, ids = values[:, :top_k], ids[:, :top_k]
    probabilities = values.softmax(dim=-1)
    if top_p is not None:
        # the mass before a token decides: the likeliest one always stays
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))


def _check(
    model: GPT, prompt_len: int, n_new: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    limit = model.config.max_seq_len
    if prompt_len < 1:
        raise ValueError("tokens must hold at least one token a row to start from, got none")
    if n_new < 0:
        raise ValueError(f"n_new must be at least 0, got {n_new}")
    if prompt_len + n_new > limit:
        raise ValueError(
            f"{prompt_len} prompt tokens and n_new={n_new} exceed the model's {limit} positions: "
            f"n_new={max(limit - prompt_len, 0)} fits"
        )
    if temperature < 0.0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], or None for all tokens, got {top_p}")
