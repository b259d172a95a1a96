import errno
import gc
import gzip
import json
import math
import os
import pickle
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from faults import complete, run_training, tell_seeds, two_hosts
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

import train.loop
import train.plot
import train.report
import train.state
from data.loader import TokenLoader
from model import GPT, AttentionConfig
from scripts import sample
from train.build import set_arithmetic
from train.checkpoint import read_checkpoint
from train.compile_ahead import compile_ahead
from train.config import Config, parse
from train.logger import RunLogger, read_metrics
from train.optim import learning_rate
from train.report import step_metrics
from train.saving import CheckpointSaver
from train.weights import load_model, published_folder

ROOT = Path(__file__).resolve().parent.parent
METRICS = {
    "step", "tokens", "train_loss", "val_loss", "learning_rate", "grad_norm", "skipped_steps",
    "tokens_per_second",
    "tokens_per_second_per_gpu", "step_seconds", "data_seconds", "forward_backward_seconds",
    "optimizer_seconds", "mfu", "peak_memory_allocated_bytes", "peak_memory_reserved_bytes",
}  # fmt: skip
# 12 steps of a model of one layer on bytes: a second
SMALL = [
    "experiment=laptop", "name=test", "data=text", "data.paths=[corpus]", "data.tokenizer=bytes",
    "data.validation_fraction=0.2", "data.workers=1", "model.vocab_size=257", "model.n_layer=1",
    "model.n_head=2", "model.n_embd=32", "seq_len=32", "tokens_per_step=512", "tokens_per_microbatch=256",
    "total_tokens=6144", "evaluation.tokens=1024", "evaluation.every_steps=5", "checkpoint.every_steps=5",
    "logging.every_steps=1", "wandb.mode=disabled", "sample.tokens=10", "optim.warmup_steps=2",
]  # fmt: skip


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder of forty small text files, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for index in range(40):
        lines = [f"the number after {n} is {n + 1}" for n in range(index * 20, index * 20 + 20)]
        (tmp_path / "corpus" / f"{index:02}.txt").write_text("\n".join(lines))
    return tmp_path


def configured(*overrides: str) -> Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return parse(compose("config", [*SMALL, *overrides]))


def run(*overrides: str) -> float:
    return run_training(configured(*overrides))


def losses(name: str = "test") -> list[float]:
    return [m["train_loss"] for m in read_metrics(Path("runs", name, "metrics.jsonl")) if m["step"] > 0]


