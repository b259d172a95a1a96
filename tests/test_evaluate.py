from contextlib import nullcontext

import pytest
import test_loader
import torch
import torch.distributed as dist
from test_loader import SEQ_LEN, load

from train.distributed import Processes
from train.evaluate import evaluate

# of files in which token i is i
folder = test_loader.folder


class Squares(torch.nn.Module):
    """As a model's loss, the mean over all tokens, of what is another value for each."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, tokens, targets):
        assert not self.training, "what dropout leaves out is no validation loss"
        self.shapes.append((tokens.shape, tokens.stride(), targets.shape, targets.stride()))
        return (tokens.double() * targets).mean()


@pytest.mark.parametrize("sequences", [1, 3, 4, 5, 16, 29, 61, 62])
@pytest.mark.parametrize(("rows", "world_size"), [(1, 1), (4, 1), (63, 1), (4, 2), (3, 4), (16, 8)])
def test_each_sequence_counts_once_in_micro_batches_of_one_shape(folder, rows, world_size, sequences):
    means, calls = [], set()
    for rank in range(world_size):
        model = Squares().train()
        given = {"sequences_per_step": rows * world_size, "rank": rank, "world_size": world_size}
        loader = load(folder, split="val", shuffle=False, **given)
        alone = Processes(0, 1, torch.device("cpu"), dist.HashStore(), None)
        means.append(evaluate(model, loader, sequences, alone, nullcontext))
        assert model.training
        assert set(model.shapes) == {((rows, SEQ_LEN), (SEQ_LEN, 1)) * 2}
        # each micro-batch, and the exchange behind them: an evaluation may take longer than a hang
        assert alone.marks == len(model.shapes) + 1
        # as often on every rank, with as many signs of progress
        calls.add((len(model.shapes), alone.marks))
    assert len(calls) == 1
    numbers = torch.arange(sequences * SEQ_LEN, dtype=torch.float64)
    assert sum(means) / world_size == pytest.approx((numbers * (numbers + 1)).mean().item(), rel=1e-12)


def test_evaluation_leaves_each_part_in_the_mode_it_was_in(folder):
    model = Squares().train()
    # as of a part that is not trained
    model.frozen = torch.nn.Dropout().eval()
    loader = load(folder, split="val", shuffle=False)
    alone = Processes(0, 1, torch.device("cpu"), dist.HashStore(), None)
    evaluate(model, loader, 1, alone, nullcontext)
    assert (model.training, model.frozen.training) == (True, False)

    # the loss of an evaluation that fails is none, but who catches it may go on training
    model.forward = lambda tokens, targets: tokens.unknown
    with pytest.raises(AttributeError):
        evaluate(model, loader, 1, alone, nullcontext)
    assert (model.training, model.frozen.training) == (True, False)
