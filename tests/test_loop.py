import torch

import train.state
from train.bad_steps import SpikeConfig, StepGuard
from train.loop import seed_of
from train.state import TrainingState


def test_every_rank_has_a_seed_of_its_own_in_every_step_of_every_run():
    places = [(seed, step, rank) for seed in (0, 1, 2**31) for step in range(100) for rank in range(64)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    # torch.manual_seed takes it, and a resumed run finds it again
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[:100] == [seed_of(*place) for place in places[:100]]


def test_the_scale_of_the_loss_and_the_history_of_steps_come_back_from_a_checkpoint(monkeypatch):
    monkeypatch.setattr(train.state, "load_tensors", lambda *given: None)
    spikes = SpikeConfig(action="log", z_score=3.0, window=4)
    guard = StepGuard("stop", spikes, has_scaler=True, left_out=[], rank=0)
    scaler = torch.amp.GradScaler("cpu")
    saved = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    history = {"losses": [2.0, 1.0], "norms": [0.5], "skipped": 3, "not_finite": 1}
    state = TrainingState(None, None, scaler, guard)
    state.restore(None, {"scaler": saved, "guard": history})
    assert scaler.state_dict() == saved
    assert guard.state() == history
    # of a precision that needed no scale
    state.restore(None, {"scaler": {}, "guard": history})
    assert scaler.state_dict() == saved
