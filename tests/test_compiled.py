from functools import cache, partial

import pytest
import torch
import torch._dynamo.testing

from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from model.rope import RotaryConfig

SEQ_LEN = 512


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs that the compiler is given."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr("model.compiled.compiled_once", cache(torch.compile))
    return counter


def build(n_layer: int, patterns: list[str], **model) -> GPT:
    torch.manual_seed(n_layer)
    sizes = {"n_head": 2, "n_embd": 32, "vocab_size": 50, "max_seq_len": SEQ_LEN, "dropout": 0.0}
    attention = AttentionConfig(implementation="reference", patterns=patterns, block_size=64)
    return GPT(ModelConfig(n_layer=n_layer, **sizes, **model), attention)


def batch() -> torch.Tensor:
    return torch.randint(50, (2, 2, SEQ_LEN))


@pytest.mark.parametrize("model", [{}, {"rotary": RotaryConfig(base=100.0)}], ids=["learned", "rotary"])
@pytest.mark.parametrize(
    ("patterns", "kinds"),
    [
        (["dense"], 1),
        (["dense", "window(128)"], 2),
        # from the second mask on, one graph serves masks of any number of blocks
        (["window(64)", "window(128)", "window(192)", "strided(2)", "dense"], 4),
    ],
    ids=["dense", "sparse", "mixed"],
)
def test_evaluation_compiles_one_layer_of_each_kind_and_the_loss(counter, patterns, kinds, model):
    graphs = []
    for n_layer in (5, 10):
        torch._dynamo.reset()
        counter.clear()
        gpt = build(n_layer, patterns, **model)
        compiled = CompiledModel(gpt).eval()
        for _ in range(2):
            tokens, targets = batch()
            with torch.no_grad():
                torch.testing.assert_close(compiled(tokens, targets), gpt(tokens, targets))
            graphs.append(counter.frame_count)
    assert graphs[:2] == graphs[2:]
    assert graphs[0] == graphs[1] <= kinds + 1


def test_a_training_pass_is_one_graph_with_the_gradients_of_the_model(counter):
    gpt = build(3, ["dense"])
    compiled = CompiledModel(gpt)
    for _ in range(2):
        tokens, targets = batch()
        loss, expected = compiled(tokens, targets), gpt(tokens, targets)
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(x, gpt.parameters()) for x in (loss, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1


def test_a_compiled_model_has_the_weights_once_and_their_mode():
    gpt = build(2, ["dense"])
    compiled = CompiledModel(gpt)
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in gpt.parameters()]
    compiled.eval()
    assert not any(module.training for module in gpt.modules())
    compiled.train()
    assert all(module.training for module in gpt.modules())
