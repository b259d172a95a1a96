import faults
import pytest
import torch

from train.skipped_positions import SkippedPositions, skipped_positions

LLAMA = ["model=llama", "model.dropout=0.0", "model.n_kv_head=1", "model.mlp_width=64"]


def test_each_sequence_skips_one_stretch_and_stays_below_the_length():
    positions = skipped_positions(500, 16, 64, torch.device("cpu"))
    steps = positions.diff(dim=1)
    assert torch.equal(positions[:, 0], torch.zeros(500, dtype=torch.int64))
    assert positions.max() == 63
    # one step may be long, the others are of one token
    assert ((steps > 1).sum(1) <= 1).all()
    assert (steps.min(), steps.max()) == (1, 49)
    # every place and every length comes up
    assert len((steps > 1).int().argmax(1).unique()) == 15
    assert len(positions[:, -1].unique()) == 49


def test_the_draws_follow_the_seed():
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(skipped_positions(4, 16, 64, torch.device("cpu")))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_positions_are_skipped_in_training_alone():
    class Positions(torch.nn.Module):
        def forward(self, tokens, targets, positions):
            return positions

    model = SkippedPositions(Positions(), 1000)
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    assert (model(tokens, tokens)[:, -1] > 31).any()
    assert torch.equal(model.eval()(tokens, tokens), torch.arange(32).expand(8, 32))


def test_a_run_learns_at_positions_that_it_does_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    faults.run_training(faults.small_config("short", 10, *LLAMA))
    config = faults.small_config(
        "long", 10, "start.weights=runs/short", "pose_seq_len=256", "start.positions=yarn"
    )
    assert (config.model.max_seq_len, config.model.rotary.factor) == (256, 8.0)
    faults.run_training(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pose_seq_len=64"], "pose_seq_len=64 needs rotary positions"),
        ([*LLAMA, "pose_seq_len=16"], "pose_seq_len=16 must be above seq_len=32"),
        ([*LLAMA, "pose_seq_len=64"], "pose_seq_len=64 exceeds .*max_seq_len=32"),
        (
            [*LLAMA, "model.max_seq_len=64", "pose_seq_len=64", "separate_documents=true"],
            "separate_documents",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        faults.small_config("refused", 1, *overrides)
