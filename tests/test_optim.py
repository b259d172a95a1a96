from itertools import pairwise

import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig
from tests.test_config import composed
from train.checkpoint import run_tensors
from train.config import parse
from train.optim import OptimConfig, build_optimizer, learning_rate
from train.step import update


def config(**changes) -> OptimConfig:
    values = {
        "algorithm": "adamw",
        "learning_rate": 1.0,
        "final_learning_rate_ratio": 0.1,
        "schedule": "cosine",
        "warmup_steps": 10,
        "decay_fraction": 0.2,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "momentum": 0.95,
        "gradient_clip": 1.0,
    }
    return OptimConfig(**{**values, **changes})


SHARES = ("final_learning_rate_ratio", "decay_fraction")
MOMENTS = ("beta1", "beta2", "momentum")


def test_numbers_that_are_no_rate_share_or_moment_are_refused_by_name():
    wrong = {name: (-1.0, float("inf"), float("nan")) for name in ("learning_rate", "weight_decay")}
    wrong |= {"gradient_clip": (-1.0, float("inf")), "warmup_steps": (-1,)}
    wrong |= dict.fromkeys(SHARES, (-0.1, 1.1)) | dict.fromkeys(MOMENTS, (-0.1, 1.0))
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^optim.{name} must be .*, got {value}$"):
                config(**{name: value})
    for name in (*SHARES, *MOMENTS):
        config(**{name: 0.0})
    config(final_learning_rate_ratio=1.0, decay_fraction=1.0)


def test_a_warm_up_may_take_all_steps_where_nothing_decays_behind_it():
    config(schedule="wsd", decay_fraction=0.0, warmup_steps=99).check_steps(10)
    config(schedule="cosine", warmup_steps=99).check_steps(10)
    # the last step of all is the first behind the warm-up
    assert learning_rate(10, 11, config()) == 1.0
    assert learning_rate(9, 10, config()) == 1.0


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_frozen_parameters_are_left_to_no_optimizer(algorithm):
    gpt = small()
    frozen = [gpt.blocks[0].mlp.expand.weight, gpt.token_embedding.weight, gpt.final_norm.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    optimizer = build_optimizer(gpt, config(algorithm=algorithm))
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert taken == {id(p) for p in gpt.parameters() if p.requires_grad}


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


def test_wsd_decays_in_the_whole_number_of_steps_that_is_nearest_to_its_share():
    # 0.29 * 100 is a little below 29 in floating point
    rates = [learning_rate(step, 100, config(schedule="wsd", decay_fraction=0.29)) for step in range(100)]
    assert [rate < 1.0 for rate in rates[10:]] == [False] * 61 + [True] * 29


def test_wsd_without_decay_stays_at_its_peak_to_the_end():
    rates = [learning_rate(step, 100, config(schedule="wsd", decay_fraction=0.0)) for step in range(100)]
    assert rates[9:] == [1.0] * 91


def test_wsd_that_would_decay_before_its_warm_up_is_over_is_refused_with_what_fits():
    wsd = ["optim.schedule=wsd", "total_tokens=100_000", "tokens_per_step=1024", "tokens_per_microbatch=1024"]
    message = (
        "of 98 steps optim.warmup_steps=50 warm up, and optim.decay_fraction=0.8 decays from step 21 on: "
        "use optim.warmup_steps=20 or fewer"
    )
    with pytest.raises(ValueError, match=message):
        parse(composed(*wsd, "optim.warmup_steps=50", "optim.decay_fraction=0.8"))
    with pytest.raises(ValueError, match=r"of 1 step .* step 1 on: use optim\.warmup_steps=0, a smaller"):
        parse(composed(*wsd, "total_tokens=1024", "optim.warmup_steps=50"))
    optim = parse(composed(*wsd, "optim.warmup_steps=20", "optim.decay_fraction=0.8")).optim
    rates = [learning_rate(step, 98, optim) / optim.learning_rate for step in range(98)]
    assert max(abs(later - earlier) for earlier, later in pairwise(rates)) <= 0.05 + 1e-9
    for fits in (["optim.decay_fraction=0"], ["optim.schedule=cosine"]):
        parse(composed(*wsd, "optim.warmup_steps=98", *fits))


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_runs_shorter_than_the_warmup_never_exceed_the_peak(schedule, steps):
    rates = [learning_rate(step, steps, config(schedule=schedule)) for step in range(steps)]
    assert all(0 < rate <= 1.0 for rate in rates)


def small(**changes) -> GPT:
    values = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "max_seq_len": 8, "dropout": 0.0}
    return GPT(ModelConfig(**{**values, **changes}), AttentionConfig(implementation="sdpa"))


