import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.rope import RotaryConfig, extend_learned_positions, frequencies, rotate, rotation

HEAD_DIM, ORIGINAL = 64, 2048
YARN = {"scaling": "yarn", "factor": 2.0, "original_seq_len": ORIGINAL}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def theirs(base: float, scaling: dict) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_theta": base, **scaling},
    )
    if scaling["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    length = 8 * ORIGINAL if scaling["rope_type"] == "dynamic" else None
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)


# with 2 the ramp of yarn begins behind its end, and with 100 it would end behind the last pair
@pytest.mark.parametrize("base", [2.0, 100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize(
    ("ours", "scaling"),
    [
        ({}, {"rope_type": "default"}),
        ({"scaling": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        # their dynamic scaling with factor 1, at eight times the length, is the static one with factor 8
        ({"scaling": "ntk", "factor": 8.0}, {"rope_type": "dynamic", "factor": 1.0}),
        (
            {"scaling": "yarn", "factor": 16.0, "original_seq_len": ORIGINAL},
            {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL},
        ),
        (
            {"scaling": "llama3", "factor": 8.0, "original_seq_len": 512, **LLAMA3},
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, **LLAMA3},
        ),
    ],
)
def test_every_scaling_has_the_frequencies_of_transformers(base, ours, scaling):
    expected, expected_factor = theirs(base, scaling)
    actual, factor = frequencies(RotaryConfig(base=base, **ours), HEAD_DIM)
    torch.testing.assert_close(actual.float(), expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize(
    "values",
    [{"base": 1.0}, {"base": 1.0, "scaling": "ntk"}, {**YARN, "base": 1.0 + 1e-9, "original_seq_len": 1}],
)
def test_the_least_values_that_are_taken_give_finite_frequencies(values):
    frequency, factor = frequencies(RotaryConfig(**values), HEAD_DIM)
    assert frequency.isfinite().all()
    assert math.isfinite(factor)


def test_scores_depend_on_the_distance_alone_even_at_a_million_tokens():
    q, k = torch.randn(2, 1, 1, 1, HEAD_DIM)
    config = RotaryConfig(base=10_000.0)

    def score(i: int, j: int) -> torch.Tensor:
        turned = (rotate(x, *rotation(config, HEAD_DIM, torch.tensor([at]))) for x, at in ((q, i), (k, j)))
        return torch.linalg.vecdot(*turned)

    torch.testing.assert_close(score(1_048_575, 1_048_570), score(5, 0), rtol=1e-5, atol=1e-5)
    assert abs(score(5, 0) - score(6, 0)) > 1e-3


def test_repeated_positions_start_over():
    weight = torch.randn(4, 3)
    assert torch.equal(extend_learned_positions(weight, 10, "repeat"), weight[torch.arange(10) % 4])


def test_interpolated_positions_keep_their_ends_and_their_order():
    weight = torch.arange(4.0)[:, None]
    stretched = extend_learned_positions(weight, 7, "interpolate")
    torch.testing.assert_close(stretched[:, 0], torch.arange(7) / 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scaling": "longrope"}, "model.rotary.scaling must be one of none, linear, ntk, yarn, llama3"),
        ({"scaling": "yarn"}, "model.rotary.scaling=yarn needs model.rotary.original_seq_len"),
        ({"factor": 0.5}, "model.rotary.factor must be at least 1 and finite, got 0.5"),
        ({"factor": math.inf}, "model.rotary.factor must be at least 1 and finite, got inf"),
        ({"base": math.nan}, "model.rotary.base must be at least 1 and finite, got nan"),
        ({"base": 0.0}, "model.rotary.base must be at least 1 and finite, got 0.0"),
        ({**YARN, "base": 1.0}, "model.rotary.base must be above 1 with model.rotary.scaling=yarn, got 1.0"),
        ({**YARN, "original_seq_len": 0}, "model.rotary.original_seq_len must be at least 1 or null, got 0"),
        ({**YARN, "beta_fast": math.inf}, "model.rotary.beta_fast must be above 0 and finite, got inf"),
        ({**YARN, "beta_slow": 0.0}, "model.rotary.beta_slow must be above 0 and finite, got 0.0"),
        ({**YARN, "attention_factor": math.nan}, "attention_factor must be above 0 and finite, got nan"),
        ({"low_freq_factor": -1.0}, "model.rotary.low_freq_factor must be above 0 and finite, got -1.0"),
        ({"high_freq_factor": math.inf}, "model.rotary.high_freq_factor must be above 0 and finite, got inf"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below model.rotary.high_freq_factor=4.0"),
    ],
)
def test_an_impossible_scaling_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RotaryConfig(**{"base": 10_000.0, **values})


@pytest.mark.parametrize(
    ("values", "reader"),
    [
        ({"factor": 8.0}, "yarn"),
        ({"original_seq_len": ORIGINAL}, "yarn"),
        ({"beta_fast": 16.0}, "yarn"),
        ({"scaling": "linear", "factor": 8.0, "beta_slow": 2.0}, "yarn"),
        ({"scaling": "llama3", "factor": 8.0, "original_seq_len": ORIGINAL, "attention_factor": 1.0}, "yarn"),
        ({"scaling": "ntk", "factor": 8.0, "low_freq_factor": 2.0}, "llama3"),
    ],
)
def test_a_value_that_the_scaling_does_not_read_is_refused_with_one_that_does(values, reader):
    name, value = list(values.items())[-1]
    scaling = values.get("scaling", "none")
    message = f"^model.rotary.{name}={value} has no effect with model.rotary.scaling={scaling}: "
    with pytest.raises(ValueError, match=f"{message}add model.rotary.scaling={reader}, or leave it out"):
        RotaryConfig(**{"base": 10_000.0, **values})
    # checkpoints hold it from a time when it was taken
    values = {"base": 10_000.0, **values}
    read = RotaryConfig(**{key: values[key] for key in values if key != name})
    assert RotaryConfig.from_checkpoint(values) == read


def test_positions_are_not_made_fewer():
    with pytest.raises(ValueError, match="n_positions=3 must be at least the 4 that there are"):
        extend_learned_positions(torch.zeros(4, 2), 3, "repeat")
