"""The numbers that benchmarks tell, by hand: on a CPU, where each pass takes a given time."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, count, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend

from kernels import block_masks
from kernels.reference import attention_reference
from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from scripts import (
    benchmark_attention,
    benchmark_block_sparse,
    benchmark_checkpoints,
    benchmark_generate,
    benchmark_host,
    benchmark_ring,
    benchmark_training,
    timing,
)
from scripts.sdpa import sdpa
from scripts.sizes import read_model
from train import results
from train.distributed import Processes
from train.passes import EAGER_STEPS
from train.plot import draw_bars
from train.results import machine

FORWARD_MS, BACKWARD_MS = 2.0, 8.0
MACHINE = {"gpu": None, "torch": "2", "triton": "3"}


@pytest.fixture
def timed(monkeypatch):
    """The benchmarks of attention with tensors of float32 on the CPU, and these times in place of a GPU's."""
    randn, parse = torch.randn, block_masks.parse

    def capture(attention, qkv, dout):
        return attention(*qkv), SimpleNamespace(replay=FORWARD_MS), SimpleNamespace(replay=BACKWARD_MS)

    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype, **options: randn(*shape, **options))
    monkeypatch.setattr(block_masks, "parse", lambda *given, device=None, **options: parse(*given, **options))
    monkeypatch.setattr(benchmark_block_sparse, "peak_bytes", lambda *given: 5)
    # the kernels run on a CPU where there is no GPU alone
    monkeypatch.setattr(
        benchmark_block_sparse,
        "build",
        lambda name, deterministic, pattern, mask, *given: partial(attention_reference, block_mask=mask),
    )
    for script in (benchmark_attention, benchmark_block_sparse):
        monkeypatch.setattr(script, "capture", capture)
    monkeypatch.setattr(timing, "median_ms", lambda replay: replay)


def assert_counted(row: dict, flop: float) -> None:
    """flop: of the forward pass."""
    assert (row["forward_ms"], row["backward_ms"]) == (FORWARD_MS, BACKWARD_MS)
    assert row["forward_tflops"] == pytest.approx(flop / (FORWARD_MS / 1e3) / 1e12)
    assert row["backward_tflops"] == pytest.approx(2.5 * flop / (BACKWARD_MS / 1e3) / 1e12)
    assert row["max_error"] < 1e-5


# all of 16 by 16; half of them; one, two, three, and thirteen times four
@pytest.mark.parametrize(
    ("causal", "window", "scores"), [(False, None, 256), (True, None, 128), (True, 4, 58)]
)
def test_speed_of_attention_counts_two_products_of_the_scores_that_its_mask_keeps(
    causal, window, scores, timed
):
    arguments = benchmark_attention.Arguments(
        implementations=["eager"], seq_lens=[16], head_dims=[8], causal=[causal], window=window, gpt2=False,
        tokens=32, width=24,
    )  # fmt: skip
    [shape] = benchmark_attention.shapes(arguments)
    assert shape == (2, 16, 3, 8, causal, False)
    [row] = benchmark_attention.measure(arguments, shape)
    assert_counted(row, 2 * 2 * 8 * scores * 2 * 3)


def test_attention_that_no_implementation_can_run_leaves_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark_attention, "measure", lambda *given: [])
    arguments = benchmark_attention.Arguments(implementations=["fa2"], out=str(tmp_path / "rows.json"))
    with pytest.raises(ValueError, match=r"^implementations=\['fa2'\]: none can run what is asked for, as"):
        benchmark_attention.main(arguments)
    assert not list(tmp_path.iterdir())


