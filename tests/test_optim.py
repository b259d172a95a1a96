from itertools import pairwise

import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig
from train.optim import OptimConfig, build_optimizer, learning_rate


def config(**changes) -> OptimConfig:
    values = {
        "learning_rate": 1.0,
        "final_learning_rate_ratio": 0.1,
        "schedule": "cosine",
        "warmup_steps": 10,
        "decay_fraction": 0.2,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "gradient_clip": 1.0,
    }
    return OptimConfig(**{**values, **changes})


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_rate_warms_up_linearly_and_ends_at_the_final_share(schedule):
    rates = [learning_rate(step, 100, config(schedule=schedule)) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))


def test_cosine_is_half_way_down_in_the_middle():
    # steps 10 .. 110 descend
    assert learning_rate(60, 111, config()) == pytest.approx(0.55)


def test_wsd_is_stable_until_its_last_share():
    rates = [learning_rate(step, 100, config(schedule="wsd")) for step in range(100)]
    assert rates[10:80] == pytest.approx([1.0] * 70)
    assert rates[80] < 1.0
    assert rates[89] == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_runs_shorter_than_the_warmup_never_exceed_the_peak(schedule, steps):
    rates = [learning_rate(step, steps, config(schedule=schedule)) for step in range(steps)]
    assert all(0 < rate <= 1.0 for rate in rates)


def test_matrices_and_embeddings_decay_and_biases_and_norms_do_not():
    model_config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, max_seq_len=8, dropout=0.0)
    gpt = GPT(model_config, AttentionConfig(implementation="sdpa"))
    decaying, others = build_optimizer(gpt, config()).param_groups
    names = {id(p): name for name, p in gpt.named_parameters()}
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in others["params"])
    assert not any(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in decaying["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    assert sum(p.numel() for p in decaying["params"]) == sum(
        p.numel() for p in gpt.parameters() if p.ndim == 2
    )


def test_the_optimizer_is_adamw_with_the_configured_moments():
    layer = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(layer, config(beta1=0.8, beta2=0.9))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
