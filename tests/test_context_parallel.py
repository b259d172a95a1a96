import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model import GPT, AttentionConfig, ModelConfig
from model.rope import RotaryConfig
from train.context_parallel import SharedSequences, join_context_groups, positions_in_documents
from train.distributed import Processes

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


def build(shape: str, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "max_seq_len": 32, "dropout": dropout}
    config = ModelConfig(**sizes, **SHAPES[shape])
    return GPT(config, AttentionConfig(implementation="reference")).double()


def processes(rank: int, size: int) -> Processes:
    return Processes(rank, size, torch.device("cpu"), None)


def run_on_part(rank: int, size: int, context_size: int, meeting: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    context = join_context_groups(processes(rank, size), context_size)
    assert (context.data_rank, context.data_size) == (rank // context_size, size // context_size)
    batch = torch.randint(50, (2, context.data_size, 33), generator=torch.Generator().manual_seed(1))
    tokens, targets = batch[..., :-1], batch[..., 1:]
    documents = torch.tensor([[0] * 11 + [3] * 21, [1] * 30 + [2] * 2], dtype=torch.int32)
    for shape, ids in (("gpt2", None), ("llama", None), ("llama", documents)):
        one, shared = build(shape), build(shape)
        positions = None if ids is None else positions_in_documents(ids)
        losses = [
            one(tokens[:, part], targets[:, part], document_ids=ids, positions=positions)
            for part in range(context.data_size)
        ]
        expected = torch.stack(losses).mean()
        expected.backward()
        part = slice(None), context.data_rank
        loss = SharedSequences(shared, context.group)(tokens[part], targets[part], ids)
        loss.backward()

        # the model takes its loss in float32
        assert mean(loss) == pytest.approx(expected.item(), rel=1e-6)
        for (name, x), y in zip(one.named_parameters(), shared.parameters(), strict=True):
            torch.testing.assert_close(mean(y.grad), x.grad, rtol=1e-5, atol=1e-7, msg=name)
    dist.destroy_process_group()


def mean(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


@pytest.mark.parametrize(("size", "context_size"), [(2, 2), (4, 2)])
def test_loss_and_gradients_are_those_of_one_process(size, context_size, tmp_path):
    mp.spawn(run_on_part, (size, context_size, str(tmp_path / "meeting")), nprocs=size)


def test_positions_start_anew_with_each_document():
    ids = torch.tensor([[0, 0, 0, 4, 4], [1, 2, 2, 2, 3]], dtype=torch.int32)
    assert positions_in_documents(ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]]


def test_a_number_of_ranks_that_does_not_divide_the_processes_is_refused():
    with pytest.raises(ValueError, match="context_parallel=4 must divide the 6 processes"):
        join_context_groups(processes(0, 6), 4)


def test_one_rank_a_sequence_needs_no_group():
    assert join_context_groups(processes(2, 3), 1).group is None


def test_dropout_over_several_processes_is_refused():
    class NoGroup:
        def rank(self):
            return 0

        def size(self):
            return 2

    shared = SharedSequences(build("gpt2", dropout=0.1), NoGroup())
    with pytest.raises(ValueError, match=r"model.dropout=0.1: there is none over several processes"):
        shared(torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32, dtype=torch.long))
