from functools import cache, partial

import pytest
import torch
import torch._dynamo.testing

from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from model.rope import RotaryConfig

SEQ_LEN = 256


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs that the compiler is given."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr("model.compiled.compiled_once", cache(torch.compile))
    return counter


def build(n_layer: int, patterns: tuple[str, ...] = (), **model) -> GPT:
    """Without patterns every layer is dense."""
    torch.manual_seed(n_layer)
    sizes = {"n_head": 2, "n_embd": 32, "vocab_size": 50, "max_seq_len": SEQ_LEN, "dropout": 0.0}
    attention = AttentionConfig(implementation="sdpa")
    if patterns:
        attention = AttentionConfig(implementation="reference", patterns=list(patterns), block_size=64)
    return GPT(ModelConfig(n_layer=n_layer, **sizes, **model), attention)


def batch() -> torch.Tensor:
    return torch.randint(50, (2, 2, SEQ_LEN))


def graphs_of_evaluations(counter, gpt: GPT) -> list[int]:
    """How many graphs the compiler has got after each of two evaluations, which compute what gpt does."""
    torch._dynamo.reset()
    counter.clear()
    compiled, counts = CompiledModel(gpt).eval(), []
    for _ in range(2):
        tokens, targets = batch()
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens, targets), gpt(tokens, targets))
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("model", [{}, {"rotary": RotaryConfig(base=100.0)}], ids=["learned", "rotary"])
def test_evaluation_compiles_one_layer_and_the_loss(counter, model):
    for n_layer in (2, 5):
        assert graphs_of_evaluations(counter, build(n_layer, **model)) == [2, 2]


@pytest.mark.parametrize(
    "patterns",
    [("dense", "window(128)"), ("window(64)", "window(128)", "window(192)", "strided(2)", "dense")],
    ids=["two", "five"],
)
def test_evaluation_compiles_each_kind_of_layer_once_however_many_there_are(counter, patterns):
    few, many = (graphs_of_evaluations(counter, build(n_layer, patterns)) for n_layer in (5, 10))
    assert few == many
    assert few[0] == few[1]


def test_a_training_pass_is_one_graph_with_the_gradients_of_the_model(counter):
    gpt = build(3)
    compiled = CompiledModel(gpt)
    for _ in range(2):
        tokens, targets = batch()
        loss, expected = compiled(tokens, targets), gpt(tokens, targets)
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(x, gpt.parameters()) for x in (loss, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1


def test_a_compiled_model_has_the_weights_once_and_their_mode():
    gpt = build(2)
    compiled = CompiledModel(gpt)
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in gpt.parameters()]
    compiled.eval()
    assert not any(module.training for module in gpt.modules())
    compiled.train()
    assert all(module.training for module in gpt.modules())
