import torch

import train.state
from train.bad_steps import SpikeConfig, StepGuard
from train.state import TrainingState


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


def test_what_a_checkpoint_says_beside_the_tensors_restores_the_state_that_wrote_it(monkeypatch):
    monkeypatch.setattr(train.state, "load_tensors", lambda *given: None)

    def state(init_scale: float) -> TrainingState:
        spikes = SpikeConfig(action="log", z_score=3.0, window=4)
        guard = StepGuard("skip", spikes, has_scaler=True, left_out=[3, 5], rank=0)
        return TrainingState(None, None, torch.amp.GradScaler("cpu", init_scale=init_scale), guard)

    written, read = state(8.0), state(65536.0)
    for step, (loss, norm) in enumerate(((2.5, 1.0), (float("nan"), 1.0), (2.25, 0.75))):
        limit = written.guard.norm_limit(step, loss, loss)
        written.guard.add_norm(step, torch.tensor(norm), limit)
    assert written.rest()["guard"] != read.rest()["guard"]
    read.restore(None, written.rest())
    assert read.rest() == written.rest()
    assert read.rest()["left_out"] == [3, 5]
