import math
import re
from contextlib import nullcontext

import pytest
import torch

from train.bad_steps import (
    MAX_ROLLBACKS,
    RollBack,
    Rollbacks,
    SpikeConfig,
    StepGuard,
    read_left_out,
    take_over_left_out,
    write_left_out,
)
from train.checkpoint import run_tensors
from train.step import update


def guard(on_bad_step="stop", action="ignore", *, has_scaler=False, left_out=(), window=4, z_score=3.0):
    spikes = SpikeConfig(action=action, z_score=z_score, window=window)
    return StepGuard(on_bad_step, spikes, has_scaler=has_scaler, left_out=list(left_out), rank=0)


def take(judge: StepGuard, step: int, loss: float, norm: float = 1.0) -> float:
    """One step as the loop does it; returns the limit that its update was given."""
    limit = judge.norm_limit(step, loss, loss)
    judge.add_norm(step, torch.tensor(norm), limit)
    return limit


def test_good_steps_have_no_limit_and_are_not_counted():
    judge = guard()
    assert [take(judge, step, 3.0) for step in range(10)] == [math.inf] * 10
    assert judge.skipped_steps == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_or_is_skipped(loss):
    with pytest.raises(FloatingPointError, match="on rank 0 .* at step 6, in batch 5; the weights were not"):
        take(guard(), 5, loss)
    judge = guard("skip")
    assert take(judge, 5, loss, math.nan) == -math.inf
    assert judge.skipped_steps == 1


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_noticed_one_step_later_and_counted(norm):
    judge = guard()
    take(judge, 5, 3.0, norm)
    with pytest.raises(FloatingPointError, match="norm is .* at step 6, in batch 5"):
        take(judge, 6, 3.0)
    judge = guard("skip")
    take(judge, 5, 3.0, norm)
    take(judge, 6, 3.0)
    assert judge.skipped_steps == 1


def test_an_overflow_that_the_scaler_handles_is_counted_but_is_no_fault():
    judge = guard("stop", has_scaler=True)
    take(judge, 0, 3.0, math.inf)
    take(judge, 1, 3.0)
    assert judge.skipped_steps == 1


@pytest.mark.parametrize("given", [{"has_scaler": True}, {"on_bad_step": "skip"}], ids=["fp16", "skip"])
def test_a_hundred_overflows_in_a_row_end_the_run_and_one_good_step_between_starts_the_count_anew(given):
    judge = guard(**given)
    for step in range(250):
        take(judge, step, 3.0, 1.0 if step == 99 or step == 180 else math.nan)
    # as after a resumption
    state = judge.state()
    judge = guard(**given)
    judge.load_state(state)
    for step in range(250, 281):
        take(judge, step, 3.0, math.nan)
    with pytest.raises(FloatingPointError, match="of 100 steps in a row, up to step 281, were not finite"):
        judge.settle()


def test_a_spike_needs_a_full_window():
    judge = guard(action="skip")
    for step, loss in enumerate((3.0, 3.1, 300.0)):
        assert take(judge, step, loss) == math.inf


def test_a_loss_far_above_the_last_ones_is_skipped_and_one_as_usual_is_not():
    judge = guard(action="skip")
    for step, loss in enumerate((3.0, 3.1, 2.9, 3.0, 3.05)):
        assert take(judge, step, loss, norm=1.0 + loss / 10) > 0
    assert take(judge, 5, 9.0) == -math.inf
    assert judge.skipped_steps == 1


def test_a_norm_is_held_to_the_limit_of_those_before_it():
    judge = guard(action="skip", z_score=3.0)
    for step, norm in enumerate((1.0, 1.2, 0.8, 1.0)):
        assert take(judge, step, 3.0 - 0.01 * step, norm) == math.inf
    mean, deviation = 1.0, math.sqrt((0.04 + 0.04) / 4)
    assert take(judge, 4, 2.9, 5.0) == pytest.approx(mean + 3 * deviation)
    assert judge.skipped_steps == 1


