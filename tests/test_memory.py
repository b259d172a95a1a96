"""train/memory.py and train/speed.py against what was measured, and train/out_of_memory.py."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import torch

import model.gpt
from model import GPT, AttentionConfig
from model.compiled import CompiledModel
from model.config import layer_matrices
from model.recompute import RECOMPUTE
from model.rope import RotaryConfig
from scripts import plan
from scripts.plan import Arguments, choose_rates, compare, measured
from tests.test_config import composed
from tests.test_context_parallel import NoGroup
from tests.test_scripts import write_model
from train.config import Config, parse
from train.context_parallel import SharedSequences
from train.logger import readable
from train.lora import LoraConfig
from train.memory import (
    backward_bytes,
    count_weights,
    kept_bytes,
    largest_microbatch,
    microbatches,
    peak_bytes,
)
from train.out_of_memory import EXIT_OUT_OF_MEMORY, end_out_of_memory, way_out
from train.speed import RATES, fit_rates, step_seconds, step_work

H200 = 150_123_077_632
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "h200"
# rows of logits that the fused loss held when these were measured; the oldest had 16,384
MEASURED_LOGIT_ROWS = 11264
# of four GPUs that share a sequence; with 8 sequences at once the GPU waits for Python
NOT_PLANNED = ("training_1048576.json", "8.json")
FILES = [
    str(path)
    for path in (*RESULTS.glob("training_*.json"), *RESULTS.glob("microbatches/*.json"))
    if path.name not in NOT_PLANNED
]
# as few rows as a probe has; all of FILES, of several hosts, predict the large model 12% too fast
PROBE = [f"training_{name}.json" for name in ("ladder", "lengths", "350m")]


def config(*overrides: str):
    return parse(composed(*overrides))


@cache
def known() -> list[tuple[dict, Config]]:
    """Every measured row that the plan knows, and its configuration."""
    return measured("compare", FILES)


@cache
def rows() -> list[dict]:
    return [compare(row, config, RATES["H200"], MEASURED_LOGIT_ROWS) for row, config in known()]


def test_the_errors_of_a_plan_are_those_of_what_it_predicts():
    row, config = known()[0]
    double = {key: 2 * row[key] for key in ("peak_memory_bytes", "step_ms")}
    was, now = (compare(given, config, RATES["H200"], MEASURED_LOGIT_ROWS) for given in (row, row | double))
    # half of what was measured, and twice as fast
    assert 1 + now["memory_error"] == pytest.approx((1 + was["memory_error"]) / 2)
    assert 1 + now["speed_error"] == pytest.approx((1 + was["speed_error"]) * 2)


def test_memory_is_predicted_within_five_percent_of_every_measured_row():
    assert len(rows()) >= 32
    assert max(abs(row["memory_error"]) for row in rows()) < 0.05


def test_speed_is_predicted_within_ten_percent_of_every_measured_row():
    assert max(abs(row["speed_error"]) for row in rows()) < 0.10


@pytest.mark.parametrize(
    ("pattern", "tokens_per_second", "gib"),
    [
        ("dense", 115.0e3, 21.92),
        ("window(1024) | strided(16)", 438.7e3, 22.11),
        ("window(1024) | strided(32)", 485.9e3, 22.11),
    ],
)
def test_block_sparse_layers_are_predicted_within_ten_percent(pattern, tokens_per_second, gib):
    tokens = [f"{name}=65536" for name in ("seq_len", "tokens_per_step", "tokens_per_microbatch")]
    sparse = config("attention=strided", f"attention.patterns=['{pattern}']", *tokens)
    assert 65536 / step_seconds(sparse, RATES["H200"]) == pytest.approx(tokens_per_second, rel=0.1)
    assert peak_bytes(sparse, chunk=MEASURED_LOGIT_ROWS) / 2**30 == pytest.approx(gib, rel=0.05)


def test_layers_take_the_time_of_their_patterns_in_turn():
    def attention(*patterns: str) -> float:
        given = AttentionConfig(implementation="flash", patterns=list(patterns))
        return step_work(replace(config("seq_len=8192"), attention=given), 1)["attention"]

    dense, window = attention("dense"), attention("window(1024)")
    assert window < 0.3 * dense
    assert attention("window(1024)", "window(1024)", "dense") == pytest.approx((2 * window + dense) / 3)


@pytest.mark.parametrize(
    ("given", "share"), [([], 1), (["distributed=fsdp"], 8), (["distributed=fsdp", "shard_processes=2"], 2)]
)
def test_a_process_is_planned_to_update_its_own_share_of_the_weights_alone(given, share):
    planned = config("tokens_per_step=262144", *given)

    def update(processes: int) -> float:
        # what does not grow with the tokens of a process
        once, twice = (
            step_work(replace(planned, tokens_per_step=tokens), processes)["memory"]
            for tokens in (262144, 524288)
        )
        return 2 * once - twice

    assert update(8) == pytest.approx(update(1) / share)


def test_a_probe_of_small_models_predicts_a_large_one():
    probe = [(row, config) for row, config in known() if row["source"] in PROBE]
    rates = fit_rates([config for _, config in probe], [row["step_ms"] / 1000 for row, _ in probe], 3.3e12)
    large = [found for found in known() if found[0]["model"] == "gpt2_xl"]
    assert large
    for row, config in large:
        assert step_seconds(config, rates) == pytest.approx(row["step_ms"] / 1000, rel=0.1)


def test_a_card_whose_probe_had_no_gelu_inside_of_products_is_planned_without(tmp_path, capsys):
    def speeds(*, had: bool, asked: bool, first_had: bool = False) -> str:
        rows = []
        for name, seq_len in (("gpt2", 1024), ("gpt2", 8192), ("gpt2_medium", 1024)):
            fused_gelu = had or (first_had and not rows)
            given = {"model": name, "seq_len": seq_len, "tokens_per_step": 32768, "fused_gelu": fused_gelu}
            of_row = config(*(f"{key}={value}" for key, value in given.items()))
            row = {"compile": True, "implementation": "flash", "tokens_per_second": 1.0, "precision": "bf16"}
            row |= {"fused_loss": True, "low_precision_residual": True, "batch": 32768 // seq_len, **given}
            rows.append(row | {"step_ms": 1000 * step_seconds(of_row, RATES["H200"])})
        (tmp_path / "probe.json").write_text(json.dumps({"rows": rows}))
        train = ["tokens_per_step=32768", f"fused_gelu={asked}"]
        plan.main(Arguments(probe=[str(tmp_path / "probe.json")], memory_gib=140.0, train=train))
        return capsys.readouterr().out

    told = "fused_gelu=true: no row of the probe had it, planned without fused GELU\n"
    apart = speeds(had=False, asked=False)
    assert told not in apart
    assert speeds(had=False, asked=True).replace(told, "") == apart
    inside = speeds(had=True, asked=True)
    assert told not in inside
    assert inside.split("tokens/s")[0] != apart.split("tokens/s")[0]
    # one row is enough to show that the card can
    assert told not in speeds(had=False, asked=True, first_had=True)


def test_a_probe_that_cannot_tell_the_rates_apart_is_refused():
    with pytest.raises(ValueError, match="the probe must hold at least two lengths and two models"):
        fit_rates([config()] * 3, [0.1, 0.1, 0.1], 3.3e12)
    with pytest.raises(ValueError, match="gpu='A100' has no rates, H200 has: name it, or give probe="):
        choose_rates(Arguments(gpu="A100"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processes": 0}, "processes must be at least 1, got 0: give the number of GPUs"),
        ({"memory_gib": -3.0}, "memory_gib must be above 0, got -3.0: give that of one GPU, as memory_gib="),
        ({"memory_gib": math.nan}, "memory_gib must be above 0, got nan: give"),
        ({"memory_gib": math.inf}, "memory_gib must be above 0, got inf: give"),
        ({"probe_bandwidth": 0.0}, "probe_bandwidth must be above 0, got 0.0: give bytes/s, as probe_band"),
        ({"probe_bandwidth": math.nan}, "probe_bandwidth must be above 0, got nan: give"),
        ({"probe_bandwidth": math.inf}, "probe_bandwidth must be above 0, got inf: give"),
        ({"chunk": 0}, "chunk must be at least 1, got 0: leave it out for today's 8448"),
    ],
)
def test_a_plan_refuses_what_no_machine_has_by_argument_value_and_way_out(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plan.main(Arguments(**{"gpu": "H200", "memory_gib": 140.0, "compare": FILES, "probe": FILES} | given))


def test_a_plan_refuses_processes_that_do_not_divide_into_those_that_share_sequences():
    with pytest.raises(ValueError, match="context_parallel=4 must divide the 2 processes"):
        plan.main(Arguments(gpu="H200", memory_gib=140.0, processes=2, train=["context_parallel=4"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk": 16384}, r"chunk=16384 is read with compare=\[FILE\] only: give that, or leave it out"),
        ({"out": "plan.json"}, "out=plan.json is read with compare="),
        (
            {"compare": FILES, "processes": 64},
            "^processes=64, but the rows of compare=.* are of one GPU each: le",
        ),
        ({"probe_bandwidth": 2e12}, "probe_bandwidth=2000000000000.0 is read with probe="),
        ({"compare": FILES, "train": ["model=gpt2_xl"]}, r"of its rows, got \['model=gpt2_xl'\]: leave"),
        ({"train": ["model=gpt2,llama"]}, "model=gpt2,llama has several values: give one, or put brackets"),
    ],
)
def test_a_plan_refuses_what_it_would_not_read(given, message):
    with pytest.raises(ValueError, match=message):
        plan.main(Arguments(gpu="H200", memory_gib=140.0, **given))


def test_a_plan_refuses_longer_positions_of_weights_that_have_room_as_training_does(tmp_path):
    write_model(tmp_path / "start", vocab_size=257, max_seq_len=64)
    given = ["experiment=laptop", "data.tokenizer=bytes", f"start.weights={tmp_path / 'start'}"]
    given += ["start.positions=interpolate", "name=test"]
    assert plan.composed([*given, "seq_len=128"]).model.max_seq_len == 128
    with pytest.raises(ValueError, match="start.positions=interpolate has no effect with seq_len=64"):
        plan.composed([*given, "seq_len=64"])


def test_a_plan_says_what_it_leaves_out_where_that_is_there(capsys):
    def printed(processes: int, *overrides: str) -> str:
        plan.plan(config(*overrides), RATES["H200"], H200, processes)
        return capsys.readouterr().out

    plain = printed(1, "attention.block_size=64")
    assert "exchange" not in plain
    assert "slower" not in plain
    assert "exchange between processes is not counted" in printed(4)
    given = ("model.dropout=0.1", "deterministic=true", "attention=window", "attention.block_size=64")
    expected = "model.dropout=0.1, deterministic=true, attention.block_size=64: slower than planned here"
    assert expected in printed(1, *given)


def test_a_plan_says_which_heads_and_precisions_the_fast_kernels_do_not_take(capsys):
    def printed(*overrides: str) -> str:
        plan.plan(config(*overrides), RATES["H200"], H200, 1)
        return capsys.readouterr().out

    for head_dim in (24, 136):
        remark = f"model.head_dim={head_dim}: slower than planned here"
        assert remark in printed(f"+model.head_dim={head_dim}")
    assert "slower" not in "".join(printed(f"+model.head_dim={n}") for n in (32, 128, 256))
    # the rates of products are of 16 bits: memory alone
    wide = printed("precision=fp32", "model.dropout=0.1")
    assert "precision=fp32, model.dropout=0.1: no speed: the" in wide
    assert "GiB  as given" in wide
    assert "tokens/s" not in wide
    assert "a step" not in wide


def test_a_plan_says_whether_memory_or_the_step_limits_the_micro_batch(capsys):
    def limits(processes: int, tokens: int) -> list[str]:
        given = config("model=gpt2_xl", "seq_len=4096", f"tokens_per_step={tokens}")
        plan.plan(given, RATES["H200"], H200, processes)
        return [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[-3:]]

    by_memory, by_step = "the largest that fits", "all of tokens_per_step"
    assert limits(1, 131072) == [by_memory, by_memory, by_step]
    assert limits(1, 1048576) == [by_memory] * 3
    assert limits(8, 1048576) == [by_memory, by_memory, by_step]


def test_a_plan_reads_rows_of_whole_training_steps_alone(tmp_path):
    (tmp_path / "notes.md").write_text("no JSON")
    (tmp_path / "bytes.json").write_bytes(b"\xa2")
    for path in (tmp_path / "notes.md", tmp_path / "bytes.json", RESULTS / "attention.json"):
        message = f"^probe: {path} is no result file of scripts.benchmark_training: name one that its out="
        with pytest.raises(ValueError, match=message):
            measured("probe", [str(path)])
    missing = tmp_path / "missing.json"
    with pytest.raises(
        ValueError, match=rf"^probe: {missing} cannot be read \(No such file or directory\): corr"
    ):
        measured("probe", [str(missing)])
    slow = {"compile": False, "implementation": "sdpa", "tokens_per_second": 1.0}
    full = {"compile": True, "implementation": "flash", "tokens_per_second": None}
    other_rates = {"compile": True, "implementation": "flash", "tokens_per_second": 1.0, "precision": "fp32"}
    (tmp_path / "other.json").write_text(json.dumps({"rows": [slow, full, other_rates]}))
    with pytest.raises(
        ValueError, match=r"^probe: .*other.json must hold a row compiled with flash .* got none"
    ):
        measured("probe", [str(tmp_path / "other.json")])


def test_a_plan_reads_rows_in_either_precision_of_16_bits(tmp_path):
    row = json.loads((RESULTS / "training_350m.json").read_text())["rows"][0]
    given = [{**row, "precision": precision} for precision in ("bf16", "fp16", "fp32")]
    (tmp_path / "r.json").write_text(json.dumps({"rows": given}))
    found = measured("compare", [str(tmp_path / "r.json")])
    assert [config.precision for _, config in found] == ["bf16", "fp16"]


def test_a_plan_reads_which_biases_a_measured_model_had(tmp_path):
    row = json.loads((RESULTS / "training_350m.json").read_text())["rows"][0]
    (tmp_path / "r.json").write_text(json.dumps({"rows": [row, {**row, "bias": "none"}]}))
    (_, older), (_, without) = measured("compare", [str(tmp_path / "r.json")])
    assert (older.model.bias, without.model.bias) == ("all", "none")
    assert peak_bytes(without) < peak_bytes(older)


def test_a_plan_without_a_gpu_asks_for_one_by_name():
    with pytest.raises(ValueError, match=r"sees no GPU: give gpu=H200, or .* probe=\[FILE\] and memory_gib"):
        choose_rates(Arguments())


def test_a_plan_knows_a_card_in_small_letters_too_and_its_memory(capsys):
    printed = []
    for given in ({"gpu": "h200"}, {"gpu": "H200", "memory_gib": H200 / 2**30}):
        plan.main(Arguments(**given))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert plan.card_memory(Arguments(gpu="h200")) == H200


@pytest.mark.parametrize("gpu", ["H200", "NVIDIA H200", "H200-SXM", "nvidia h200"])
def test_a_plan_has_the_memory_of_the_card_that_it_is_asked_about_however_that_is_named(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85 * 10**9)
    )
    assert choose_rates(Arguments(gpu=gpu)) == RATES["H200"]
    assert plan.card_memory(Arguments(gpu=gpu)) == H200
    assert plan.card_memory(Arguments()) == 85 * 10**9


@pytest.mark.parametrize("gpu", ["A100", "NVIDIA H200 MIG 1g.18gb"])
def test_a_plan_takes_this_machines_memory_for_no_card_of_another_name(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85 * 10**9)
    )
    with pytest.raises(ValueError, match=f"^memory_gib=0, but the memory of gpu='{gpu}' is not known: give"):
        plan.card_memory(Arguments(gpu=gpu))


def test_the_rows_that_a_plan_names_for_a_card_without_rates_are_there_and_enough(capsys):
    with pytest.raises(ValueError, match="gpu='h100' has no rates, .* or give 'probe=") as refused:
        choose_rates(Arguments(gpu="h100"))
    probe, memory = re.search(r"'probe=\[(.*)\]' memory_gib=(\d+)", str(refused.value)).groups()
    plan.main(Arguments(probe=[str(ROOT / probe)], memory_gib=float(memory)))
    assert "on 1 GPU of 79.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": False, "mlp_width": 100}, {"rotary": {"base": 1e4}, "norm": "rms", "bias": "none"}],
)
def test_weights_are_counted_as_the_model_has_them(changes):
    shape = replace(config().model, n_layer=2, n_embd=96, vocab_size=1000, **changes)
    gpt = GPT(shape, AttentionConfig(implementation="sdpa"))
    assert count_weights(shape) == sum(p.numel() for p in gpt.parameters())


def test_recomputation_fsdp_and_smaller_micro_batches_take_less():
    xl = config("model=gpt2_xl", "tokens_per_microbatch=16384", "tokens_per_step=524288")
    kinds = ("none", "selective", "full")
    none, selective, full = (peak_bytes(replace(xl, recompute=kind)) for kind in kinds)
    assert full < selective < none
    assert peak_bytes(replace(xl, tokens_per_microbatch=8192)) < none
    gathered_in_turn = replace(xl, distributed="fsdp")
    gathered_at_once = replace(gathered_in_turn, reshard_after_forward=False)
    assert peak_bytes(gathered_in_turn, 4) < peak_bytes(gathered_at_once, 4) < none
    wide = replace(xl, tokens_per_microbatch=65536)
    assert peak_bytes(wide) < peak_bytes(replace(wide, fused_loss=False))


def test_a_wide_stream_and_each_kind_of_recomputation_are_planned_to_take_longer():
    narrow = config("fused_gelu=false", "low_precision_residual=true")
    changes = [{}, {"recompute": "selective"}, {"recompute": "full"}]
    none, selective, full = (step_seconds(replace(narrow, **change), RATES["H200"]) for change in changes)
    assert none < selective < full
    assert none < step_seconds(replace(narrow, low_precision_residual=False), RATES["H200"])


def test_muon_is_planned_with_one_moment_of_its_matrices_and_the_products_of_its_update():
    adamw, muon = config(), config("optim=muon")
    layers, short, longs = 12, 768, (2304, 768, 3072, 3072)
    assert peak_bytes(adamw) - peak_bytes(muon) == layers * 4 * short * sum(longs)
    update = step_work(muon, 1)["products"] - step_work(adamw, 1)["products"]
    # five times x x^T, its square, and their product with x
    once = sum(2 * short**2 * long + 2 * short**3 + 2 * short**2 * long for long in longs)
    assert update == pytest.approx(layers * 5 * once)


def test_turned_queries_and_keys_are_planned_to_be_kept_beside_those_before():
    llama = config("model=llama")
    learned = replace(llama, model=replace(llama.model, rotary=None))
    # 12 heads of queries and 4 of keys, of 64 channels in bf16
    assert kept_bytes(llama, 2, 2) - kept_bytes(learned, 2, 2) == 2 * (12 + 4) * 64


def test_memory_of_shards_on_four_gpus_is_predicted_within_five_percent():
    measured = json.loads((RESULTS / "scaling" / "four_1558m_fsdp.json").read_text())
    xl = config(
        "model=gpt2_xl", "distributed=fsdp", "reshard_after_forward=false", "tokens_per_microbatch=16384",
        "tokens_per_step=524288",
    )  # fmt: skip
    assert abs(peak_bytes(xl, measured["n_gpus"]) / measured["rows"][0]["peak_memory_bytes"] - 1) < 0.05


def test_memory_of_a_sequence_that_four_gpus_share_is_predicted_within_five_percent():
    measured = json.loads((RESULTS / "training_1048576.json").read_text())
    million = config(
        "+model.rotary.base=500000", "context_parallel=4", "seq_len=1048576", "tokens_per_microbatch=262144",
        "tokens_per_step=1048576",
    )  # fmt: skip
    # as many rows of logits as were held at the time
    predicted = peak_bytes(million, measured["n_gpus"], chunk=16384)
    assert abs(predicted / measured["rows"][0]["peak_memory_bytes"] - 1) < 0.05


@pytest.mark.parametrize("rotary", [None, RotaryConfig(base=100.0)], ids=["learned", "rotary"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared"])
def test_compiled_layers_keep_what_is_planned(shares, recompute, rotary, monkeypatch):
    # the partition of graphs that decides what is kept, without the minute that C++ takes
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("model.compiled.compiled_once", cache(compiled))
    given = config(f"context_parallel={1 + shares}", "precision=fp32", f"recompute={recompute}")
    implementation = "reference" if shares else "sdpa"
    tokens, kept = torch.zeros(1, 256, dtype=torch.int64), []
    for n_layer in (2, 4):
        torch._dynamo.reset()
        shape = replace(given.model, n_layer=n_layer, n_embd=64, n_head=2, n_kv_head=2, rotary=rotary)
        gpt = GPT(shape, AttentionConfig(implementation=implementation), recompute=recompute)
        weights = {parameter.untyped_storage()._cdata for parameter in gpt.parameters()}
        model, storages = CompiledModel(gpt, whole=shares), {}
        if shares:
            model = SharedSequences(model, NoGroup(1))

        def keep(x, storages=storages):
            # the state of the generator, to which a recomputed layer is set back, is as large for any tokens
            if x.dtype != torch.uint8:
                storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens, tokens)
        kept.append(sum(x.nbytes() for key, x in storages.items() if key not in weights))
        loss.backward()
    planned = kept_bytes(replace(given, model=shape), 4, 4)
    assert (kept[1] - kept[0]) / 2 / tokens.numel() == pytest.approx(planned, rel=0.01)


def test_a_line_of_a_plan_tells_the_speed_of_whole_steps_on_all_gpus():
    given = config("tokens_per_microbatch=8192", "tokens_per_step=131072")
    # each has a quarter of the tokens
    alone, shared = (step_work(given, n_gpus) for n_gpus in (1, 4))
    assert [shared[name] * 4 for name in ("products", "attention", "layer")] == pytest.approx(
        [alone[name] for name in ("products", "attention", "layer")]
    )
    seconds = step_seconds(given, RATES["H200"], 4)
    speed = f" {readable(131072 / seconds)} tokens/s  {seconds:.3f} s a step  "
    assert speed in plan.line(given, RATES["H200"], 4, "as given")
    assert f" {peak_bytes(given, 4) / 2**30:.1f} GiB" in plan.line(given, RATES["H200"], 4, "as given")


def test_the_largest_errors_of_a_comparison_are_those_below_the_measured_too(monkeypatch, capsys):
    found = [({}, None)] * 2
    errors = iter([(-0.09, 0.02), (0.01, -0.05)])
    monkeypatch.setattr(plan, "measured", lambda *_: found)
    monkeypatch.setattr(
        plan, "compare", lambda *_: dict(zip(("memory_error", "speed_error"), next(errors), strict=True))
    )
    monkeypatch.setattr(plan, "describe", str)
    plan.main(Arguments(gpu="H200", compare=["rows.json"]))
    assert "2 rows; largest errors: memory 9.0%, speed 5.0%" in capsys.readouterr().out


def test_a_line_of_a_comparison_has_gib_and_milliseconds_with_the_error_of_each():
    row = {"model": "gpt2", "bias": "all", "seq_len": 1024, "batch": 8, "recompute": "none"}
    row |= {"fused_loss": True, "peak_memory_bytes": 3 * 2**30, "step_ms": 50.0}
    told = plan.describe(row | {"memory_error": 0.04, "speed_error": -0.07})
    assert "   3.0 GiB (+4.0%)     50.0 ms (speed -7.0%)" in told


def test_the_buckets_of_averaged_gradients_are_planned_to_stay_in_each_micro_batch():
    alone = config("tokens_per_microbatch=32768", "tokens_per_step=32768")
    averaged = replace(alone, tokens_per_step=4 * 32768)
    assert averaged.accumulation(4) == alone.accumulation(1) == 1
    # the peak is at the loss, where a process alone has no gradients
    assert peak_bytes(averaged, 4) - peak_bytes(alone) == 4 * count_weights(alone.model)


def test_processes_that_share_sequences_may_take_parts_of_one_at_once():
    shared = config(
        "seq_len=8192", "context_parallel=4", "tokens_per_microbatch=2048", "tokens_per_step=65536"
    )
    assert microbatches(shared, 4) == [16384, 8192, 4096, 2048]


def test_a_plan_offers_to_gather_weights_in_turn_where_that_saves_memory(capsys):
    kept = config("distributed=fsdp", "reshard_after_forward=false")
    plan.plan(kept, RATES["H200"], H200, 1)
    assert "with reshard_after_forward=true" not in capsys.readouterr().out
    plan.plan(kept, RATES["H200"], H200, 4)
    assert "all of tokens_per_step with reshard_after_forward=true" in capsys.readouterr().out


def test_the_largest_micro_batch_fits_divides_the_step_and_is_the_largest():
    xl = config("model=gpt2_xl", "tokens_per_step=393216", "tokens_per_microbatch=1024")
    found = largest_microbatch(xl, H200)
    assert 393216 % found.tokens_per_microbatch == 0
    assert peak_bytes(found) < 0.95 * H200
    larger = [tokens for tokens in microbatches(xl) if tokens > found.tokens_per_microbatch]
    assert peak_bytes(replace(xl, tokens_per_microbatch=larger[-1])) > 0.94 * H200
    assert largest_microbatch(xl, 16 * 2**30) is None
    # six percent of a card are left for what is no tensor
    for share, fits in ((0.95, False), (0.93, True)):
        given = largest_microbatch(xl, int(peak_bytes(found) / share))
        assert (given.tokens_per_microbatch == found.tokens_per_microbatch) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_on_this_gpu_is_as_predicted(recompute, tmp_path):
    given = ["tokens_per_step=16384", "tokens_per_microbatch=16384"]
    measuring = [f"recompute=[{recompute}]", "steps=2", "warmup_steps=3", f"out={tmp_path / 'measured.json'}"]
    # by a process of its own: what other tests leave in this one, or give back meanwhile, is none of a run's
    subprocess.run(
        [sys.executable, "-m", "scripts.benchmark_training", *given, *measuring], cwd=ROOT, check=True
    )
    [row] = json.loads((tmp_path / "measured.json").read_text())["rows"]
    predicted = peak_bytes(config(*given, f"recompute={recompute}"))
    assert predicted == pytest.approx(row["peak_memory_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["compile=false"], "compile=true"),
        (["compile=false", "attention=sdpa"], "compile=true attention.implementation=flash"),
        (["attention=sdpa", "lora.rank=8"], "attention.implementation=flash lora.rank=0"),
    ],
)
def test_of_what_is_not_predicted_those_words_are_named_that_would_be(given, wanted):
    run = config(*(word for word in given if not word.startswith("lora")))
    # adapters need weights to start from
    run.lora.rank = 8 if "lora.rank=8" in given else 0
    with pytest.raises(
        ValueError, match=f"^memory is predicted of compiled runs .*: give {wanted} too, to plan"
    ):
        peak_bytes(run)


def test_the_way_out_is_predicted_for_the_products_that_the_gpu_has(monkeypatch):
    gated = config("+model.mlp=swiglu", "++model.bias=none", "tokens_per_step=524288")
    gated = replace(gated, tokens_per_microbatch=524288)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=H200)
    )
    processes = SimpleNamespace(device=torch.device("cuda"), rank=0, world_size=1)
    for has in (True, False):
        monkeypatch.setattr("train.out_of_memory.has_fused_gelu", lambda device, has=has: has)
        with pytest.raises(MemoryError) as raised:
            end_out_of_memory(gated, processes)
        assert str(raised.value).endswith(way_out(replace(gated, fused_gelu=has), H200, 1))
    assert way_out(gated, H200, 1) != way_out(replace(gated, fused_gelu=False), H200, 1)


def test_the_way_out_of_too_large_a_step_names_what_fits():
    big = config("model=gpt2_xl", "tokens_per_step=524288", "tokens_per_microbatch=131072")
    message = way_out(big, H200, 1)
    assert "tokens_per_microbatch=131072 with recompute=none does not fit" in message
    assert "use recompute=none tokens_per_microbatch=32768 (predicted" in message
    assert "or recompute=full tokens_per_microbatch=131072 (predicted" in message
    # a prediction that was too low is not repeated
    small = config("tokens_per_microbatch=32768")
    assert "recompute=none tokens_per_microbatch=16384" in way_out(small, H200, 1)
    # which keep their activations from the third step on
    assert ", or cuda_graphs=false if the first two steps fitted; " in way_out(small, H200, 1)
    assert "cuda_graphs" not in way_out(replace(small, cuda_graphs=False), H200, 1)
    assert "cuda_graphs" not in way_out(replace(small, context_parallel=2), H200, 2)
    assert "nor does one sequence: use recompute=full, distributed=fsdp" in way_out(big, 16 * 2**30, 1)
    assert "; python -m scripts.plan with the same arguments lists more" in way_out(small, H200, 1)
    # half exactly is tried, and of three sequences one
    third = config("seq_len=1024", "tokens_per_microbatch=3072", "tokens_per_step=6144", "compile=false")
    assert "use tokens_per_microbatch=1024" in way_out(third, H200, 1)
    # weights that are kept for a step are given back first
    kept = replace(big, distributed="fsdp", reshard_after_forward=False, recompute="full")
    assert "in less memory use reshard_after_forward=true tokens_per_microbatch=" in way_out(
        kept, 13 * 2**30, 8
    )
    assert "less memory use reshard_after_forward=true, or tokens" in way_out(kept, None, 8)
    # alone a process has all of them either way
    assert "reshard" not in way_out(kept, None, 1) + way_out(kept, H200, 1)
    # what is not predicted is halved
    adapters = LoraConfig(rank=8, alpha=16.0, embeddings_and_norms=True)
    beside = replace(small, lora=adapters, start=replace(small.start, weights="published"))
    for unknown in (replace(small, compile=False), beside):
        message = way_out(replace(unknown, cuda_graphs=False), H200, 1)
        assert message.endswith("in less memory use tokens_per_microbatch=16384")


def out_of_memory(rank: int, who: int) -> None:
    """One rank's GPU is too small for the third micro-batch."""
    forward = model.gpt.GPT.forward
    calls = []

    def limited(self, tokens, targets=None, *more, **options):
        calls.append(targets)
        if rank == who and len(calls) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, targets, *more, **options)

    model.gpt.GPT.forward = limited


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_out_of_memory_on_one_rank_ends_all_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    expected = "tokens_per_microbatch=128 with recompute=none does not fit. For the same steps in less"
    try:
        alone = faults.Attempt(faults.small_config("alone", 20), 1, partial(out_of_memory, who=0))
        alone.wait()
        assert (
            f"MemoryError: out of memory on rank 0: {expected} memory use tokens_per_microbatch=64"
            in alone.log()
        )
        two = faults.Attempt(faults.small_config("two", 20), 2, partial(out_of_memory, who=1))
        codes = two.wait(30)
        assert codes[1] == EXIT_OUT_OF_MEMORY
        assert codes[0] not in (0, None)
        assert f"error: out of memory on rank 1: {expected}" in two.log(1)
    finally:
        faults.Attempt.kill_all()