def test_the_first_shape_of_attention_is_gpt2s_own():
    model = read_model("gpt2", 1024)
    assert benchmark_attention.GPT2[1:4] == (1024, model.n_head, model.n_embd // model.n_head)


def test_a_line_of_attention_names_speeds_and_times_forward_first(capsys):
    row = {"implementation": "ours", "head_dim": 64, "causal": True, "packed": False, "seq_len": 1024}
    row |= {"forward_tflops": 700.4, "backward_tflops": 350.0, "forward_ms": 0.25, "backward_ms": 1.5}
    benchmark_attention.print_row(row)
    words = " ".join(capsys.readouterr().out.split())
    assert words == "D 64 causal T 1024 ours 700 / 350 TFLOP/s 0.250 / 1.500 ms"


def test_bars_of_attention_stand_side_by_side_over_their_length_forward_above_backward(figures, tmp_path):
    speeds = {"a": (1.0, 4.0), "b": (2.0, 5.0), "c": (3.0, 6.0)}
    rows = [
        {"implementation": name, "head_dim": 64, "causal": True, "packed": False, "seq_len": 1024}
        | {"forward_tflops": forward, "backward_tflops": backward}
        for name, (forward, backward) in speeds.items()
    ]
    benchmark_attention.plot(rows, MACHINE, tmp_path / "a.png")
    for axis, direction in zip(figures[0].axes, (0, 1), strict=True):
        assert [bar.get_height() for bar in axis.patches] == [pair[direction] for pair in speeds.values()]
        assert [bar.get_center()[0] for bar in axis.patches] == pytest.approx([-0.8 / 3, 0.0, 0.8 / 3])


def test_speed_of_block_sparse_attention_counts_the_scores_of_kept_blocks(timed):
    arguments = benchmark_block_sparse.Arguments(
        implementations=["ours"], block_size=64, width=32, deterministic=True, repeats=1
    )
    # of two rows of blocks the second sees two; half of all scores of dense attention
    for pattern, scores in (("causal()", 3 * 64**2), ("strided(2)", 2 * 64**2), ("dense", 128**2 / 2)):
        rows = benchmark_block_sparse.measure(arguments, 16, 128, pattern)
        assert [row["deterministic"] for row in rows] == [False, True]
        for row in rows:
            assert_counted(row, 2 * 2 * 16 * scores * 2)
            assert row["density"] == (pytest.approx(scores / (3 * 64**2)) if pattern != "dense" else 1.0)
            assert row["extra_bytes"] == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"flex_patterns": ["bigbird(2, 0, 0)"]},
            r"^flex_patterns must be of dense, .* got bigbird\(2, 0, 0\)",
        ),
        (
            {"flex_patterns": ["window(8) & strided(2)"], "patterns": ["window(8) & strided(2)"]},
            r"^flex_patterns must be of dense, .* joined by \|, got window\(8\) & strided\(2\): leave it out",
        ),
        ({"flex_patterns": ["window(8)"]}, r"^flex_patterns must be among patterns, got window\(8\): add it"),
        (
            {"flex_patterns": ["window(1024)"], "implementations": ["ours"]},
            r"^flex_patterns=\['window\(1024\)'\] is read with flex among implementations only, got \['ours",
        ),
        ({"head_dims": [64, 192]}, "^width=2048 must be a multiple of head_dim 192: change one"),
        ({"width": 0}, "^width must be at least 1, got 0"),
    ],
)
def test_block_sparse_attention_that_could_not_be_measured_is_refused_at_first(given, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark_block_sparse, "measure", lambda *given: pytest.fail("it measures"))
    with pytest.raises(ValueError, match=message):
        benchmark_block_sparse.main(benchmark_block_sparse.Arguments(**given))


def test_flex_is_measured_with_its_own_patterns_and_with_others_that_are_asked_for(timed):
    first, other = benchmark_block_sparse.FLEX_PATTERNS[0], "strided(2)"
    for asked, measured in ((None, [1, 0]), ([other], [0, 1]), ([], [0, 0])):
        arguments = benchmark_block_sparse.Arguments(
            implementations=["flex"], flex_patterns=asked, block_size=64, width=32, repeats=1
        )
        rows = [benchmark_block_sparse.measure(arguments, 16, 128, pattern) for pattern in (first, other)]
        assert list(map(len, rows)) == measured


def test_what_block_sparse_attention_is_allowed_is_a_share_of_the_same_ones_dense_time(tmp_path, monkeypatch):
    names = ("implementation", "pattern", "head_dim", "seq_len", "density", "deterministic")
    times = {False: (8.0, 20.0), True: (8.0, 30.0)}

    def measure(arguments, head_dim, seq_len, pattern):
        density = 1.0 if pattern == "dense" else 0.25
        for deterministic, (forward, backward) in times.items():
            row = dict(zip(names, ("ours", pattern, head_dim, seq_len, density, deterministic), strict=True))
            row |= {"forward_ms": density * forward, "backward_ms": density * backward}
            yield row | {"forward_tflops": 1.0, "backward_tflops": 1.0}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(benchmark_block_sparse, "measure", measure)
    out = tmp_path / "rows.json"
    benchmark_block_sparse.main(
        benchmark_block_sparse.Arguments(
            patterns=["dense", "window(1024)"], implementations=["ours"], head_dims=[64], seq_lens=[16384],
            plot=False, out=str(out),
        )
    )  # fmt: skip
    sparse = json.loads(out.read_text())["rows"][2:]
    # 1.15 times a quarter of the dense time, and 20 us
    assert [row["allowed_forward_ms"] for row in sparse] == pytest.approx([2.32, 2.32])
    assert [row["allowed_backward_ms"] for row in sparse] == pytest.approx([5.77, 8.645])