def test_log_changes_nothing_but_the_log(capsys):
    judge = guard(action="log")
    for step, loss in enumerate((3.0, 3.1, 2.9, 3.0)):
        take(judge, step, loss, norm=1.0 + step / 10)
    assert take(judge, 4, 9.0, norm=50.0) == math.inf
    assert judge.skipped_steps == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("spike at step 5, batch 4: loss 9, the limit is")
    assert lines[1].startswith("spike at step 5, batch 4: gradient norm 50, the limit is")


def test_what_is_usual_is_what_the_last_steps_had():
    judge = guard(action="skip")
    # a wild beginning, as every run has, and a window of calm steps
    for step, value in enumerate((90.0, 10.0, 80.0, 20.0, 3.0, 3.1, 2.9, 3.0)):
        take(judge, step, value, value)
    assert take(judge, 8, 3.05, 3.05) == pytest.approx(3.0 + 3 * math.sqrt(0.02 / 4))
    assert take(judge, 9, 9.0, 3.0) == -math.inf


def test_a_loss_at_its_limit_is_a_spike_and_one_below_it_is_not():
    limit = 1.0 + 3.0 * 0.25
    for loss, is_refused in ((math.nextafter(limit, 0.0), False), (limit, True)):
        judge = guard(action="skip")
        for step, before in enumerate((1.25, 0.75, 1.25, 0.75)):
            take(judge, step, before)
        assert (take(judge, 4, loss) == -math.inf) == is_refused


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, math.nan), (3.0, math.inf), (9.0, 50.0)])
def test_a_step_that_was_refused_is_no_part_of_what_is_usual(loss, norm):
    judge = guard("skip", "skip")
    for step, value in enumerate((3.0, 3.1, 2.9, 3.0)):
        take(judge, step, value, value)
    take(judge, 4, loss, norm)
    assert judge.state()["norms"] == pytest.approx([3.0, 3.1, 2.9, 3.0])
    # NaN would switch the guard off
    assert all(math.isfinite(value) for value in judge.state()["losses"])
    assert 3.0 < take(judge, 5, 3.0, 3.0) < 4.0


def test_spikes_that_are_ignored_are_not_told(capsys):
    judge = guard(action="ignore")
    for step, loss in enumerate((3.0, 3.1, 2.9, 3.0, 9.0)):
        take(judge, step, loss, loss)
    judge.settle()
    assert capsys.readouterr().out == ""


def test_values_that_never_vary_are_no_spikes():
    judge = guard("skip", "skip")
    assert [take(judge, step, 0.0, 0.0) > 0.0 for step in range(10)] == [True] * 10
    judge.settle()
    assert judge.skipped_steps == 0


def test_a_norm_at_the_limit_of_its_step_is_a_spike_and_one_below_it_is_not(capsys):
    # from deviations of 1/4 no sum is rounded
    limit = 1.0 + 3.0 * 0.25
    for norm, told in ((math.nextafter(limit, 0.0), 0), (limit, 1)):
        judge = guard(action="rollback")
        for step, before in enumerate((1.25, 0.75, 1.25, 0.75)):
            take(judge, step, 3.0 - 0.01 * step, before)
        judge.norm_limit(4, 2.95, 2.95)
        judge.add_norm(4, torch.tensor(norm, dtype=torch.float64), limit)
        with pytest.raises(RollBack) if told else nullcontext():
            judge.settle()
        assert capsys.readouterr().out.count("spike at step 5, batch 4: gradient norm") == told
        assert judge.skipped_steps == told


def test_roll_back_names_the_batch_that_the_step_really_took():
    judge = guard(action="rollback", left_out=[1])
    for step, loss in enumerate((3.0, 3.1, 2.9, 3.0)):
        take(judge, step, loss)
    with pytest.raises(RollBack) as raised:
        take(judge, 4, 9.0)
    assert raised.value.left_out == [1, 5]


@pytest.mark.parametrize(
    ("left_out", "batches"),
    [
        ([], [0, 1, 2, 3]),
        ([2], [0, 1, 3, 4]),
        ([0, 1], [2, 3, 4, 5]),
        ([2, 1], [0, 3, 4, 5]),
        ([3], [0, 1, 2, 4]),
    ],
)
def test_batches_are_counted_past_those_left_out(left_out, batches):
    assert [guard(left_out=left_out).batch_number(step) for step in range(4)] == batches


