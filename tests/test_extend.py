import math
import re
from dataclasses import replace

import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig
from model.extend import extended_config, extended_state
from model.rope import RotaryConfig, frequencies

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "max_seq_len": 32, "dropout": 0.0}
LEARNED = ModelConfig(**SIZES)
ROTARY = ModelConfig(**SIZES, rotary=RotaryConfig(base=10_000.0), norm="rms")
YARN = {"base": 10_000.0, "scaling": "yarn", "factor": 2.0, "original_seq_len": 32}
LLAMA3 = {**YARN, "scaling": "llama3", "factor": 8.0}


def extended(config: ModelConfig, max_seq_len: int, method: str) -> tuple[GPT, GPT]:
    """A model and its extension, with the same weights."""
    attention = AttentionConfig(implementation="reference")
    old, new = GPT(config, attention), GPT(extended_config(config, max_seq_len, method), attention)
    new.load_state_dict(extended_state(old.state_dict(), max_seq_len, method))
    return old.eval(), new.eval()


@pytest.mark.parametrize(("config", "method"), [(LEARNED, "repeat"), (ROTARY, "none")])
def test_methods_that_keep_near_positions_change_nothing_on_short_sequences(config, method):
    old, new = extended(config, 100, method)
    tokens = torch.randint(50, (2, 32))
    torch.testing.assert_close(new(tokens), old(tokens))
    assert new(torch.randint(50, (1, 100))).shape == (1, 100, 50)


@pytest.mark.parametrize(("config", "method"), [(LEARNED, "interpolate"), (ROTARY, "linear")])
def test_methods_that_squeeze_positions_see_the_old_ones_further_apart(config, method):
    old, new = extended(config, 64 if method == "linear" else 63, method)
    tokens = torch.randint(50, (2, 32))
    spread = torch.arange(0, 64, 2)
    torch.testing.assert_close(new(tokens, positions=spread), old(tokens))


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_a_scaling_knows_how_far_it_reaches(method):
    config = extended_config(ROTARY, 256, method)
    rotary = config.rotary
    assert (rotary.scaling, rotary.factor, rotary.original_seq_len) == (method, 8.0, 32)
    assert config.max_seq_len == 256


def test_a_model_with_the_room_stays_as_it_is():
    assert extended_config(ROTARY, 32, "yarn") == ROTARY


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_a_model_with_the_room_stays_as_it_is_when_scaled_too(method):
    scaled = extended_config(ROTARY, 128, "linear")
    for max_seq_len in (64, 128):
        assert extended_config(scaled, max_seq_len, method) == scaled


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
@pytest.mark.parametrize("base", [None, 500_000.0])
def test_a_model_extended_twice_is_the_one_extended_at_once(method, base):
    twice = extended_config(extended_config(ROTARY, 100, method), 512, method, base)
    assert twice == extended_config(ROTARY, 512, method, base)
    assert (twice.rotary.factor, twice.rotary.original_seq_len) == (16.0, 32)
    frequency, attention_factor = frequencies(twice.rotary, 8)
    known = RotaryConfig(base=base or 10_000.0, scaling=method, factor=16.0, original_seq_len=32)
    assert torch.equal(frequency, frequencies(known, 8)[0])
    # the temperature is that of the whole way
    assert attention_factor == (0.1 * math.log(16.0) + 1.0 if method == "yarn" else 1.0)


def test_a_further_extension_keeps_the_bounds_of_the_first():
    bounds = {"beta_fast": 16.0, "beta_slow": 2.0}
    config = replace(ROTARY, rotary=RotaryConfig(**{**YARN, **bounds}), max_seq_len=64)
    further = extended_config(config, 256, "yarn").rotary
    assert further == RotaryConfig(**{**YARN, **bounds, "factor": 8.0})


def test_positions_that_were_added_without_scaling_count_in_the_next_extension():
    unscaled = extended_config(extended_config(ROTARY, 64, "yarn"), 256, "none")
    assert unscaled.rotary.factor == 2.0
    assert extended_config(unscaled, 512, "yarn") == extended_config(ROTARY, 512, "yarn")


def test_a_larger_base_is_a_method_of_its_own():
    config = extended_config(ROTARY, 64, "none", rotary_base=500_000.0)
    assert config.rotary == RotaryConfig(base=500_000.0)


@pytest.mark.parametrize(
    ("config", "method", "base", "message"),
    [
        (LEARNED, "yarn", None, "start.positions=yarn is .* use start.positions=repeat or interpolate"),
        (LEARNED, "repeat", 1e6, "start.rotary_base=1000000.0: the model has learned positions"),
        (ROTARY, "repeat", None, "start.positions=repeat is .* use start.positions=none or linear or"),
        (ROTARY, "yarn", 1.0, "start.rotary_base must be above 1 for positions scaled by yarn, got 1.0"),
        (ROTARY, "none", 0.0, "base must be at least 1 and finite, got 0.0"),
        (extended_config(ROTARY, 40, "yarn"), "none", 1.0, "start.rotary_base must be above 1 for positions"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(config, method, base, message):
    with pytest.raises(ValueError, match=message):
        extended_config(config, 64, method, base)


@pytest.mark.parametrize(
    ("rotary", "method", "reason", "more"),
    [
        (
            {**YARN, "scaling": "ntk"}, "yarn",
            "(ntk, factor 2.0) and two scalings do not mix", ", or start.positions=ntk to extend it",
        ),
        (
            LLAMA3, "yarn",
            "(llama3, factor 8.0) in bands of its own (low_freq_factor, high_freq_factor), which yarn lacks",
            ", with a larger start.rotary_base to reach further",
        ),
        (
            {**YARN, "attention_factor": 1.5}, "yarn",
            "(yarn, factor 2.0) with an attention factor of its own, 1.5, for that factor alone", "",
        ),
        (
            {**YARN, "scaling": "linear", "original_seq_len": None}, "linear",
            "(linear, factor 2.0) from an unknown number of positions",
            ", or add original_max_position_embeddings to its config.json",
        ),
        (
            {**YARN, "factor": 8.0}, "yarn",
            "(yarn, factor 8.0) from 32 positions, which reaches 256", "",
        ),
    ],
    ids=["another", "llama3", "attention_factor", "unknown", "within reach"],
)  # fmt: skip
def test_a_scaling_that_cannot_go_on_is_refused_by_name_and_ways_out(rotary, method, reason, more):
    config = replace(ROTARY, rotary=RotaryConfig(**rotary))
    message = f"start.positions={method}: the model's positions are scaled already {reason}: "
    with pytest.raises(
        ValueError, match=f"^{re.escape(message)}use start.positions=none to go on with that{more}$"
    ):
        extended_config(config, 64, method)
    onward = extended_config(config, 64, "none")
    assert (onward.rotary, onward.max_seq_len) == (config.rotary, 64)


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "yarn"])
def test_another_base_takes_no_positions_from_a_model(method):
    config = extended_config(ROTARY, 16, method, 500_000.0)
    assert (config.max_seq_len, config.rotary.base) == (32, 500_000.0)


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_a_scaled_model_goes_on_at_its_own_length_with_another_base(method):
    scaled = extended_config(ROTARY, 128, method)
    again = extended_config(scaled, 128, method, 500_000.0)
    assert (again.rotary.factor, again.rotary.base) == (4.0, 500_000.0)