def test_pictures_of_block_sparse_attention_are_in_percent_and_in_microseconds_of_a_thousand_tokens(
    figures, tmp_path
):
    rows = [
        {"implementation": "ours", "deterministic": False, "head_dim": 64, "seq_len": seq_len, "pattern": "a"}
        | {"density": density, "forward_ms": 3.0, "backward_ms": 5.0}
        | {"allowed_forward_ms": 4.0, "allowed_backward_ms": 6.0}
        for seq_len, density in ((1000, 0.5), (2000, 0.25))
    ]
    benchmark_block_sparse.plot(rows[:1], MACHINE, tmp_path / "a.png")
    for axis, ms, allowed in zip(figures[0].axes, (3.0, 5.0), (4.0, 6.0), strict=True):
        points = [(*line.get_xdata(), *line.get_ydata()) for line in axis.lines]
        assert points == [(50.0, ms), (50.0, allowed)]
    benchmark_block_sparse.plot_over_length(rows, MACHINE, tmp_path / "b.png")
    for axis, costs in zip(figures[1].axes, ([3000.0, 1500.0], [5000.0, 2500.0]), strict=True):
        assert list(axis.lines[0].get_ydata()) == costs


def test_the_peak_of_block_sparse_attention_is_beyond_what_was_there_and_the_gradients(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1500)
    qkv = [torch.ones(4, requires_grad=True) for _ in range(3)]
    assert benchmark_block_sparse.peak_bytes(lambda q, k, v: q + k + v, qkv, torch.ones(4)) == 500 - 3 * 16