def test_a_resumed_guard_decides_like_one_that_was_not_stopped():
    losses = [3.0 + 0.1 * math.sin(step) for step in range(20)]
    whole = guard(action="skip")
    limits = [take(whole, step, loss, loss / 2) for step, loss in enumerate(losses)]
    part = guard(action="skip")
    for step in range(10):
        take(part, step, losses[step], losses[step] / 2)
    resumed = guard(action="skip")
    resumed.load_state(part.state())
    assert [take(resumed, step, losses[step], losses[step] / 2) for step in range(10, 20)] == limits[10:]
    assert resumed.state() == whole.state()


def test_a_resumed_guard_goes_on_counting_the_steps_that_were_skipped():
    spikes = SpikeConfig(action="ignore", z_score=3.0, window=2)
    resumed = StepGuard("skip", spikes, has_scaler=False, left_out=[], rank=0)
    resumed.load_state({"losses": [], "norms": [], "skipped": 3})
    resumed.add_norm(7, torch.tensor(math.nan), math.inf)
    assert resumed.skipped_steps == 4


def test_rollbacks_end_when_no_step_is_good_any_more_and_count_anew_behind_one_that_is():
    rollbacks = Rollbacks()
    for step in (5, 6):
        for _ in range(MAX_ROLLBACKS):
            rollbacks.add(step)
    # going back further is no good step either
    with pytest.raises(ValueError, match="left out 11 batches without a good step after step 6"):
        rollbacks.add(4)


