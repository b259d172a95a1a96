"""A GPT with block-sparse layers: what the configuration says is what each layer computes."""

import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig, generate
from model.attention import layer_masks

PATTERNS = ["window(20) | sinks(3)", "dense", "strided(2)"]


def model(implementation: str, patterns: list[str], device) -> GPT:
    config = ModelConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=300, max_seq_len=256, dropout=0.0)
    return GPT(config, AttentionConfig(implementation=implementation, patterns=patterns, block_size=64)).to(
        device
    )


def test_flash_and_reference_give_the_same_loss_and_gradients(device):
    reference, flash = (model(name, PATTERNS, device) for name in ("reference", "flash"))
    flash.load_state_dict(reference.state_dict())
    tokens = torch.randint(300, (1, 151), device=device)
    losses = [gpt(tokens[:, :-1], tokens[:, 1:]) for gpt in (reference, flash)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, expected), actual in zip(reference.named_parameters(), flash.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_window_in_every_layer_keeps_far_tokens_apart():
    gpt = model("reference", ["window(10)"], "cpu").double().eval()
    tokens = torch.randint(300, (1, 120))
    changed = tokens.clone()
    changed[0, 0] += 1
    with pytest.warns(UserWarning, match="of block pairs are reached in 3 layers"):
        layer_masks(gpt.attention, 3, 512, torch.device("cpu"))
    # three layers of nine tokens back
    assert torch.equal(gpt(tokens)[:, 28:], gpt(changed)[:, 28:])
    assert not torch.equal(gpt(tokens)[:, 27], gpt(changed)[:, 27])


def test_generation_with_a_cache_sees_what_training_saw():
    gpt = model("reference", PATTERNS, "cpu").eval()
    tokens = torch.randint(300, (2, 90))
    generated = generate(gpt, tokens, 5, temperature=0.0)
    for n in range(90, 95):
        assert torch.equal(gpt(generated[:, :n])[:, -1].argmax(-1), generated[:, n])


def test_masks_are_built_once_for_a_length():
    config = AttentionConfig(implementation="flash", patterns=["window(9)", "dense"])
    arguments = (config, 4, 200, torch.device("cpu"))
    masks = layer_masks(*arguments)
    assert masks is layer_masks(*arguments)
    assert [mask is None for mask in masks] == [False, True, False, True]
    assert masks[0] is masks[2]


def test_masks_that_inference_made_first_serve_training(device):
    gpt = model("flash", ["window(9)", "dense", "dense"], device)
    # of a length that no other test asks for
    tokens = torch.randint(300, (1, 21), device=device)
    with torch.inference_mode():
        gpt(tokens)
    gpt(tokens, tokens).backward()
    masks = layer_masks(gpt.attention, 3, 21, tokens.device)
    assert not any(x.is_inference() or x.requires_grad for x in masks[0].tensors())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": []}, "attention.patterns must name at least one"),
        ({"patterns": ["window(1024"]}, "pattern 'window"),
        ({"patterns": ["window()"]}, r"window\(\): window in 'window\(\)' takes 1 integer, got 0"),
        ({"patterns": ["circle(3)"]}, "'circle.3.' in 'circle.3.' is no pattern: combine causal, window"),
        ({"patterns": ["window(9)", "dens"]}, "'dens' is no pattern: .* & and |; or dense, by itself, for"),
        ({"patterns": ["butterfly()"]}, "butterfly.. sees keys behind the query: add & causal"),
        ({"patterns": ["window(0)"]}, "n must be at least 1, got 0"),
        ({"block_size": 32}, r"attention.block_size must be one of \(64, 128\), got 32"),
        ({"implementation": "sdpa", "patterns": ["window(9)"]}, "flash or reference, got sdpa"),
    ],
)
def test_a_wrong_pattern_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**{"implementation": "flash", **options})