def test_a_checkpoint_costs_its_stall_and_what_steps_beside_it_take_longer(tmp_path, monkeypatch):
    # a second from reading to reading in the eight steps before, two beside saves
    readings = accumulate(1.0 if number < 16 else 2.0 for number in count())
    monkeypatch.setattr(benchmark_checkpoints, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    arguments = benchmark_checkpoints.Arguments(
        models=["tiny"], tokens_per_step=32, saves=1, device="cpu", folder=str(tmp_path)
    )
    [row] = benchmark_checkpoints.measure(arguments, "tiny")
    # between its readings: the stall, each step and what is before it, and the last wait
    steps = (row["save_seconds"] - 4) / 4
    assert steps >= 1
    assert (row["stall_ms"], row["step_ms"], row["step_while_saving_ms"]) == (2000.0, 1000.0, 2000.0)
    assert row["lost_seconds"] == 2 + steps
    assert row["lost_share"] == (2 + steps) / row["save_seconds"]
    assert row["prepare_lost_seconds"] == (row["prepare_seconds"] - 2) / 4


def test_a_token_takes_from_the_one_before_it_to_its_own_and_all_sequences_get_one(monkeypatch):
    # the n-th takes n seconds
    readings = accumulate(count())
    monkeypatch.setattr(benchmark_generate, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    arguments = benchmark_generate.Arguments(tokens=3, precision="fp32", device="cpu", bandwidth=1e6)
    row = benchmark_generate.measure(arguments, "tiny", 8, 2, "sdpa", compiled=False)
    # behind four that are not timed
    assert row["token_ms"] == 5000.0
    assert row["tokens_per_second"] == 2 / 5
    assert row["bandwidth_share"] == pytest.approx(row["bytes_per_token"] / 1e6 / 5)


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_a_token_reads_all_weights_but_tables_of_which_it_takes_a_row(name):
    with torch.device("meta"):
        model = GPT(replace(read_model(name, 96), n_layer=2), AttentionConfig(implementation="reference"))
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    # a tied table is the head as well
    read = set(model.parameters()) - tables | {model.head_weight}
    assert benchmark_generate.weight_bytes(model) == sum(x.nbytes for x in read)


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
def test_pytorchs_attention_takes_and_gives_tensors_laid_out_as_ours(backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 8, dtype=torch.float64) for _ in range(3))
    expected = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(sdpa(q, k, v, backend, is_causal=True), expected)


def test_the_hosts_time_is_of_one_call_and_without_the_turn_that_compiles(timed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(benchmark_host, "time", SimpleNamespace(perf_counter=count().__next__))
    assert benchmark_host.microseconds(lambda: None, 4) == 250000.0
    times = iter([900.0, 9000.0, 1.0, 10.0, 3.0, 30.0, 2.0, 20.0])
    monkeypatch.setattr(benchmark_host, "microseconds", lambda call, calls: next(times))
    arguments = benchmark_host.Arguments(implementations=["eager"], turns=3, seq_len=8, width=32)
    [row] = benchmark_host.measure(arguments, 16)
    assert (row["forward_us"], row["forward_backward_us"]) == (2.0, 20.0)
    assert (row["least_forward_us"], row["least_forward_backward_us"], row["heads"]) == (1.0, 10.0, 2)


def test_ring_passes_are_reported_as_medians_without_the_first(monkeypatch):
    # of four passes: when each begins, where its backward pass begins, and its end
    marks = iter([0.0, 90.0, 180.0, 0.0, 1.0, 11.0, 0.0, 3.0, 23.0, 0.0, 2.0, 32.0])
    monkeypatch.setattr(benchmark_ring, "mark", lambda on_gpu: next(marks))
    monkeypatch.setattr(benchmark_ring.dist, "barrier", lambda: None)
    x = torch.ones(1, requires_grad=True)
    assert benchmark_ring.median_seconds(lambda: x * 1, (x,), x.detach(), 3, x.device) == (2.0, 20.0)


def test_a_window_of_0_is_the_dense_mask_of_a_ring(monkeypatch, tmp_path):
    two, asked = Processes(0, 2, torch.device("cpu"), dist.HashStore(), None), []
    monkeypatch.setattr(benchmark_ring, "join_processes", lambda device: nullcontext(two))
    monkeypatch.setattr(benchmark_ring, "measure", lambda *given, **mask: asked.append(mask) or [])
    monkeypatch.setattr(benchmark_ring, "write_result", lambda *given: None)
    benchmark_ring.main(
        benchmark_ring.Arguments(
            windows=[0, 8], patterns=["window(8)"], head_dims=[16], implementation="reference", device="cpu",
            out=str(tmp_path / "ring.json"),
        )
    )  # fmt: skip
    assert asked == [{"window": None}, {"window": 8}, {"pattern": "window(8)"}]


ROW = {
    "label": "flash", "model": "gpt2", "bias": "all", "seq_len": 4096, "batch": 8, "tokens_per_step": 32768,
    "tokens_per_second": 519512.0, "step_ms": 63.07, "mfu_palm": 0.628, "mfu_causal": 0.509,
    "peak_memory_bytes": 12.1 * 2**30, "first_step_seconds": 19.6, "final_loss": 10.1222, "aim": "540K",
}  # fmt: skip


def test_training_rows_are_printed_in_the_units_of_their_columns():
    described = (
        "gpt2 bias all T 4096 B 8 flash 520K tokens/s MFU 62.8% 63.1 ms 12.1 GiB loss 10.1222 first step 20 s"
    )
    assert benchmark_training.describe(ROW).split() == described.split()
    none = {**ROW, "label": "reference", "tokens_per_second": None}
    assert benchmark_training.describe(none).endswith(" out of memory")
    head, _, *lines = benchmark_training.table([ROW, none]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, *lines)]
    told, missing = (dict(zip(cells[0], line, strict=True)) for line in cells[1:])
    assert told == {
        "job": "gpt2, T 4,096, B 8, 32,768 tokens", "": "flash", "tokens/s": "520K", "step": "63.1 ms",
        "MFU (PaLM)": "62.8%", "MFU (causal)": "50.9%", "peak memory": "12.1 GiB", "first step": "20 s",
        "aim on an H200": "540K",
    }  # fmt: skip
    assert (missing["tokens/s"], missing["aim on an H200"]) == ("out of memory", "540K")


def test_a_ladder_switches_one_thing_on_after_the_other_up_to_the_defaults():
    arguments = benchmark_training.Arguments(ladder=True)
    steps = [step for *_, step in benchmark_training.steps_to_measure(arguments)]
    [(*_, usual)] = benchmark_training.steps_to_measure(benchmark_training.Arguments())
    assert steps[-1] == usual
    for before, after in pairwise(map(asdict, steps)):
        assert sum(before[key] != after[key] for key in before) == 1


def test_a_row_of_training_is_of_its_timed_steps_in_its_own_precision(monkeypatch):
    done = []

    class Watch:
        def __init__(self, device):
            self.start()

        def start(self):
            self.began = len(done)

        def seconds(self) -> float:
            return 2.0 * (len(done) - self.began)

    monkeypatch.setattr(benchmark_training, "Stopwatch", Watch)
    monkeypatch.setattr(benchmark_training, "update", lambda *given: done.append(given))
    monkeypatch.setattr(benchmark_training, "peak_memory_bytes", lambda device: (3, 4))
    monkeypatch.setattr(benchmark_training, "flops_ledger", lambda *given, **named: {"palm": 7.0})
    monkeypatch.setattr(benchmark_training, "flop_utilization", lambda *given: given[:3])
    arguments = benchmark_training.Arguments(
        models=["tiny"], seq_lens=[32], implementations=["sdpa"], tokens_per_step=128, steps=3,
        tokens_per_microbatch=64, warmup_steps=2, device="cpu", precision="fp32", compile=False,
        fused_loss=False,
    )  # fmt: skip
    [(*_, step)] = benchmark_training.steps_to_measure(arguments)
    row = benchmark_training.measure(arguments, "tiny", 32, step)
    assert (row["step_ms"], row["first_step_seconds"], row["tokens_per_second"]) == (2000.0, 2.0, 64.0)
    assert (row["batch"], row["peak_memory_bytes"], row["mfu_palm"]) == (2, 3, (7.0, 64.0, "fp32"))
    # asked for, but there are none on a CPU
    assert (arguments.cuda_graphs, row["cuda_graphs"]) == (True, False)


def test_rows_of_one_model_are_of_the_same_tokens_and_weights_in_tf32(monkeypatch):
    started, build_model = [], benchmark_training.build_model

    def build(*given):
        started.append(torch.get_float32_matmul_precision())
        return build_model(*given)

    monkeypatch.setattr(benchmark_training, "build_model", build)
    arguments = benchmark_training.Arguments(**ON_A_CPU[benchmark_training], device="cpu")
    [(*_, step)] = benchmark_training.steps_to_measure(arguments)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        first, second = (benchmark_training.measure(arguments, "tiny", 32, step) for _ in range(2))
    finally:
        torch.set_float32_matmul_precision(before)
    assert first["final_loss"] == second["final_loss"]
    assert started == ["high", "high"]


def test_a_row_of_training_has_the_biases_that_are_asked_for_or_the_models_own(monkeypatch):
    built, build_model = [], benchmark_training.build_model
    monkeypatch.setattr(
        benchmark_training,
        "build_model",
        lambda config, *given: built.append(config) or build_model(config, *given),
    )
    for bias, of_row in (("", read_model("tiny", 32).bias), ("qkv", "qkv"), ("none", "none")):
        arguments = benchmark_training.Arguments(**ON_A_CPU[benchmark_training], device="cpu", bias=bias)
        [(*_, step)] = benchmark_training.steps_to_measure(arguments)
        row = benchmark_training.measure(arguments, "tiny", 32, step)
        assert row["bias"] == built[-1].bias == of_row


@pytest.mark.parametrize("name", ["build_model", "build_training", "time_steps"])
def test_a_row_that_finds_no_memory_says_so_wherever_it_looked_for_it(name, monkeypatch):
    def too_much(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark_training, name, too_much)
    arguments = benchmark_training.Arguments(**ON_A_CPU[benchmark_training], device="cpu")
    [(*_, step)] = benchmark_training.steps_to_measure(arguments)
    row = benchmark_training.measure(arguments, "tiny", 32, step)
    assert (row["model"], row["tokens_per_second"]) == ("tiny", None)


def test_a_row_is_compiled_as_a_run_with_its_settings_is():
    kinds = []
    for given in ({"compile": False}, {}, {"cuda_graphs": False}):
        arguments = benchmark_training.Arguments(implementations=["sdpa"], fused_loss=False, **given)
        [(*_, step)] = benchmark_training.steps_to_measure(arguments)
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 8, "max_seq_len": 8, "dropout": 0.0}
        model = benchmark_training.build_model(ModelConfig(**sizes), step, torch.device("cpu"))
        passes, *_ = benchmark_training.build_training(model, step, 1, torch.device("cpu"))
        kinds.append((type(passes.model), getattr(passes.model, "whole", None) is not None))
    assert kinds == [(GPT, False), (CompiledModel, False), (CompiledModel, True)]


