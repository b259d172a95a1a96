import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig
from model.extend import extended_config, extended_state
from model.rope import RotaryConfig

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "max_seq_len": 32, "dropout": 0.0}
LEARNED = ModelConfig(**SIZES)
ROTARY = ModelConfig(**SIZES, rotary=RotaryConfig(base=10_000.0), norm="rms")


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
        (extended_config(ROTARY, 40, "ntk"), "yarn", None, r"scaled already \(ntk, factor 1.25\), use start"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(config, method, base, message):
    with pytest.raises(ValueError, match=message):
        extended_config(config, 64, method, base)
