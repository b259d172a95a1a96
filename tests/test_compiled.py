from itertools import product

import pytest
import torch
import torch._dynamo.testing

from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from model.recompute import RECOMPUTE
from model.rope import RotaryConfig
from tests.test_config import composed
from train.build import build_step_model
from train.config import parse
from train.context_parallel import ContextGroups
from train.distributed import Processes

SEQ_LEN = 256


def build(
    n_layer: int,
    patterns: tuple[str, ...] = (),
    recompute: str = "none",
    implementation: str | None = None,
    **model,
) -> GPT:
    """Without patterns every layer is dense."""
    torch.manual_seed(n_layer)
    sizes = {"n_head": 2, "n_embd": 32, "vocab_size": 50, "max_seq_len": SEQ_LEN, "dropout": 0.0}
    attention = AttentionConfig(
        implementation=implementation or ("reference" if patterns else "sdpa"),
        patterns=list(patterns) or ["dense"],
        block_size=64,
    )
    return GPT(ModelConfig(n_layer=n_layer, **sizes, **model), attention, recompute=recompute)


def batch() -> torch.Tensor:
    return torch.randint(50, (2, 2, SEQ_LEN))


def nothing(tokens: torch.Tensor) -> dict:
    return {}


def documents(tokens: torch.Tensor) -> dict:
    return {"document_ids": (tokens == 0).cumsum(1, dtype=torch.int32)}


def positions(tokens: torch.Tensor) -> dict:
    return {"positions": torch.arange(SEQ_LEN).flip(0)}


def graphs_of_evaluations(counter, gpt: GPT, given=nothing) -> list[int]:
    """How many graphs the compiler has got after each of two evaluations, which compute what gpt does."""
    torch._dynamo.reset()
    counter.clear()
    compiled, counts = CompiledModel(gpt).eval(), []
    for _ in range(2):
        tokens, targets = batch()
        inputs = given(tokens)
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens, targets, **inputs), gpt(tokens, targets, **inputs))
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("given", [nothing, documents, positions])
@pytest.mark.parametrize("model", [{}, {"rotary": RotaryConfig(base=100.0)}], ids=["learned", "rotary"])
def test_evaluation_compiles_one_layer_and_what_is_in_front_of_it_and_behind(counter, model, given):
    for n_layer in (2, 5):
        assert graphs_of_evaluations(counter, build(n_layer, **model), given) == [3, 3]


@pytest.mark.parametrize(
    "patterns",
    [("dense", "window(128)"), ("window(64)", "window(128)", "window(192)", "strided(2)", "dense")],
    ids=["two", "five"],
)
def test_evaluation_compiles_each_kind_of_layer_once_however_many_there_are(counter, patterns):
    few, many = (graphs_of_evaluations(counter, build(n_layer, patterns)) for n_layer in (5, 10))
    assert few == many
    assert few[0] == few[1]


def graphs_of_training(counter, gpt: GPT, given=nothing, *, whole: bool = False) -> list[int]:
    """How many graphs the compiler has got after each of two passes, with the loss and gradients of gpt."""
    torch._dynamo.reset()
    counter.clear()
    compiled, counts = CompiledModel(gpt, whole=whole), []
    for _ in range(2):
        tokens, targets = batch()
        inputs = given(tokens)
        loss, expected = (run(tokens, targets, **inputs) for run in (compiled, gpt))
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(x, gpt.parameters()) for x in (loss, expected))
        torch.testing.assert_close(*gradients)
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ({}, nothing),
        ({"rotary": RotaryConfig(base=100.0), "n_kv_head": 1, "tied_head": False}, nothing),
        ({"rotary": RotaryConfig(base=100.0), "qk_norm": True, "norm": "rms", "mlp": "swiglu"}, positions),
        ({}, documents),
        ({}, positions),
    ],
    ids=["gpt2", "grouped", "qwen3", "documents", "positions"],
)
def test_training_compiles_the_same_parts_however_many_layers_there_are(counter, model, given):
    # up to the first product, from one to the next, and from the last
    for n_layer in (2, 5):
        assert graphs_of_training(counter, build(n_layer, **model), given) == [3, 3]
    assert graphs_of_training(counter, build(1, **model), given) == [2, 2]


@pytest.mark.parametrize("given", [nothing, documents])
@pytest.mark.parametrize("patterns", [(), ("dense", "window(64)")], ids=["dense", "window"])
def test_parts_with_our_kernels_have_the_gradients_of_the_model(counter, given, patterns):
    gpt = build(2, patterns, implementation="flash")
    (tokens, targets), compiled = batch()[..., :70], CompiledModel(gpt)
    inputs = given(tokens)
    loss, expected = (run(tokens, targets, **inputs) for run in (compiled, gpt))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, gpt.parameters()) for x in (loss, expected)))
    assert counter.frame_count == 3


@pytest.mark.parametrize("n_patterns", [2, 5])
def test_training_compiles_each_kind_of_layer_once_however_many_there_are(counter, n_patterns):
    patterns = ("dense", "window(128)", "window(64)", "strided(2)", "window(192)")[:n_patterns]
    few, many = (graphs_of_training(counter, build(n_layer, patterns)) for n_layer in (6, 11))
    assert few == many
    assert few[0] == few[1]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_training_of_a_whole_model_is_one_graph(counter, recompute):
    for given in (nothing, documents, positions):
        assert graphs_of_training(counter, build(3, recompute=recompute), given, whole=True) == [1, 1]


def test_training_compiles_the_same_parts_where_cheap_results_are_recomputed(counter):
    for n_layer in (2, 5):
        assert graphs_of_training(counter, build(n_layer, recompute="selective")) == [3, 3]


def test_training_compiles_one_layer_that_is_recomputed_and_what_is_in_front_of_it_and_behind(counter):
    for given, n_layer in product((nothing, documents, positions), (2, 5)):
        assert graphs_of_training(counter, build(n_layer, recompute="full"), given) == [3, 3]


@pytest.mark.parametrize(
    ("given", "world_size", "is_whole"),
    [
        ([], 1, False),
        (["recompute=full", "model.dropout=0.0"], 1, False),
        (["recompute=full", "model.dropout=0.1"], 1, True),
        (["cuda_graphs=false"], 1, True),
        (["profile=true"], 1, True),
        ([], 2, True),
        (["context_parallel=2"], 2, True),
    ],
    ids=["one", "recompute", "drawn again", "no graphs", "profile", "copies", "shared"],
)
def test_a_run_is_compiled_by_parts_where_graphs_replay_every_pass(monkeypatch, given, world_size, is_whole):
    # DDP asks for a process group
    monkeypatch.setattr("train.build.DistributedDataParallel", lambda model, **_: model)
    config = parse(composed("device=cpu", f"tokens_per_microbatch={SEQ_LEN}", f"seq_len={SEQ_LEN}", *given))
    processes = Processes(0, world_size, torch.device("cpu"), None, None)
    group = object() if config.context_parallel > 1 else None
    model = build_step_model(build(2), config, processes, ContextGroups(0, world_size, group))
    compiled = model.model if group else model
    assert isinstance(compiled, CompiledModel)
    assert (compiled.whole is not None) == is_whole


def test_a_compiled_model_has_the_weights_once_and_their_mode():
    gpt = build(2)
    compiled = CompiledModel(gpt)
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in gpt.parameters()]
    compiled.eval()
    assert not any(module.training for module in gpt.modules())
    compiled.train()
    assert all(module.training for module in gpt.modules())