def test_left_out_batches_are_remembered_in_the_run_folder(tmp_path):
    assert read_left_out(tmp_path) == []
    write_left_out(tmp_path, [7, 0, 3])
    assert read_left_out(tmp_path) == [7, 0, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["left_out.json"]


@pytest.mark.parametrize(
    "text", ["[5,]", "", "5", '"5"', '["5"]', "[7.5]", "[-1]", "[true]", "null", "[7, 7]"]
)
def test_a_list_of_left_out_batches_that_was_written_wrongly_is_refused_by_its_file(tmp_path, text):
    (tmp_path / "left_out.json").write_text(text + "\n")
    with pytest.raises(ValueError, match="left_out.json must be a list of numbers of batches") as refused:
        read_left_out(tmp_path)
    assert f"got {text!r}: write it so, [] for none" in str(refused.value)


THEN = {"seed": 1, "seq_len": 16, "tokens_per_step": 64}


@pytest.mark.parametrize(
    ("run", "now", "saved", "listed", "left_out"),
    [
        # a run that has gone back since, and a user who has batches read after all that are still to come
        ("own", {}, [7], [12, 7], [12, 7]),
        ("own", {}, [7, 11, 20], [7, 11], [7, 11]),
        ("own", {}, [7, 11, 20], [7], [7]),
        # its checkpoints were copied alone
        ("own", {}, [7], None, [7]),
        ("other", {}, [7], [7, 9], [7]),
        ("other", {}, [], [9], []),
        # a checkpoint of a time when they were not kept in it
        ("other", {}, None, [7, 9], [7, 9]),
        ("other", {}, None, None, []),
        # in another order or text the numbers are those of other batches
        ("own", {"seed": 2}, [7], [9], []),
        ("other", {"seq_len": 32}, [7], None, []),
        ("other", {"corpus": "b"}, [7], None, []),
        ("other", {"seed": 2, "tokens_per_step": 128}, [7], None, []),
        ("other", {"tokens_per_step": 128}, [], None, []),
    ],
)
def test_batches_left_out_are_those_of_the_checkpoint_or_of_its_run_since(
    tmp_path, run, now, saved, listed, left_out
):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    if listed is not None:
        write_left_out(tmp_path / run, listed)
    info = {"step": 10, "config": THEN, "corpus": "a"} | ({} if saved is None else {"left_out": saved})
    path = tmp_path / run / "checkpoints" / "step_00000010"
    given = (tmp_path / "own", path, info, THEN | now, now.get("corpus", "a"))
    assert take_over_left_out(*given) == left_out
    assert read_left_out(tmp_path / "own") == left_out


@pytest.mark.parametrize(
    ("saved", "listed", "passed"),
    [([7], [], r"\[\] of the 11"), ([7], [3, 7, 12], r"\[3, 7\] of the 11"), ([], [9], r"\[9\] of the 10")],
)
def test_no_batch_is_read_twice_or_never_because_of_a_changed_list(tmp_path, saved, listed, passed):
    write_left_out(tmp_path, listed)
    path = tmp_path / "checkpoints" / "step_00000010"
    info = {"step": 10, "config": THEN, "corpus": "a", "left_out": saved}
    message = rf"leaves out {passed} batches .* of step 10, and its run left out {re.escape(str(saved))}: put"
    with pytest.raises(ValueError, match=message):
        take_over_left_out(tmp_path, path, info, THEN, "a")
    assert read_left_out(tmp_path) == listed


def test_batches_left_out_are_refused_in_steps_of_another_size_with_the_ways_out(tmp_path):
    path, info = tmp_path / "other" / "checkpoints" / "step_00000010", {"config": THEN, "left_out": [7, 9]}
    with pytest.raises(
        ValueError, match=r"out the batches \[7, 9\] of 64 tokens.*use tokens_per_step=64, or"
    ):
        take_over_left_out(tmp_path / "own", path, info, THEN | {"tokens_per_step": 128}, "a")


def parameters_after(norm_limit: float, factor: float = 1.0, scaler=None):
    """A fused AdamW's weights and state after one good update and one with these gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for limit, scale in ((math.inf, 1.0), (norm_limit, factor)):
        scaler.scale(model(torch.ones(1, 4)).sum() * scale).backward()
        norm = update(optimizer, scaler, 0.1, 1.0, limit)
    return norm, [value.clone() for value in run_tensors(model, optimizer).values()]


def test_an_update_changes_the_weights_only_below_its_limit():
    norm, changed = parameters_after(math.inf)
    # a norm that is equal to its limit is refused: -inf and the norm itself keep the first update
    kept = [parameters_after(limit)[1] for limit in (-math.inf, norm.item())]
    for values in kept:
        assert all(torch.equal(a, b) for a, b in zip(values, kept[0], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(values, changed, strict=True))
    assert all(value == 1.0 for value in kept[0] if value.ndim == 0), "Adam counts one step, not two"


@pytest.mark.parametrize(("gradient_clip", "length"), [(0.0, 10.0), (2.5, 2.5), (20.0, 10.0)])
def test_gradients_are_shortened_to_the_clip_and_by_0_not_at_all(gradient_clip, length):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], weight_decay=0.0, betas=(0.0, 0.5), fused=True)
    weight.grad = torch.tensor([6.0, 8.0])
    norm = update(optimizer, torch.amp.GradScaler("cpu", enabled=False), 0.1, gradient_clip, math.inf)
    assert norm.item() == 10.0, "the norm before clipping"
    # what the optimizer was given: its second moment is half of the square
    assert (optimizer.state[weight]["exp_avg_sq"].sum() * 2).sqrt().item() == pytest.approx(length)
    assert weight.grad is None, "no step adds to the gradients of the one before"


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_an_update_by_gradients_that_are_not_finite_changes_nothing(factor):
    _, kept = parameters_after(-math.inf)
    _, values = parameters_after(math.inf, factor)
    assert all(torch.equal(a, b) for a, b in zip(values, kept, strict=True))


def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, values = parameters_after(math.inf, math.inf, scaler)
    _, kept = parameters_after(-math.inf)
    assert all(torch.allclose(a, b) for a, b in zip(values, kept, strict=True))
    assert all(value == 1.0 for value in values if value.ndim == 0)
    assert scaler.get_scale() == 512.0
    # the next good step is taken
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 512.0


def test_batches_left_out_stay_so_where_the_runs_own_checkpoint_was_moved_and_linked(tmp_path):
    own, disk = tmp_path / "own", tmp_path / "disk"
    path = own / "checkpoints" / "step_00000010"
    path.parent.mkdir(parents=True)
    disk.mkdir()
    path.symlink_to(disk)
    # the run has gone back to this checkpoint since it was saved
    write_left_out(own, [12, 7])
    info = {"step": 10, "config": THEN, "corpus": "a", "left_out": [7]}
    assert take_over_left_out(own, path, info, THEN, "a") == [12, 7]
    assert read_left_out(own) == [12, 7]