def test_weights_that_are_gathered_layer_by_layer_take_two_layers_at_a_time():
    kept = config("distributed=fsdp", "reshard_after_forward=false")
    in_turn = replace(kept, reshard_after_forward=True)
    matrices = sum(rows * columns for rows, columns in layer_matrices(kept.model).values())
    assert peak_bytes(kept, 4) - peak_bytes(in_turn, 4) == 4 * (kept.model.n_layer - 2) * matrices
    one = replace(kept, model=replace(kept.model, n_layer=1))
    assert peak_bytes(replace(one, reshard_after_forward=True), 4) == peak_bytes(one, 4)


def test_a_plan_says_that_what_leaves_nothing_of_the_card_does_not_fit(capsys):
    given = config()
    for share, told in ((0.97, "as given: does not fit"), (0.90, "as given")):
        plan.plan(given, RATES["H200"], int(peak_bytes(given) / share), 1)
        first = next(line for line in capsys.readouterr().out.splitlines() if "as given" in line)
        assert ("does not fit" in first) == ("does not fit" in told)


def test_a_norm_without_a_mean_keeps_half_as_many_statistics():
    layer, rms = (config(f"+model.norm={norm}") for norm in ("layer", "rms"))
    # of two norms a layer, in float32
    assert kept_bytes(layer, 2, 2) - kept_bytes(rms, 2, 2) == 2 * 4


