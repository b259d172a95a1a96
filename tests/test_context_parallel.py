from functools import cache, partial
from itertools import product
from unittest.mock import patch

import faults
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch._dynamo.eval_frame import cached_backends

from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from model.recompute import RECOMPUTE
from model.rope import RotaryConfig
from tests.together import run_together
from train.context_parallel import ContextGroups, SharedSequences, join_context_groups
from train.distributed import Processes
from train.documents import positions_in_documents

SHAPES = {
    "gpt2": {},
    "llama": {
        "n_kv_head": 1,
        "norm": "rms",
        "mlp": "swiglu",
        "bias": "none",
        "rotary": RotaryConfig(base=100.0),
    },
}


def build(
    shape: str, dropout: float = 0.0, patterns: tuple[str, ...] = ("dense",), recompute: str = "none"
) -> GPT:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 50,
        "max_seq_len": 256,
        "dropout": dropout,
    }
    config = ModelConfig(**sizes, **SHAPES[shape])
    attention = AttentionConfig(implementation="reference", patterns=list(patterns), block_size=64)
    return GPT(config, attention, recompute=recompute).double()


def processes(rank: int, size: int) -> Processes:
    return Processes(rank, size, torch.device("cpu"), None, None)


DOCUMENTS = torch.tensor([[0] * 11 + [3] * 21, [1] * 30 + [2] * 2], dtype=torch.int32)
LONG_DOCUMENTS = DOCUMENTS.repeat_interleave(8, dim=1)
SPARSE = ("window(70)", "strided(2)")
# model, documents, tokens, patterns, recompute
CASES = (
    ("gpt2", None, 32, ("dense",), "none"),
    ("llama", None, 32, ("dense",), "selective"),
    ("llama", DOCUMENTS, 32, ("dense",), "full"),
    ("llama", None, 256, SPARSE, "none"),
    ("gpt2", LONG_DOCUMENTS, 256, SPARSE, "selective"),
    ("gpt2", LONG_DOCUMENTS, 256, SPARSE, "full"),
)


def run_on_part(rank: int, size: int, context_size: int) -> None:
    context = join_context_groups(processes(rank, size), context_size)
    assert (context.data_rank, context.data_size) == (rank // context_size, size // context_size)
    for case in CASES:
        compare_with_one(context, *case)


def run_compiled_on_part(rank: int, size: int) -> None:
    context = join_context_groups(processes(rank, size), size)
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        for case, whole in product((CASES[0], CASES[2], CASES[3]), (True, False)):
            torch._dynamo.reset()
            compare_with_one(context, *case, form=partial(CompiledModel, whole=whole))


def compare_with_one(
    context: ContextGroups, shape: str, ids, seq_len: int, patterns, recompute: str, form=lambda model: model
) -> None:
    """Asserts that a model in this form, of which each process has a part, is one that has all of it."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(50, (2, context.data_size, seq_len + 1), generator=generator)
    tokens, targets = batch[..., :-1], batch[..., 1:]
    one = build(shape, patterns=patterns)
    shared = build(shape, patterns=patterns, recompute=recompute)
    positions = None if ids is None else positions_in_documents(ids)
    losses = [
        one(tokens[:, part], targets[:, part], document_ids=ids, positions=positions)
        for part in range(context.data_size)
    ]
    expected = torch.stack(losses).mean()
    expected.backward()
    part = slice(None), context.data_rank
    loss = SharedSequences(form(shared), context.group)(tokens[part], targets[part], ids, positions)
    loss.backward()

    # the model takes its loss in float32
    assert mean(loss) == pytest.approx(expected.item(), rel=1e-6)
    for (name, x), y in zip(one.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(mean(y.grad), x.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_run_whose_sequences_are_shared_follows_the_curve_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    given = ["model.dropout=0.0", "attention.implementation=reference", "separate_documents=true"]
    runs = {
        "alone": (1, []),
        "shared": (2, ["context_parallel=2", "tokens_per_microbatch=64"]),
        "in_shards": (2, ["context_parallel=2", "tokens_per_microbatch=64", "distributed=fsdp"]),
    }
    losses = {}
    try:
        for name, (world_size, more) in runs.items():
            attempt = faults.complete(faults.small_config(name, 12, *given, *more), world_size)
            processes = "1 process" if world_size == 1 else "1 group of 2 processes"
            assert f"{processes} x 4 micro-batches x 4 sequences x 32 tokens;" in attempt.log()
            metrics = faults.read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
            losses[name] = [m["train_loss"] for m in metrics if m["step"]] + [metrics[-1]["val_loss"]]
    finally:
        faults.Attempt.kill_all()
    assert losses["shared"] == pytest.approx(losses["alone"], rel=1e-4)
    assert losses["in_shards"] == pytest.approx(losses["alone"], rel=1e-4)


def mean(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


@pytest.mark.parametrize(("size", "context_size"), [(2, 2), (4, 2)])
def test_loss_and_gradients_are_those_of_one_process(size, context_size, tmp_path):
    run_together(run_on_part, size, tmp_path / "meeting", size, context_size)


def test_compiled_loss_and_gradients_are_those_of_one_process(tmp_path):
    run_together(run_compiled_on_part, 2, tmp_path / "meeting", 2)


def test_one_rank_a_sequence_needs_no_group():
    assert join_context_groups(processes(2, 3), 1).group is None


class NoGroup:
    """Stands for a process group of this size where nothing is sent."""

    def __init__(self, size: int):
        self.n_ranks = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.n_ranks


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_takes_part_and_is_compiled_once_whatever_it_recomputes(whole, monkeypatch):
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr("model.compiled.compiled_once", cache(torch.compile))
    plain, graphs, kept = build("llama"), [], []
    for recompute in RECOMPUTE:
        torch._dynamo.reset()
        counter.clear()
        gpt = build("llama", recompute=recompute)
        shared = SharedSequences(CompiledModel(gpt, whole=whole), NoGroup(1))
        for _ in range(3):
            tokens, targets = torch.randint(50, (2, 2, 32))
            losses = [run(tokens, targets) for run in (shared, plain)]
            gradients = [
                torch.autograd.grad(loss, model.parameters())
                for loss, model in zip(losses, (gpt, plain), strict=True)
            ]
            torch.testing.assert_close(losses[0], losses[1])
            torch.testing.assert_close(*gradients)
            with torch.no_grad():
                torch.testing.assert_close(shared(tokens, targets), losses[1])
            graphs.append(counter.frame_count)
            kept.append(len(cached_backends))
        # PyTorch keeps each until the process ends
        assert kept[-1] == kept[-2]
    # in front of a layer's exchange and behind it, for all layers: none is left to run as plain PyTorch
    assert graphs == graphs[:3] * 3
    assert graphs[0] >= 3


def test_dropout_over_several_processes_is_refused():
    shared = SharedSequences(build("gpt2", dropout=0.1), NoGroup(2))
    with pytest.raises(ValueError, match=r"model.dropout=0.1: there is none over several processes"):
        shared(torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32, dtype=torch.long))