def weights(name: str, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a run on one process."""
    return load_file(Path("runs", name, "checkpoints", f"step_{step:08d}", "shard-00000.safetensors"))


def start(*arguments: str, launcher: tuple[str, ...] = (), root: Path = ROOT, **options) -> subprocess.Popen:
    command = [sys.executable, *launcher, "-m", "train", *arguments]
    paths = os.pathsep.join([str(root), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_run_leaves_its_metrics_pictures_sample_checkpoints_and_summary(corpus):
    val_loss = run()
    folder = Path("runs/test")
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(13))
    assert all(set(m) == METRICS for m in metrics[1:])
    assert [m["step"] for m in metrics if m["val_loss"]] == [0, 5, 10, 12]
    assert metrics[-1]["val_loss"] == val_loss < metrics[0]["val_loss"]
    assert (folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (folder / "sample.txt").read_text().startswith("def")
    assert (folder / "config.yaml").exists()
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == [
        "step_00000010", "step_00000012",
    ]  # fmt: skip
    # by which the best is kept
    for saved in metrics[10], metrics[12]:
        path = folder / "checkpoints" / f"step_{saved['step']:08d}"
        assert read_checkpoint(path)["val_loss"] == saved["val_loss"]
    config = configured()
    for m in metrics[1:]:
        assert m["tokens"] == 512 * m["step"]
        assert m["learning_rate"] == learning_rate(m["step"] - 1, 12, config.optim)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rows"][0]["final_loss"] == val_loss
    assert summary["rows"][0]["tokens"] == 6144
    assert summary["torch"] == torch.__version__


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_steps_of_a_run_are_those_of_plain_pytorch(corpus, schedule):
    given = ["precision=fp32", f"optim.schedule={schedule}", "optim.gradient_clip=0.7"]
    given += [
        "optim.weight_decay=0.3",
        "optim.beta2=0.9",
        "optim.decay_fraction=0.5",
        "logging.every_steps=1",
    ]
    run(*given)
    config = configured(*given)
    torch.manual_seed(config.seed)
    gpt = GPT(config.model, AttentionConfig(implementation="reference"))
    groups = [
        {"params": [p for p in gpt.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in gpt.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.optim.beta1, 0.9), fused=False)
    peak = config.optim.learning_rate
    final = peak * config.optim.final_learning_rate_ratio
    text = TokenLoader(
        config.data.folder,
        split="train",
        seq_len=32,
        sequences_per_step=16,
        seed=config.seed,
        tokenizer="bytes",
    )
    before = torch.cat([p.detach().flatten() for p in gpt.parameters()])
    for number, logged in enumerate(read_metrics(Path("runs/test/metrics.jsonl"))[1:], start=1):
        tokens, targets = text.batch(number - 1)
        # two micro-batches of the run are one here
        loss = F.cross_entropy(gpt.logits(gpt.hidden_states(tokens)).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in gpt.parameters()]).norm().item()
        assert (loss.item(), norm) == pytest.approx((logged["train_loss"], logged["grad_norm"]), rel=1e-3)
        for p in gpt.parameters():
            p.grad *= min(1.0, 0.7 / norm)
        # two steps of warm-up; then ten down, or four that stay and six down
        if number <= 2:
            rate = peak * number / 2
        elif schedule == "cosine":
            rate = final + (peak - final) * (1 + math.cos(math.pi * (number - 3) / 9)) / 2
        else:
            rate = peak + (final - peak) * max(0, number - 6) / 6
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    saved = weights("test", 12)
    moved = torch.cat([p.detach().flatten() for p in gpt.parameters()]) - before
    found = torch.cat([saved[f"model.{name}"].flatten() for name, _ in gpt.named_parameters()]) - before
    assert (found - moved).norm() < 0.01 * moved.norm()


def test_a_summary_tells_the_time_that_is_in_no_phase_of_a_step(corpus, monkeypatch):
    def slow(function, seconds):
        def slowly(*arguments, **options):
            time.sleep(seconds)
            return function(*arguments, **options)

        return slowly

    monkeypatch.setattr(train.loop, "evaluate", slow(train.loop.evaluate, 0.1))
    monkeypatch.setattr(CheckpointSaver, "save", slow(CheckpointSaver.save, 0.06))
    monkeypatch.setattr(RunLogger, "log", slow(RunLogger.log, 0.03))
    run()
    [summary] = json.loads(Path("runs/test/summary.json").read_text())["rows"]
    # after 0, 5, 10 and 12 steps, checkpoints after the last three of these
    assert summary["evaluation_seconds"] > 4 * 0.1
    assert summary["checkpoint_seconds"] > 3 * 0.06
    between = (3 * 0.1 + 3 * 0.06) / 11 + 0.03
    assert summary["wall_step_ms"] > summary["step_ms"] / 2 + 1000 * between
    run("total_tokens=6656")
    [summary] = json.loads(Path("runs/test/summary.json").read_text())["rows"]
    assert summary["wall_step_ms"] is None, "the launch took one step"


def test_a_run_whose_first_evaluation_fails_closes_its_metrics_and_leaves_wandb(corpus, monkeypatch):
    left = []
    monkeypatch.setattr(RunLogger, "__exit__", lambda logger, *error: left.append(logger))

    def out_of_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(train.loop, "evaluate", out_of_memory)
    with pytest.raises(MemoryError):
        run()
    # otherwise wandb would log the next run of this process to this one
    assert len(left) == 1


@pytest.mark.parametrize("model", ["tiny", "llama"])
def test_a_run_is_sampled_from_its_newest_checkpoint(corpus, capsys, model):
    run(f"model={model}", "total_tokens=1024", "model.n_head=4")
    capsys.readouterr()

    def printed(**arguments) -> str:
        sample.main(sample.Arguments(**arguments, tokens=5, device="cpu"))
        return capsys.readouterr().out

    first = printed(run="runs/test")
    assert first.startswith("def")
    assert first == printed(checkpoint="runs/test/checkpoints/step_00000002")
    assert printed(run="runs/test", samples=2).count("---\ndef") == 2


def test_a_run_with_windowed_layers_is_sampled_without_naming_an_attention(corpus, capsys):
    run("attention=reference", 'attention.patterns=["window(8)"]', "total_tokens=1024")
    capsys.readouterr()
    sample.main(sample.Arguments(run="runs/test", tokens=5, device="cpu"))
    assert capsys.readouterr().out.startswith("def")
    with pytest.raises(ValueError, match="attention=sdpa has no patterns .* use attention=reference"):
        sample.main(sample.Arguments(run="runs/test", tokens=5, device="cpu", attention="sdpa"))


def test_a_run_goes_on_from_its_own_checkpoint_where_its_first_weights_are_damaged(corpus):
    run("name=first", "total_tokens=1024")
    run("start.weights=runs/first", "total_tokens=3072")
    shard = Path("runs/first/checkpoints/step_00000002/shard-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    run("start.weights=runs/first")
    assert len(losses()) == 12
    with pytest.raises(ValueError, match="start.weights: .* all 1 checkpoints are damaged"):
        run("start.weights=runs/first", "name=other")


@pytest.mark.parametrize(
    ("override", "way_out"),
    [("start.positions=linear", "start.positions=none"), ("start.rotary_base=5e5", "start.rotary_base=null")],
)
def test_a_run_without_its_first_weights_refuses_to_have_been_extended_otherwise(corpus, override, way_out):
    run("model=llama", "model.n_head=4", "name=first", "total_tokens=1024")
    again = ["start.weights=runs/first", "start.positions=none", "total_tokens=3072"]
    run(*again)
    Path("runs/first").rename("runs/moved")
    with pytest.raises(ValueError, match=f" has no effect: .* began with {way_out}: use that$"):
        run(*again, override)
    run(*again)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(corpus):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(f"name={name}", f"seed={seed}")
    assert losses("a") == losses("b")
    assert losses("a") != losses("c")


def test_the_micro_batch_does_not_change_the_losses(corpus):
    run("name=one", "tokens_per_microbatch=512")
    run("name=four", "tokens_per_microbatch=128")
    assert losses("one") == pytest.approx(losses("four"), abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_reference_and_sdpa_train_alike(corpus, precision):
    run("name=sdpa", f"precision={precision}")
    run("name=reference", "attention=reference", f"precision={precision}")
    assert losses("sdpa") == pytest.approx(losses("reference"), abs=1e-2 if precision == "bf16" else 1e-5)


@pytest.mark.parametrize(
    "given", [["optim=adamw"], ["optim=muon"], ["attention=reference", "model.dropout=0.1"]], ids=" ".join
)
def test_a_resumed_run_ends_with_the_same_weights_and_metrics_as_one_that_was_not_stopped(corpus, given):
    run("name=whole", *given)
    run("name=resumed", *given)
    # as if it had been killed after step 10
    shutil.rmtree("runs/resumed/checkpoints/step_00000012")
    run("name=resumed", *given)
    assert losses("resumed") == losses("whole")
    for key, value in weights("whole", 12).items():
        assert torch.equal(weights("resumed", 12)[key], value), key
    whole, resumed = (
        read_checkpoint(Path("runs", name, "checkpoints", "step_00000012")) for name in ("whole", "resumed")
    )
    # what the limits of the next steps would be
    assert resumed["guard"] == whole["guard"]
    assert len(whole["guard"]["losses"]) == 12


def test_a_run_draws_no_weights_that_it_loads(corpus, request):
    run("total_tokens=3072")
    request.getfixturevalue("no_weights_are_drawn")
    run()
    run("name=second", "start.weights=runs/test")
    # and a model that is loaded to be sampled
    sample.main(sample.Arguments(run="runs/second", tokens=2, device="cpu", precision="fp32"))
    with pytest.raises(AssertionError, match="would be drawn"):
        run("name=third")


def test_a_finished_run_is_not_trained_further_and_tells_so_and_its_loss_once(corpus, capsys):
    first = run()
    before = weights("test", 12)
    capsys.readouterr()
    assert run() == pytest.approx(first)
    output = capsys.readouterr().out
    assert "all 12 steps are done already: raise total_tokens to go on, or choose" in output
    assert output.count("validation loss") == 1, output
    assert all(torch.equal(weights("test", 12)[key], value) for key, value in before.items())
    assert len(losses()) == 12


def test_a_finished_run_is_told_by_its_own_last_checkpoint_however_its_path_is_written(corpus, capsys):
    run()
    for path in (Path("runs/test/checkpoints"), corpus / "runs/test/checkpoints"):
        run(f"checkpoint.resume={path / 'step_00000012'}")
        assert "all 12 steps are done already: raise total_tokens" in capsys.readouterr().out


def test_a_raised_budget_continues_a_finished_run_and_tells_of_other_settings(corpus, capsys):
    run()
    run("total_tokens=7168")
    assert "continues after step 12 with the settings of runs/test/config_from_s" in capsys.readouterr().out
    assert len(losses()) == 14


@pytest.mark.parametrize(
    ("size", "first_step", "again"), [(1024, 5, 0), (256, 20, 0), (768, 6, 512)], ids=["twice", "half", "odd"]
)
def test_steps_of_another_size_go_on_in_the_text_and_the_budget_where_the_checkpoint_was(
    corpus, capsys, monkeypatch, size, first_step, again
):
    read, batch = [], TokenLoader.batch

    def watched(self, step):
        tokens, targets = batch(self, step)
        if self.shuffle:
            read.extend(tokens.tolist())
        return tokens, targets

    monkeypatch.setattr(TokenLoader, "batch", watched)
    run("name=whole", "total_tokens=9216")
    whole, read = read, []
    run("total_tokens=5120")
    before, read = read, []
    capsys.readouterr()
    given = [f"tokens_per_step={size}", "total_tokens=9216", "name=other"]
    run(*given, "checkpoint.resume=runs/test/checkpoints/step_00000010")
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith(f"step 10 of 512 tokens is step {first_step} of {size:,} tokens, in which ")
    assert ("the last 512 tokens before it are read again" in told) == (again > 0)
    # sequences are of 32 tokens
    assert before[: len(before) - again // 32] + read == whole
    metrics = read_metrics(Path("runs/other/metrics.jsonl"))
    assert [m["tokens"] for m in metrics] == list(range((first_step + 1) * size, 9217, size))
    [row] = json.loads(Path("runs/other/summary.json").read_text())["rows"]
    assert row["tokens"] == 9216
    # and again from its own checkpoint, with a larger budget
    run(*given, "total_tokens=12288", "checkpoint.resume=runs/test/checkpoints/step_00000010")
    assert read_metrics(Path("runs/other/metrics.jsonl"))[-1]["tokens"] == 12288


def test_a_checkpoint_of_less_than_one_step_of_another_size_is_refused_with_the_largest_that_fits(corpus):
    run("total_tokens=1536")
    given = ["name=other", "checkpoint.resume=runs/test/checkpoints/step_00000003"]
    with pytest.raises(
        ValueError,
        match="of step 3 of 512 tokens, less than one step of tokens_per_step=2048: use tokens_per_step=1536 "
        "or less, or a later checkpoint",
    ):
        run(*given, "tokens_per_step=2048")
    run(*given, "tokens_per_step=1536", "total_tokens=3072")
    assert [m["step"] for m in read_metrics(Path("runs/other/metrics.jsonl"))] == [2]


@pytest.mark.parametrize(
    "other", ["seed=2", "seq_len=16", "data.paths=[corpus/01.txt,corpus/02.txt,corpus/03.txt]"]
)
def test_in_another_text_or_order_of_it_no_tokens_are_said_to_be_read_again(corpus, capsys, other):
    run("total_tokens=1536")
    given = ["name=other", "tokens_per_step=1024", "checkpoint.resume=runs/test/checkpoints/step_00000003"]
    given.append("optim.warmup_steps=1")
    # a new model's positions would follow its length
    run(*given, other, "model.max_seq_len=32", "data.folder=datasets/other", "evaluation.tokens=32")
    told = capsys.readouterr().out
    assert (
        "step 3 of 512 tokens is step 1 of 1,024 tokens, in which warm-up and schedule are counted\n" in told
    )


def test_a_warm_up_that_goes_on_in_steps_of_another_size_is_told_with_the_value_that_leaves_it_out(
    corpus, capsys
):
    run("total_tokens=1536")
    resume = "checkpoint.resume=runs/test/checkpoints/step_00000003"
    capsys.readouterr()
    run("name=warm", "tokens_per_step=1024", resume)
    told = capsys.readouterr().out
    assert "; the warm-up, which was over, goes on to step 2, optim.warmup_steps=1 leaves it out\n" in told
    run("name=over", "tokens_per_step=1024", resume, "optim.warmup_steps=1")
    assert "the warm-up, which was over" not in capsys.readouterr().out


def test_a_warm_up_beyond_the_end_of_the_run_is_told_with_the_rate_that_it_reaches(corpus, capsys):
    run("optim.warmup_steps=16")
    remark = (
        "optim.warmup_steps=16, but the run has 12 steps: its learning rate ends at 3.00e-03, below "
        "optim.learning_rate=0.004; lower optim.warmup_steps, or raise total_tokens"
    )
    assert remark in capsys.readouterr().out.splitlines()
    assert read_metrics(Path("runs/test/metrics.jsonl"))[-1]["learning_rate"] == pytest.approx(0.003)
    # a run may end at its peak
    run("name=peak", "optim.warmup_steps=12")
    assert "optim.warmup_steps" not in capsys.readouterr().out


def test_saves_of_which_few_are_evaluated_are_told_with_the_steps_that_the_best_is_of(corpus, capsys):
    run("checkpoint.every_steps=4", "evaluation.every_steps=6")
    remark = (
        "checkpoint.every_steps=4 and evaluation.every_steps=6: the best checkpoint is of those at every 12 "
        "steps, and the last; make one a multiple of the other"
    )
    assert remark in capsys.readouterr().out.splitlines()
    run("name=often", "checkpoint.every_steps=6", "evaluation.every_steps=2")
    run("name=seldom", "checkpoint.every_steps=2", "evaluation.every_steps=6")
    run("name=all", "checkpoint.every_steps=4", "evaluation.every_steps=6", "checkpoint.keep_best=false")
    assert "the best checkpoint" not in capsys.readouterr().out


def test_kept_checkpoints_that_are_fewer_than_asked_for_are_told_with_their_steps(corpus, capsys):
    run("checkpoint.every_steps=4", "checkpoint.keep_every_steps=6", "checkpoint.keep_last=1")
    remark = (
        "checkpoint.every_steps=4 and checkpoint.keep_every_steps=6: one checkpoint of every 12 steps is "
        "kept; make the second a multiple of the first"
    )
    assert remark in capsys.readouterr().out.splitlines()
    run("name=seldom", "checkpoint.every_steps=2", "checkpoint.keep_every_steps=6")
    run("name=all", "checkpoint.every_steps=6", "checkpoint.keep_every_steps=2")
    assert "checkpoint.keep_every_steps" not in capsys.readouterr().out


def test_never_refuses_a_run_that_another_one_has_filled_while_its_text_was_prepared(corpus, monkeypatch):
    prepare_text = train.loop._prepare_text

    def meanwhile(*arguments, **options):
        monkeypatch.setattr(train.loop, "_prepare_text", prepare_text)
        run("seed=2")
        return prepare_text(*arguments, **options)

    monkeypatch.setattr(train.loop, "_prepare_text", meanwhile)
    with pytest.raises(ValueError, match="resume=never, but .* holds 2 checkpoints: choose another name="):
        run("checkpoint.resume=never")
    # the other run's are as it left them
    assert read_checkpoint(Path("runs/test/checkpoints/step_00000012"))["config"]["seed"] == 2
    assert (Path("runs/test/config.yaml")).read_text().count("seed: 2\n") >= 1
    assert not list(Path("runs/test").glob("config_from_*"))


def test_more_validation_tokens_than_there_are_is_told_with_what_is_taken(corpus, capsys):
    run("evaluation.tokens=1000000")
    remark = (
        "evaluation.tokens=1000000, but the validation text has 4,384 in whole sequences, all of which an "
        "evaluation takes: lower evaluation.tokens, or prepare a larger data.validation_fraction"
    )
    assert remark in capsys.readouterr().out.splitlines()
    run("name=all", "evaluation.tokens=4384")
    assert "evaluation.tokens" not in capsys.readouterr().out
    assert read_metrics(Path("runs/all/metrics.jsonl"))[0] == read_metrics(Path("runs/test/metrics.jsonl"))[0]


def test_the_summary_measures_the_last_launch_alone(corpus):
    run()
    metrics = Path("runs/test/metrics.jsonl")
    # as if the first launch had been on a thousand times as many processes
    lines = [line | {"tokens_per_second": 1e9} for line in read_metrics(metrics)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("total_tokens=7680")
    [row] = json.loads(Path("runs/test/summary.json").read_text())["rows"]
    assert row["tokens_per_second"] < 1e8
    assert row["tokens"] == 7680


def test_a_summary_made_later_is_of_as_many_processes_as_have_measured_its_steps(corpus):
    run()
    metrics, summary = Path("runs/test/metrics.jsonl"), Path("runs/test/summary.json")
    # as if two processes had trained behind step 6, and ended before the summary was written
    lines = [
        line | ({"tokens_per_second_per_gpu": line["tokens_per_second"] / 2} if line["step"] > 6 else {})
        for line in read_metrics(metrics)
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary.unlink()
    run()
    [row] = json.loads(summary.read_text())["rows"]
    assert row["n_gpus"] == 2
    # the first of them is left out
    assert row["tokens_per_second"] == statistics.median(
        line["tokens_per_second"] for line in lines if line["step"] > 7
    )


def test_the_first_step_of_a_launch_ends_before_it_is_evaluated_and_saved(corpus, monkeypatch):
    evaluate, n_calls = train.loop.evaluate, []

    def slow(*given):
        n_calls.append(time.sleep(3 * bool(n_calls)))
        return evaluate(*given)

    monkeypatch.setattr(train.loop, "evaluate", slow)
    began = time.perf_counter()
    monkeypatch.setattr(train.loop, "begin_launch", lambda: began)
    run("total_tokens=512", "optim.warmup_steps=1")
    assert len(n_calls) == 2
    [row] = json.loads(Path("runs/test/summary.json").read_text())["rows"]
    assert row["first_step_seconds"] < time.perf_counter() - began - 3
    assert row["evaluation_seconds"] > 3


def test_a_finished_run_whose_metrics_are_gone_ends_well_and_keeps_its_summary(corpus, capsys):
    first = run()
    before = Path("runs/test/summary.json").read_bytes()
    Path("runs/test/metrics.jsonl").unlink()
    assert run() == pytest.approx(first)
    assert "metrics.jsonl holds no step with a loss: no loss curve" in capsys.readouterr().out
    assert Path("runs/test/summary.json").read_bytes() == before


def test_what_an_attempt_without_a_checkpoint_left_is_set_aside_and_named(corpus, capsys):
    run()
    for left in (Path("runs/test/checkpoints"), Path("runs/other/checkpoints")):
        left.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "config.yaml"):
        Path("runs/test", name).rename(Path("runs/other", name))
    Path("runs/other/left_out.json").write_text("[0, 1, 2]")
    Path("runs/other/sample.txt").write_text("kept")
    kept = Path("runs/other/metrics.jsonl").read_text()
    capsys.readouterr()
    # the batches that were left out are in, with the losses of a run that never had the file
    run("name=other", "seed=2")
    assert "starts over; what an attempt without a checkpoint left is in runs/other/attempt_1" in (
        capsys.readouterr().out
    )
    assert Path("runs/other/attempt_1/metrics.jsonl").read_text() == kept
    assert Path("runs/other/attempt_1/left_out.json").read_text() == "[0, 1, 2]"
    assert Path("runs/other/attempt_1/sample.txt").read_text() == "kept"
    run("name=clean", "seed=2")
    assert losses("other") == losses("clean")
    run("name=other", "seed=2")
    assert not Path("runs/other/attempt_2").exists()


def test_a_run_whose_sample_fails_is_told_and_ends_as_any_other(corpus, monkeypatch, capsys):
    def fails(*given):
        raise ValueError("the model's logits after 4 new tokens are not finite in float32")

    monkeypatch.setattr(train.report, "sample_text", fails)
    run("sample.tokens=8")
    told, warned = capsys.readouterr()
    assert "WARNING: no sample: the model's logits after 4 new tokens are not finite" in warned
    assert "checkpoints  runs/test/checkpoints" in told
    assert not Path("runs/test/sample.txt").exists()


def test_a_run_is_traced_to_the_published_weights_behind_it(corpus, monkeypatch):
    run("name=first")
    run("name=second", "start.weights=runs/first", "export=true")
    run("name=third", "start.weights=runs/second/hugging_face")
    run("name=fourth", "start.weights=runs/third", "total_tokens=512")
    assert published_folder("runs/second") is None
    assert published_folder("runs/fourth") == Path("runs/second/hugging_face")
    assert published_folder(None) is None
    # what is gone, and what names itself, cannot be followed
    assert published_folder("runs/gone") == Path("runs/gone")
    itself = {"config": {"start": {"weights": "runs/first"}}}
    monkeypatch.setattr("train.weights._read_marker", lambda place: itself)
    assert published_folder("runs/first") == Path("runs/first")


def test_a_finished_run_lists_no_sample_of_an_earlier_launch(corpus, capsys):
    run()
    capsys.readouterr()
    run("total_tokens=7168", "sample.tokens=0")
    assert "runs/test/sample.txt" not in capsys.readouterr().out


def test_a_checkpoint_that_leaves_nothing_to_train_is_refused_with_the_budget_that_would(corpus):
    run()
    message = "step 12, but total_tokens={} are {} steps .*: raise total_tokens above 6144"
    with pytest.raises(
        ValueError, match=message.format(1024, 2) + ", or choose another name= for a new run$"
    ):
        run("total_tokens=1024")
    with pytest.raises(ValueError, match=message.format(6144, 12) + "$"):
        run("name=other", "checkpoint.resume=runs/test/checkpoints/step_00000012")


@pytest.mark.parametrize(("local_rank", "told"), [("0", 1), ("1", 0)])
def test_the_first_process_of_each_host_tells_what_is_wrong(corpus, monkeypatch, local_rank, told):
    for key, value in (("RANK", "3"), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(key, value)
    process = start(*SMALL, "precision=fp8")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert errors.count("error: precision must be one of") == told


def test_a_loss_that_is_not_finite_stops_the_run_before_it_reaches_the_weights(corpus):
    with pytest.raises(
        FloatingPointError,
        match=r"loss is nan on rank 0 .* at step \d+, in batch \d+; the weights",
    ):
        run(
            "optim.learning_rate=1e30",
            "optim.gradient_clip=0",
            "checkpoint.every_steps=1",
            "checkpoint.keep_last=50",
        )
    saved = sorted(Path("runs/test/checkpoints").iterdir())
    assert saved
    assert len(saved) == len(losses()), "the step that failed left neither a checkpoint nor a metric"


def test_a_final_validation_loss_that_is_not_finite_ends_with_2_after_the_last_checkpoint(corpus):
    # the only update leaves weights that are finite, and too large
    given = [*SMALL, "total_tokens=512", "optim.learning_rate=1e30", "optim.warmup_steps=0"]
    process = start(*given)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "error: the validation loss is nan after 1 step: no summary and no sample are made of it" in errors
    assert "Traceback" not in errors
    folder = Path("runs/test")
    assert not (folder / "summary.json").exists()
    marker = folder / "checkpoints" / "step_00000001" / "checkpoint.json"
    for text in (*(folder / "metrics.jsonl").read_text().splitlines(), marker.read_text()):
        json.loads(text, parse_constant=pytest.fail)
    assert json.loads(marker.read_text())["val_loss"] is None
    # nor does it count as finished when it is started again
    process = start(*given)
    process.communicate(timeout=150)
    assert process.returncode == 2


def test_another_model_under_the_same_name_is_refused_before_any_work_and_changes_nothing(corpus):
    run()
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    with pytest.raises(ValueError, match="model.n_layer is 1 in the checkpoint and 2 in the configuration"):
        run("model.n_layer=2", "data.folder=elsewhere")
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before
    assert not Path("elsewhere").exists()


def test_another_optimizer_does_not_take_over_the_state_of_the_first(corpus):
    run("total_tokens=1024")
    with pytest.raises(ValueError, match="optim.algorithm is adamw in the checkpoint and muon in the config"):
        run("optim=muon")


def test_other_data_under_the_same_name_is_refused(corpus):
    run()
    with pytest.raises(ValueError, match="seed is 1 in the checkpoint and 2 in the configuration"):
        run("seed=2")


def test_a_resumed_run_refuses_text_that_was_prepared_anew_unless_asked_for_by_path(corpus):
    run("total_tokens=3072")
    prepared = next(Path("datasets").iterdir())
    shutil.rmtree(prepared)
    # the same tokens again
    run("total_tokens=4096")
    shutil.rmtree(prepared)
    Path("corpus/00.txt").write_text("another text\n" * 30)
    with pytest.raises(ValueError, match=f"{prepared} holds other tokens than .* with these on purpose"):
        run()
    assert len(losses()) == 8
    run("checkpoint.resume=runs/test/checkpoints/step_00000008")
    assert len(losses()) == 12


def test_a_run_that_began_with_anothers_checkpoint_goes_on_only_with_its_own_tokens(corpus):
    run("name=first", "total_tokens=2560")
    begun = ["checkpoint.resume=runs/first/checkpoints/step_00000005", "seed=2", "data.folder=prepared"]
    run(*begun, "total_tokens=4096")
    with pytest.raises(ValueError, match="seed is 2 in the checkpoint and 3 in the configuration"):
        run(*begun, "seed=3")
    shutil.rmtree("prepared")
    Path("corpus/00.txt").write_text("another text\n" * 30)
    with pytest.raises(ValueError, match="prepared holds other tokens than the checkpoint was trained on"):
        run(*begun)
    assert len(losses()) == 3


def test_a_corrupt_shard_is_refused_before_training(corpus):
    run("name=first")
    shard = next(Path("datasets").rglob("train*.bin"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"\.bin is corrupt"):
        run("name=second")
    assert not Path("runs/second").exists()


def test_a_text_too_short_for_one_step_is_refused_and_leaves_no_folder_of_the_run(corpus):
    with pytest.raises(ValueError, match="'train' in .* tokens, too few for one step of 100 "):
        run("seq_len=8192", "tokens_per_step=819200", "tokens_per_microbatch=8192")
    assert not Path("runs").exists()


def test_two_processes_give_the_loss_curve_of_one_and_draw_each_for_itself(corpus):
    run("name=one")
    config = configured("name=two")
    attempt = complete(config, 2, tell_seeds)
    for rank in (0, 1):
        draws = [line for line in attempt.log(rank).splitlines() if line.startswith("draws of")]
        assert draws == [f"draws of {(config.seed, step, rank)}" for step in range(12)]
    assert "2 processes x 1 micro-batch x 8 sequences" in attempt.log()
    assert losses("two") == pytest.approx(losses("one"), abs=1e-5)


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_an_evaluation_takes_the_same_tokens_on_any_number_of_processes_in_any_micro_batch(
    corpus, distributed
):
    # 19 sequences: of two processes with micro-batches of 4 one has 3 in the last round and the other none
    given = ["evaluation.tokens=630", "total_tokens=1024", "tokens_per_step=1024"]
    for tokens in (32, 128, 1024):
        run(f"name={tokens}", *given, f"tokens_per_microbatch={tokens}")
    complete(configured("name=two", *given, "tokens_per_microbatch=128", f"distributed={distributed}"), 2)
    first, *others = (
        [m["val_loss"] for m in read_metrics(Path("runs", name, "metrics.jsonl"))]
        for name in ("32", "128", "1024", "two")
    )
    assert len(first) == 2
    for losses in others:
        assert losses == pytest.approx(first, abs=2e-6)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["recompute=selective"],
        ["attention=reference", "+attention.patterns=['window(16)',dense]", "separate_documents=true"],
        ["cuda_graphs=false", "model.n_layer=2"],
        # 31 sequences, the last micro-batch of 8 is not full; and less than one
        ["evaluation.tokens=1000"],
        ["evaluation.tokens=100"],
    ],
    ids=["plain", "recompute", "documents", "whole", "rest", "less"],
)
def test_nothing_is_compiled_after_the_text_is_there(corpus, counter, monkeypatch, capfd, given):
    compiled = []

    def ahead(*arguments):
        compile_ahead(*arguments)
        compiled.append(counter.frame_count)

    def watched(*arguments, **options):
        compiled.append(counter.frame_count)
        return step_metrics(*arguments, **options)

    monkeypatch.setattr(train.loop, "compile_ahead", ahead)
    monkeypatch.setattr(train.loop, "step_metrics", watched)
    run("compile=true", *given)
    assert len(compiled) == 1 + 12
    assert compiled[0] == compiled[-1] > 0
    # where the text is there, it is compiled in the first step, to the same numbers
    torch._dynamo.reset()
    counter.frame_count = 0
    run("compile=true", "name=again", *given)
    assert len(compiled) == 1 + 12 + 12
    assert compiled[0] == compiled[13] == compiled[-1]
    assert losses("again") == losses("test")
    output, _ = capfd.readouterr()
    first, again = output.split("again: ")
    assert first.count("compiling the model while the text is prepared") == first.count("compiling") == 1
    assert again.count("compiling the model: the first step takes") == again.count("compiling") == 1


def test_a_model_that_does_not_fit_while_text_is_prepared_is_reported_in_its_first_step(corpus, monkeypatch):
    def forward(self, *arguments):
        raise torch.OutOfMemoryError("as on a GPU")

    monkeypatch.setattr("model.compiled.CompiledModel.forward", forward)
    with pytest.raises(MemoryError, match="out of memory on rank 0: tokens_per_microbatch=256 with"):
        run("compile=true")
    # it was looked for only after the text was there
    assert Path("datasets/text-bytes").exists()


def test_an_error_of_the_compiler_ends_the_preparation(corpus, monkeypatch):
    def build(*arguments):
        raise RuntimeError("as of a compiler")

    # at once, while the processes that tokenize are still starting
    monkeypatch.setattr("train.compile_ahead.build_step_model", build)
    with pytest.raises(RuntimeError, match="as of a compiler"):
        run("compile=true", "data.workers=2")
    assert not list(Path("datasets").iterdir())


def test_each_run_of_a_sweep_over_sizes_is_compiled(corpus, counter):
    # after so many forms of one function torch runs it uncompiled
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (16, 32):
            before = counter.frame_count
            run("compile=true", f"name={width}", f"model.n_embd={width}", "total_tokens=512")
            assert counter.frame_count > before


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_a_sweep_that_has_no_place_for_its_runs_ends_with_one_line(corpus, n_before):
    Path("runs").touch()
    words = [*SMALL, "seed=1,2", "name=seed${seed}"]
    # the flag may stand anywhere
    process = start(*words[:n_before], "--multirun", *words[n_before:])
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert errors.startswith("error: [Errno 17] File exists: ")
    assert errors.count("\n") == 1


def test_a_run_of_a_sweep_that_fails_is_told_and_the_others_are_trained(corpus):
    steps = ["total_tokens=512", "tokens_per_step=512,500,1024", "name=${tokens_per_step}"]
    process = start("--multirun", *SMALL, *steps)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert errors.count("error: ") == errors.count("error: tokens_per_step=500 must be a multiple") == 1
    assert "Traceback" not in errors
    summaries = [Path("runs", name, "summary.json") for name in ("512", "500", "1024")]
    assert [path.exists() for path in summaries] == [True, False, True]
    first, later = (
        json.loads(path.read_text())["rows"][0]["first_step_seconds"] for path in summaries if path.exists()
    )
    assert later < first, "importing torch is in the first alone"


@pytest.mark.parametrize("names", [["name=one"], ["name=seed${seed}", "logging.every_steps=1,2"]])
def test_runs_of_a_sweep_under_one_name_are_refused_before_the_first_begins(corpus, names):
    process = start("--multirun", *SMALL, "seed=1,2", *names)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert re.match(
        r"error: name=(one|seed1) would be that of 2 runs of .* as 'name=seed\$\{seed\}' does\n$", errors
    )
    assert not Path("runs").exists()


def test_runs_of_a_sweep_whose_names_turn_out_to_be_one_are_refused_but_for_the_first(corpus, monkeypatch):
    monkeypatch.setenv("NAME", "one")
    # of which the first two are refused for something else, when they begin
    paths = "data.paths=[nowhere],[corpus]"
    words = [*SMALL, "total_tokens=512", "name=${oc.env:NAME}", paths, "seed=1,2"]
    process = start("--multirun", *words)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert errors.count("error: data.paths names 'nowhere'") == 2
    assert errors.count("error: name=one was used by an earlier run") == 1
    assert errors.count("error: ") == 3
    assert "Traceback" not in errors
    assert "\nseed: 1\n" in Path("runs/one/config.yaml").read_text()


def test_a_run_whose_name_is_that_of_a_file_is_refused_before_its_text_is_prepared(corpus):
    Path("runs").mkdir()
    Path("runs/test").write_text("notes")
    with pytest.raises(ValueError, match="^runs/test is a file, and name=test needs a folder: move it away"):
        run()
    assert Path("runs/test").read_text() == "notes"
    assert sorted(path.name for path in corpus.iterdir()) == ["corpus", "runs"]


@pytest.mark.parametrize("kind", ["a file", "a link that leads nowhere"])
def test_a_run_whose_checkpoints_have_no_place_is_refused(corpus, kind):
    folder = Path("runs/blocked/checkpoints")
    folder.parent.mkdir(parents=True)
    if kind == "a file":
        folder.touch()
    else:
        folder.symlink_to("/nowhere/checkpoints")
    with pytest.raises(ValueError, match="runs/blocked/checkpoints is a file, or a link that leads nowhere"):
        run("name=blocked")
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("ends_well", [True, False])
def test_after_the_first_step_garbage_is_collected_at_log_lines_alone_until_the_run_ends(
    corpus, monkeypatch, ends_well
):
    at, collections, rings = [], [], []

    def collected(phase, info):
        if phase == "start" and at:
            collections.append(at[-1])

    class Ring:
        def __init__(self):
            self.itself = self

    def littered(*arguments):
        at.append(f"step {len(rings) + 1}")
        # fifty times what Python waits for before it collects
        rings.append([weakref.ref(Ring()) for _ in range(50 * gc.get_threshold()[0])])
        if len(rings) == 11 and not ends_well:
            raise FloatingPointError("a loss that is not finite")
        losses = forward_backward(*arguments)
        if len(rings) == 1:
            # until the first log line Python collects when it likes: not now, whatever tests ran before
            gc.collect()
        at.append(f"after step {len(rings)}")
        return losses

    forward_backward = train.loop.forward_backward
    monkeypatch.setattr(train.loop, "forward_backward", littered)
    # what conftest.py froze
    gc.unfreeze()
    gc.collect()
    gc.callbacks.append(collected)
    try:
        with nullcontext() if ends_well else pytest.raises(FloatingPointError):
            run("logging.every_steps=4", "evaluation.every_steps=5", "checkpoint.every_steps=3")
    finally:
        gc.callbacks.remove(collected)
    of_loop = [place for place in collections if place not in ("step 1", "after step 12", "step 11")]
    assert of_loop == [f"after step {step}" for step in (1, 4, 5, 8, 10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not any(ring() for step in rings[:10] for ring in step)


def two_nodes(
    *of_nodes: list[str], roots: tuple[Path, Path] = (ROOT, ROOT)
) -> tuple[list[int], list[tuple[str, str]]]:
    """Exit codes and outputs of two agents of torchrun, each with its own arguments, code and one process."""
    _, options = two_hosts()
    launcher = ("-m", "torch.distributed.run", *options)
    nodes = [
        start(*SMALL, *arguments, launcher=launcher, root=root)
        for arguments, root in zip(of_nodes, roots, strict=True)
    ]
    outputs = [node.communicate(timeout=150) for node in nodes]
    return [node.returncode for node in nodes], outputs


def test_two_nodes_with_other_code_are_refused_before_a_run_begins(corpus):
    other = corpus / "other"
    for folder in ("conf", "kernels", "model", "data", "train"):
        shutil.copytree(ROOT / folder, other / folder)
    with (other / "train" / "optim.py").open("a") as file:
        file.write("# as an edit that the other host has not\n")
    codes, outputs = two_nodes(*[["name=two"]] * 2, roots=(ROOT, other))
    assert 0 not in codes, outputs
    for _, errors in outputs:
        assert "error: the digest of train/optim.py is " in errors, errors
    assert not Path("runs/two").exists()


def test_two_nodes_by_two_torchruns_give_the_loss_curve_of_one_process(corpus):
    run("name=one")
    codes, outputs = two_nodes(*[["name=two", "distributed=fsdp", "export=true"]] * 2)
    assert codes == [0, 0], outputs
    assert sum("2 processes x 1 micro-batch x 8 sequences" in output for output, _ in outputs) == 1
    assert losses("two") == pytest.approx(losses("one"), abs=1e-5)
    # the weights that the shards make together
    exported, saved = (
        load_model(f"runs/two{place}", AttentionConfig(implementation="reference")).eval()
        for place in ("/hugging_face", "")
    )
    tokens = torch.arange(32)[None]
    assert torch.equal(exported(tokens), saved(tokens))


def test_the_command_prints_progress_for_a_person_and_says_where_everything_lies(corpus):
    began = time.perf_counter()
    process = start(*SMALL)
    output, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    [summary] = json.loads(Path("runs/test/summary.json").read_text())["rows"]
    assert 0.5 < summary["first_step_seconds"] < time.perf_counter() - began, "importing torch is in it"
    assert "validation loss 5.5" in output, "a uniform guess among 257 bytes is 5.55 nats"
    line = next(line for line in output.splitlines() if line.startswith("step 12/12"))
    for part in ("loss", "lr", "grad", "tokens/s", "MFU", "GiB", "left"):
        assert part in line
    for file in ("loss.png", "sample.txt", "metrics.jsonl", "checkpoints"):
        assert f"runs/test/{file}" in output
    assert sorted(p.name for p in corpus.iterdir()) == ["corpus", "datasets", "runs"]


def test_profile_writes_a_trace_of_a_few_steps_and_says_that_a_cpu_has_no_snapshot(corpus, capsys):
    run("profile=true")
    with gzip.open("runs/test/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("ProfilerStep")] == [
        "ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5",
    ]  # fmt: skip
    output = capsys.readouterr().out
    assert "steps 4 to 6 of this launch are in runs/test/trace.json.gz\nthere is no memory snapshot" in output
    assert output.splitlines()[-2].split() == ["trace", "runs/test/trace.json.gz"]
    # three more steps are too few for a trace: the one that is there is not this launch's
    run("profile=true", "total_tokens=7680")
    assert "trace.json.gz" not in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_told_and_ends_nothing(corpus, capsys):
    Path("runs/test/trace.json.gz").mkdir(parents=True)
    run("profile=true")
    output = capsys.readouterr()
    assert "WARNING: runs/test/trace.json.gz was not written" in output.err
    assert "steps 4 to 6" not in output.out
    assert Path("runs/test/summary.json").exists()


def test_a_trace_that_found_no_room_is_told_and_removed(corpus, capsys, monkeypatch):
    # on a full disk PyTorch's profiler writes an archive of nothing
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: gzip.open(path, "wb").close()
    )
    run("profile=true")
    output = capsys.readouterr()
    assert "WARNING: runs/test/trace.json.gz was not written (there was no room)" in output.err
    assert not Path("runs/test/trace.json.gz").exists()
    assert "trace " not in output.out


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_launch_that_ends_before_the_profile_is_whole_says_so_and_leaves_none(corpus, capsys, steps):
    run("profile=true", f"total_tokens={steps * 512}")
    output = capsys.readouterr().out
    assert f"no whole trace, which needs 6 steps of a launch, got {steps}" in output
    assert "trace.json.gz" not in output
    assert not Path("runs/test/trace.json.gz").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colour=red"], "error: colour is no key: python -m train --help lists them"),
        (["+colour=red"], "error: colour is no key: python -m train --help lists them"),
        (["device=cuda"], "error: device=cuda, but torch sees no GPU: use experiment=laptop"),
        (["data.paths=[missing]"], "missing"),
    ],
)
def test_a_wrong_command_ends_with_one_clear_error_and_no_traceback(corpus, arguments, message):
    process = start(*SMALL, *arguments)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert message in errors
    assert "Traceback" not in errors
    assert not Path("runs").exists()


def test_a_run_that_is_refused_has_not_waited_for_the_import_of_the_compiler(corpus):
    Path("runs").touch()
    _, told = start(*SMALL, launcher=("-X", "importtime")).communicate(timeout=150)
    assert "Not a directory: 'runs/test'" in told
    imported = [line.rpartition("|")[2].strip() for line in told.splitlines()]
    assert "torch" in imported
    assert "torch._dynamo" not in imported


def test_a_full_disk_is_told_with_the_folder_of_the_run_and_the_way_out(corpus):
    run("total_tokens=512")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # less than the settings have
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, limits[1]))
    process = start(*SMALL, "name=full", preexec_fn=limit)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "File too large, most likely in runs/full: make room there; the same command goes on" in errors
    assert "Traceback" not in errors


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_flash_sdpa_and_reference_train_alike_on_the_gpu(corpus, precision):
    # at the rate of 4e-3 of experiment=laptop a loss was 0.013 apart: rounding, amplified by the first steps
    calm = "optim.learning_rate=1e-3"
    on_gpu = ["device=cuda", f"precision={precision}", "model.n_embd=128", "compile=true", calm]
    for name in ("flash", "sdpa", "reference"):
        run(f"name={name}", f"attention={name}", *on_gpu)
    for other in ("sdpa", "reference"):
        assert losses("flash") == pytest.approx(losses(other), abs=1e-2)


@pytest.mark.gpu
def test_recomputation_trains_alike_and_muon_learns_on_the_gpu(corpus):
    calm = "optim.learning_rate=1e-3"
    on_gpu = ["device=cuda", "precision=bf16", "model.n_embd=128", "attention=flash", "compile=true", calm]
    for name, given in (
        ("none", "recompute=none"),
        ("selective", "recompute=selective"),
        ("full", "recompute=full"),
        ("muon", "optim=muon"),
    ):
        torch._dynamo.reset()
        run(f"name={name}", given, *on_gpu)
    assert losses("selective") == pytest.approx(losses("none"), abs=1e-2)
    assert losses("full") == pytest.approx(losses("none"), abs=1e-2)
    assert losses("muon")[-1] < losses("muon")[0]


@pytest.mark.gpu
def test_profile_on_a_gpu_leaves_kernels_in_the_trace_and_a_memory_snapshot(corpus):
    run("device=cuda", "precision=bf16", "profile=true")
    with gzip.open("runs/test/trace.json.gz", "rt") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    snapshot = pickle.loads(Path("runs/test/memory_snapshot.pickle").read_bytes())
    assert any(trace for trace in snapshot["device_traces"])


@pytest.mark.gpu
def test_deterministic_runs_on_a_gpu_end_with_the_same_bits(corpus):
    on_gpu = ["device=cuda", "precision=bf16", "attention=flash", "compile=true", "fused_loss=true"]
    try:
        for name in ("first", "second"):
            run(f"name={name}", "deterministic=true", "model.n_embd=128", *on_gpu)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in weights("first", 12).items():
        assert torch.equal(weights("second", 12)[key], value), key


def test_metrics_are_on_the_disk_before_the_checkpoint_that_they_lead_to(corpus, monkeypatch):
    done = []
    sync, save = RunLogger.sync, CheckpointSaver.save
    monkeypatch.setattr(RunLogger, "sync", lambda self: done.append("sync") or sync(self))
    monkeypatch.setattr(
        CheckpointSaver, "save", lambda self, *given: done.append("save") or save(self, *given)
    )
    run()
    # after 5, 10 and 12 steps
    assert done == ["sync", "save"] * 3


def test_memory_that_a_cpu_lacks_ends_a_run_with_what_takes_less(corpus, monkeypatch):
    monkeypatch.setattr(train.state, "build_weights", lambda *given, **options: torch.empty(2**50))
    with pytest.raises(
        MemoryError, match="^out of memory on rank 0: tokens_per_microbatch=256 with recompute="
    ):
        run()


def test_errors_that_are_not_of_memory_keep_their_words(corpus, monkeypatch):
    monkeypatch.setattr(train.state, "build_weights", lambda *given, **options: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        run()


def test_a_curve_is_drawn_over_tokens_and_named_with_its_last_validation_loss(corpus, figures):
    lines = [(0, None, 5.0), (10, 4.0, 3.0), (20, 3.5, 3.25)]
    keys = ("tokens", "train_loss", "val_loss")
    text = [json.dumps({"step": i, **dict(zip(keys, line, strict=True))}) for i, line in enumerate(lines)]
    Path("metrics.jsonl").write_text("\n".join(text))
    # to Matplotlib the name of what has none in a legend
    train.plot.draw_loss({"_a": Path("metrics.jsonl")}, Path("loss.png"), "title")
    [axes] = figures[0].axes
    drawn = [[list(map(float, numbers)) for numbers in line.get_data()] for line in axes.get_lines()]
    assert drawn == [[[10, 20], [4.0, 3.5]], [[0, 10, 20], [5.0, 3.0, 3.25]]]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["_a, training", "_a, validation (3.250 at the end)"]
    assert axes.get_title() == "title"


@pytest.mark.parametrize(("name", "title"), [(r"$\none$", "title"), ("name", r"$\none$")])
def test_a_name_or_a_title_that_would_be_no_formula_is_drawn_as_it_is(corpus, name, title):
    Path("metrics.jsonl").write_text('{"step": 1, "tokens": 10, "train_loss": 4.0}\n')
    train.plot.draw_loss({name: Path("metrics.jsonl")}, Path("loss.png"), title)
    assert Path("loss.png").exists()


def test_a_picture_that_a_full_disk_does_not_take_leaves_the_earlier_one(corpus, monkeypatch):
    def fill(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path("metrics.jsonl").write_text('{"step": 1, "tokens": 10, "train_loss": 4.0}\n')
    Path("loss.png").write_bytes(b"earlier")
    monkeypatch.setattr("os.fsync", fill)
    with pytest.raises(OSError, match="No space left"):
        train.plot.draw_loss({"a": Path("metrics.jsonl")}, Path("loss.png"), "title")
    assert {path.name: path.read_bytes() for path in Path().glob("*loss.png*")} == {"loss.png": b"earlier"}


def test_the_legend_names_runs_as_they_are_called(corpus, figures):
    run("total_tokens=1024")
    figures.clear()
    path = Path("runs/test/metrics.jsonl")
    train.plot.draw_loss({"_a$^$b": path, "c_$x$": path}, Path("loss.png"), "two $^$ runs")
    (axes,) = figures[0].axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [text.split(", ")[0] for text in texts] == ["_a$^$b", "_a$^$b", "c_$x$", "c_$x$"]
    assert axes.get_title() == "two $^$ runs"


def test_a_run_leaves_the_figures_and_the_backend_of_a_notebook_as_they_are(corpus, monkeypatch):
    from matplotlib import pyplot, rcParams

    monkeypatch.setitem(rcParams, "backend", "svg")
    own = pyplot.figure()
    run("total_tokens=1024")
    Path("begun.jsonl").write_text('{"step": 0, "tokens": 0, "val_loss": 5.0}\n')
    with pytest.raises(ValueError, match="holds no training loss yet"):
        train.plot.draw_loss({"a": Path("begun.jsonl")}, Path("loss.png"), "title")
    assert rcParams["backend"] == "svg"
    assert pyplot.get_fignums() == [own.number]
    pyplot.close(own)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_checkpoint_of_the_run_that_was_moved_and_linked_is_its_own(corpus, capsys, is_named):
    run()
    step = 10 if is_named else 12
    path, disk = Path(f"runs/test/checkpoints/step_000000{step}"), corpus / "disk"
    disk.mkdir()
    path.rename(disk / path.name)
    path.symlink_to(disk / path.name)
    if not is_named:
        run()
        assert "all 12 steps are done already" in capsys.readouterr().out
        return
    shutil.rmtree("runs/test/checkpoints/step_00000012")
    with pytest.raises(ValueError, match="counts its steps in one"):
        run(f"checkpoint.resume={path}", "tokens_per_step=1024")
    run(f"checkpoint.resume={path}")
    assert read_metrics(Path("runs/test/metrics.jsonl"))[-1]["step"] == 12


def test_a_new_run_exports_over_no_folder_that_it_has_not_made(corpus):
    Path("runs/test/hugging_face").mkdir(parents=True)
    with pytest.raises(ValueError, match="hugging_face, which no run of this name has made"):
        run("export=true")


def test_the_first_step_is_logged_however_few_are(corpus):
    run("logging.every_steps=5", "evaluation.every_steps=0")
    assert [m["step"] for m in read_metrics(Path("runs/test/metrics.jsonl"))] == [0, 1, 5, 10, 12]


def test_the_sample_of_a_run_is_drawn_by_its_seed(corpus, monkeypatch):
    drawn = train.report.sample_text
    seeds = []

    def watched(model, tokenizer, config, seed, mark):
        seeds.append(seed)
        return drawn(model, tokenizer, config, seed, mark)

    monkeypatch.setattr(train.report, "sample_text", watched)
    run("seed=7")
    assert seeds == [7]


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_are_asked_of_pytorch_as_configured(deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_arithmetic(configured(f"deterministic={str(deterministic).lower()}"))
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(before)