@pytest.mark.parametrize(
    ("mlp", "bias", "is_fused"),
    [("gelu", "all", True), ("swiglu", "none", True), ("swiglu", "qkv", True), ("swiglu", "all", False)],
)
def test_fused_gelu_saves_time_where_the_activation_has_a_place_in_its_products(mlp, bias, is_fused):
    given = [f"+model.mlp={mlp}", f"++model.bias={bias}"]
    fused, apart = (config(*given, f"fused_gelu={on}") for on in ("true", "false"))
    saved = step_seconds(apart, RATES["H200"]) - step_seconds(fused, RATES["H200"])
    assert (saved > 0) == is_fused


@pytest.mark.parametrize(("mlp", "values"), [("gelu", 0), ("swiglu", 1)])
def test_a_gate_inside_of_its_products_keeps_nothing_that_it_lets_through(mlp, values):
    given = [f"+model.mlp={mlp}", "++model.bias=none"]
    fused, apart = (config(*given, f"fused_gelu={on}") for on in ("true", "false"))
    width = fused.model.mlp_width
    assert kept_bytes(apart, 2, 2) - kept_bytes(fused, 2, 2) == values * 2 * width
    # the layer at hand makes it again
    assert backward_bytes(fused, 2, 2) - backward_bytes(apart, 2, 2) == values * 2 * width
