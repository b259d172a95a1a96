from dataclasses import replace

import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig, generate
from model.rope import RotaryConfig


@pytest.fixture
def gpt() -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, max_seq_len=40, dropout=0.1)
    model = GPT(config, AttentionConfig(implementation="sdpa"))
    # far from uniform, so that the likeliest token is beyond rounding
    torch.nn.init.normal_(model.token_embedding.weight, std=0.15)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 1, "rotary": RotaryConfig(base=100.0), "norm": "rms"}])
def test_the_cache_gives_the_same_tokens_as_no_cache(gpt, implementation, changes):
    if changes:
        weight = gpt.token_embedding.weight
        gpt = GPT(replace(gpt.config, **changes), AttentionConfig(implementation=implementation))
        gpt.token_embedding.weight = weight
    for block in gpt.blocks:
        block.attention.implementation = implementation
    prompt = torch.randint(100, (3, 7))
    cached = generate(gpt, prompt, 20, temperature=0.0)
    tokens = prompt
    gpt.eval()
    for _ in range(20):
        tokens = torch.cat((tokens, gpt(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(cached, tokens)


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(gpt):
    prompt = torch.zeros(1, 1, dtype=torch.long)
    samples = [generate(gpt, prompt, 30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_top_k_draws_from_the_k_likeliest_only(gpt):
    prompt = torch.zeros(200, 1, dtype=torch.long)
    gpt.eval()
    allowed = gpt(prompt[:1])[0, -1].topk(3).indices
    drawn = generate(gpt, prompt, 1, top_k=3, temperature=5.0)[:, -1].unique()
    assert set(drawn.tolist()) == set(allowed.tolist())


def test_top_p_keeps_the_smallest_set_that_holds_p(gpt):
    prompt = torch.zeros(300, 1, dtype=torch.long)
    gpt.eval()
    probabilities, ids = gpt(prompt[:1])[0, -1].softmax(-1).sort(descending=True)
    n = int((probabilities.cumsum(0) < 0.5).sum()) + 1
    drawn = generate(gpt, prompt, 1, top_p=0.5)[:, -1].unique()
    assert set(drawn.tolist()) <= set(ids[:n].tolist())
    assert len(drawn) > 1 or n == 1


def test_a_tiny_top_p_is_greedy(gpt):
    prompt = torch.randint(100, (4, 5))
    greedy = generate(gpt, prompt, 10, temperature=0.0)
    assert torch.equal(generate(gpt, prompt, 10, top_p=1e-6), greedy)


def test_generation_leaves_the_training_mode_as_it_was(gpt):
    gpt.train()
    generate(gpt, torch.zeros(1, 1, dtype=torch.long), 2)
    assert gpt.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_new": 36}, "5 prompt tokens and n_new=36 exceed the model's 40 positions: n_new=35 fits"),
        ({"n_new": -1}, "n_new must be at least 0, got -1"),
        ({"n_new": 1, "temperature": -1.0}, "temperature must be at least 0"),
        ({"n_new": 1, "top_k": 0}, "top_k must be at least 1"),
        ({"n_new": 1, "top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_impossible_requests_are_refused(gpt, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(gpt, torch.zeros(1, 5, dtype=torch.long), **arguments)