def test_matrices_and_embeddings_decay_and_biases_and_norms_do_not():
    gpt = small()
    decaying, others = build_optimizer(gpt, config(weight_decay=0.3)).param_groups
    names = {id(p): name for name, p in gpt.named_parameters()}
    assert decaying["weight_decay"] == 0.3
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


@pytest.mark.parametrize("tied_head", [True, False])
def test_muon_takes_the_matrices_of_the_layers_and_adamw_everything_else(tied_head):
    gpt = small(tied_head=tied_head)
    matrices, decaying, others = build_optimizer(gpt, config(algorithm="muon")).param_groups
    names = {id(p): name for name, p in gpt.named_parameters()}
    assert {names[id(p)] for p in matrices["params"]} == {
        f"blocks.{n}.{layer}.weight"
        for n in range(2)
        for layer in ("attention.qkv", "attention.projection", "mlp.expand", "mlp.projection")
    }
    tables = ["token_embedding", "position_embedding"] + ([] if tied_head else ["head"])
    assert {names[id(p)] for p in decaying["params"]} == {f"{name}.weight" for name in tables}
    assert all(p.ndim == 1 for p in others["params"])
    assert (matrices["weight_decay"], decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.1, 0.0)
    assert sum(len(group["params"]) for group in (matrices, decaying, others)) == len(names)


def train_step(gpt: GPT, optimizer, limit: float = float("inf")) -> float:
    tokens = torch.arange(72).view(8, 9) % 7
    loss = gpt(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    update(optimizer, torch.amp.GradScaler("cpu", enabled=False), 0.02, 1.0, limit)
    return loss.item()


def test_muon_is_torch_s_own_on_each_matrix():
    gpt, other = small(), small()
    other.load_state_dict(gpt.state_dict())
    # other than torch's own defaults
    options = {"weight_decay": 0.3, "momentum": 0.8}
    optimizer = build_optimizer(gpt, config(algorithm="muon", **options))
    matrices = [p for p in other.blocks.parameters() if p.ndim == 2]
    torchs = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(2):
        train_step(gpt, optimizer)
        tokens = torch.arange(72).view(8, 9) % 7
        other(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        torchs.step()
        # one matrix suffices: the others move by AdamW
        assert torch.equal(matrices[0], gpt.blocks[0].attention.qkv.weight)
        other.load_state_dict(gpt.state_dict())
        other.zero_grad()


def test_muon_learns():
    gpt = small()
    optimizer = build_optimizer(gpt, config(algorithm="muon"))
    losses = [train_step(gpt, optimizer) for _ in range(30)]
    assert losses[0] > 4.0
    assert losses[-1] < 0.5


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_over_the_limit_leaves_weights_and_state_as_they_were(algorithm, before):
    gpt = small()
    optimizer = build_optimizer(gpt, config(algorithm=algorithm))
    for _ in range(before):
        train_step(gpt, optimizer)
    tensors = {name: value.clone() for name, value in run_tensors(gpt, optimizer).items()}
    gpt.blocks[0].mlp.expand.weight.grad = torch.full_like(gpt.blocks[0].mlp.expand.weight, float("nan"))
    train_step(gpt, optimizer)
    after = run_tensors(gpt, optimizer)
    for name, value in tensors.items():
        assert torch.equal(after[name], value), name
    assert all(value.isfinite().all() for value in after.values())


def test_muon_takes_a_loss_scale_and_skips_what_overflows():
    gpt = small()
    optimizer = build_optimizer(gpt, config(algorithm="muon"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    tokens = torch.arange(72).view(8, 9) % 7
    before = gpt.blocks[0].mlp.expand.weight.detach().clone()
    for factor, moves in ((float("inf"), False), (1.0, True)):
        scaler.scale(gpt(tokens[:, :-1], tokens[:, 1:]) * factor).backward()
        norm = update(optimizer, scaler, 0.02, 1.0, float("inf"))
        assert torch.equal(before, gpt.blocks[0].mlp.expand.weight) != moves
    # unscaled
    assert norm < 100
    assert scaler.get_scale() == 2.0**9