def test_bars_stand_in_their_order_from_the_top(figures, tmp_path):
    draw_bars({"a": 1.0, "b": 2.0}, tmp_path / "a.png", "title", "tokens/s")
    [axis] = figures[0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert axis.yaxis_inverted()


def test_a_result_says_what_it_was_measured_on(tmp_path, monkeypatch):
    assert machine({"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}) == (
        "NVIDIA H200, torch 2.11, triton 3.6"
    )
    assert machine(MACHINE).startswith("CPU, ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (results.provenance(2)["gpu"], results.provenance(2)["n_gpus"]) == (None, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert (results.provenance(2)["gpu"], results.provenance(2)["n_gpus"]) == ("NVIDIA H200", 2)
    monkeypatch.setattr(results, "origin", results.provenance)
    written = results.write_result(tmp_path / "result.json", [])
    assert (written["gpu"], written["n_gpus"]) == ("NVIDIA H200", 1)
    # a run on the CPU of a machine with a GPU
    assert (results.provenance(0)["gpu"], results.provenance(0)["n_gpus"]) == (None, 0)


ON_A_CPU = {
    benchmark_checkpoints: {"models": ["tiny"], "tokens_per_step": 32, "saves": 1},
    benchmark_generate: {
        "models": ["tiny"], "seq_lens": [8], "implementations": ["sdpa"], "compiled": [False], "tokens": 1,
        "precision": "fp32",
    },
    benchmark_ring: {"implementation": "reference"},
    benchmark_training: {
        "models": ["tiny"], "seq_lens": [32], "implementations": ["sdpa"], "tokens_per_step": 64, "steps": 1,
        "tokens_per_microbatch": 64, "warmup_steps": 0, "precision": "fp32", "compile": False,
        "fused_loss": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("script", ON_A_CPU)
def test_what_a_cpu_has_measured_is_told_of_no_gpu_beside_it(script, tmp_path, monkeypatch):
    two = Processes(0, 2, torch.device("cpu"), dist.HashStore(), None)
    if script is benchmark_ring:
        monkeypatch.setattr(benchmark_ring, "join_processes", lambda device: nullcontext(two))
        monkeypatch.setattr(benchmark_ring, "measure", lambda *given, **mask: [{}])
    gpu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "NVIDIA H200")
    # for what tells where a result comes from alone
    monkeypatch.setattr(results, "torch", SimpleNamespace(cuda=gpu, __version__="2"))
    monkeypatch.setattr(results, "origin", results.provenance)
    place = {"folder": str(tmp_path)} if script is benchmark_checkpoints else {}
    out = tmp_path / "rows.json"
    script.main(script.Arguments(**ON_A_CPU[script], **place, device="cpu", out=str(out)))
    result = json.loads(out.read_text())
    assert (result["gpu"], result["n_gpus"]) == (None, 0)
    assert {row.get("n_gpus", 0) for row in result["rows"]} == {0}


def test_a_benchmark_captures_no_graphs_in_a_step_that_it_times():
    given = {"device": "cuda", "warmup_steps": EAGER_STEPS + 1}
    benchmark_training.check_counts(benchmark_training.Arguments(**given))
    for more in ({}, {"ladder": True, "cuda_graphs": True}):
        arguments = benchmark_training.Arguments(**given | {"warmup_steps": EAGER_STEPS}, **more)
        with pytest.raises(ValueError, match=f"use warmup_steps={EAGER_STEPS + 1}, or cuda_graphs=false"):
            benchmark_training.check_counts(arguments)
    benchmark_training.check_counts(
        benchmark_training.Arguments(device="cuda", warmup_steps=0, cuda_graphs=False)
    )
