"""What the paper's experiments compute of their rows, write into the report and draw, by hand."""

import json
from types import SimpleNamespace

import pytest
import torch

from scripts.paper import (
    baselines,
    context,
    encoder,
    figure2_left,
    figure2_middle,
    figure2_right,
    figure3,
    figure4,
    table1,
    table2,
    table3,
    table4,
    table6,
    table7,
)
from scripts.paper.report import rows_table, verdict_line, write_report
from scripts.paper.verdict import NOT_REACHED, Verdict

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def counted(monkeypatch):
    """Experiments as on a GPU whose counters read 3 GB of memory and 5 GB of L2, without one."""
    qkv = tuple(torch.ones(1, 4, 1, 8, dtype=torch.float16) for _ in range(3))
    monkeypatch.setattr(baselines, "inputs", lambda *given, **named: qkv)
    monkeypatch.setattr(baselines, "causal_mask", lambda *given: None)
    for experiment in (figure2_left, figure2_middle):
        monkeypatch.setattr(experiment, "counted_bytes", lambda *given: {"memory": 3e9, "l2": 5e9})
    monkeypatch.setattr(figure2_left, "pass_bytes", lambda *given, **named: 7e9)
    monkeypatch.setattr(figure2_left, "forward_backward_ms", lambda *given: (1.0, 2.0))
    monkeypatch.setattr(figure2_middle, "algorithm1", lambda q, k, v, block_n: v)
    monkeypatch.setattr(figure2_middle, "work", lambda *given: None)
    monkeypatch.setattr(figure2_middle, "capture_forward", lambda run: SimpleNamespace(replay=run))
    monkeypatch.setattr(figure2_middle, "median_ms", lambda replay: 4.0)


def by_claim(experiment, rows: list[dict], beginning: str) -> Verdict:
    [verdict] = [verdict for verdict in experiment.judge(rows) if verdict.claim.startswith(beginning)]
    return verdict


def test_standard_attention_has_six_products_of_the_scores_and_flash_seven(monkeypatch):
    monkeypatch.setattr(figure2_left, "pass_bytes", lambda *given, **named: 0)
    sizes = figure2_left.Sizes(batch=2, heads=3, seq_len=32, head_dim=16, counters=False)
    operations = {row["implementation"]: row["matmul_gflop"] for row in figure2_left.measure(sizes, CPU)}
    # 2 T T D operations of each of six heads
    product = 6 * 2 * 32 * 32 * 16 / 1e9
    assert operations == pytest.approx({"eager": 6 * product, "ours": 7 * product})


def test_bytes_of_memory_and_of_l2_are_told_apart(counted):
    for row in figure2_left.measure(figure2_left.Sizes(), GPU):
        assert (row["counted_gb"], row["memory_gb"], row["l2_gb"]) == (7.0, 3.0, 5.0)
    for row in figure2_middle.measure(figure2_middle.Sizes(), GPU):
        assert (row["memory_gb"], row["l2_gb"], row["ms"], row["max_error"]) == (3.0, 5.0, 4.0, 0.0)


def test_bars_of_figure_2_are_of_counters_where_they_were_read(figures, tmp_path):
    row = {"matmul_gflop": 2.0, "counted_gb": 7.0, "memory_gb": 3.0, "forward_ms": 1.0, "backward_ms": 4.0}
    rows = [{**row, "implementation": "eager"}, {**row, "implementation": "ours", "memory_gb": None}]
    figure2_left.draw(rows, tmp_path / "a.png")
    heights = [[bar.get_height() for bar in axis.patches] for axis in figures[0].axes]
    assert heights == [[2.0, 2.0], [3.0, 7.0], [5.0, 5.0]]


def test_the_largest_difference_from_the_formula_counts_and_small_blocks_are_the_slow_ones():
    rows = [
        {"block_n": block_n, "formula_gb": 10.0, "l2_gb": l2, "ms": ms, **figure2_middle.PAPER_SHAPE}
        for block_n, l2, ms in ((32, 8.0, 6.0), (64, 10.5, 4.0), (128, 11.0, 3.0))
    ]
    bytes_apart, faster = figure2_middle.judge(rows)
    assert (bytes_apart.ours, faster.ours) == (pytest.approx(20.0), 2.0)
    rows[1]["l2_gb"] = None
    assert figure2_middle.judge(rows)[0].ours is None


def test_density_is_drawn_in_percent_and_a_longer_sequence_has_as_many_tokens(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figure2_right, "flash_attention", lambda q, k, v, **options: q)
    sizes = figure2_right.Sizes(batch=2, heads=1, head_dim=16, seq_lens=[128, 256], densities=[0.5, 1.0])
    rows = list(figure2_right.measure(sizes, CPU))
    assert {(row["seq_len"], row["batch"]) for row in rows} == {(128, 2), (256, 1)}
    for row in rows:
        row |= {"forward_ms": 1.0, "backward_ms": 2.0}
    figure2_right.draw(rows, tmp_path / "a.png")
    lines = {line.get_label(): line for line in figures[0].axes[1].lines}
    assert list(lines["random blocks"].get_xdata()) == [50.0, 100.0]
    [butterfly] = [row for row in rows if row["pattern"] == "butterfly" and row["seq_len"] == 256]
    assert list(lines["butterfly"].get_xdata()) == [100 * butterfly["density"]]
    assert set(lines["dense"].get_ydata()) == {3.0}


def test_tables_of_figure_3_stand_over_the_papers_own_of_the_same_setting():
    kinds = {"dropout + mask": (True, True), "mask only": (False, True), "dropout only": (True, False)}
    kinds["no dropout no mask"] = (False, False)
    rows = [
        {"implementation": "ours", "seq_len": 1024, "dropout": dropout, "mask": mask}
        | {"forward_ms": 1.0, "backward_ms": 2.0, "memory_bytes": 5_000_000}
        for dropout, mask in kinds.values()
    ]
    text = figure3.describe(rows)
    place = figure3.PUBLISHED["seq_lens"].index(1024)
    for setting, number in figure3.BOTH_TABLES.items():
        table = figure3.PUBLISHED["tables"][number]
        what, _, kind = table["what"].partition(" ms, ")
        assert (what, kinds[kind]) == ("fwd+bwd", setting)
        theirs = table["rows"]["FlashAttention"][place]
        assert (
            f"| ours | 3 |\n| *FlashAttention, A100* | {theirs:.4g} |"
            in text.partition(f"Table {number}:")[2]
        )
    theirs = figure3.PUBLISHED["tables"]["21"]["rows"]["FlashAttention"][place]
    expected = f"| ours | 5 |\n| *FlashAttention, A100* | {theirs:.4g} |"
    assert expected in text.partition("Table 21: memory, MB")[2]


def test_padding_is_of_none_to_twenty_tokens():
    assert set(figure3.padding(4096, CPU).tolist()) == set(range(21))


def test_memory_is_linear_from_1k_on():
    rows = [
        {"implementation": "ours", "seq_len": 2**n, "dropout": False, "mask": False, **figure3.PAPER_SHAPE}
        | {"memory_bytes": 2**n if n > 10 else 400}
        for n in range(10, 17)
    ]
    assert by_claim(figure3, rows, "memory at most linear").ours == pytest.approx((2048 / 400 / 2 - 1) * 100)


def test_curves_are_compared_from_their_first_step_on_and_drawn_less_the_references(
    figures, tmp_path, monkeypatch
):
    curves = {"flash": (9.0, 3.0, 2.0, 1.5), "reference": (5.0, 2.5, 1.0, 1.25)}

    def train(runs):
        for run in runs:
            folder = tmp_path / run
            folder.mkdir()
            losses = curves[run.removeprefix("paper-figure4-")]
            lines = [{"step": 0, "tokens": 0, "val_loss": 10.0}]
            lines += [
                {"step": n, "tokens": 512 * n, "train_loss": x, "val_loss": x + 1}
                for n, x in enumerate(losses, 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            yield run, folder

    monkeypatch.setattr(figure4, "train", train)
    monkeypatch.setattr(figure4, "configure", lambda *words: SimpleNamespace(steps=4))
    rows = list(figure4.measure(figure4.Sizes(implementations=list(curves), first_step=2), CPU))
    assert [row["val_loss"] for row in rows[:2]] == [2.5, 2.25]
    assert rows[2]["steps"] == 3
    assert rows[2]["mean_difference"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert rows[2]["largest_difference"] == 1.0
    rows += [{"pair": ["reference", "sdpa"], "first_step": 100, "mean_difference": 0.25}]
    judged = [
        {**row, "first_step": 100, "mean_difference": 0.5} if "pair" in row else row for row in rows[:3]
    ]
    assert by_claim(figure4, judged + rows[3:], "the same over").ours == 2.0
    figure4.draw(rows, tmp_path / "a.png")
    [line] = figures[0].axes[1].lines
    assert list(line.get_ydata()) == [4.0, 0.5, 1.0, 0.25]


def test_a_line_of_the_report_says_what_is_needed_and_tables_have_gigabytes(tmp_path):
    fields = {"claim": "c", "paper": "p", "gate": 2.0, "ours": 3.5, "unit": " GB"}
    assert verdict_line(Verdict(**fields)) == ["c", "p", "3.5 GB (at least 2 GB)", "**reached**"]
    at_most = verdict_line(Verdict(**fields, at_most=True))
    assert at_most == ["c", "p", "3.5 GB (at most 2 GB)", "**not reached**"]
    assert rows_table([{"a_bytes": 2.5e9, "b": None}], ("a_bytes", "b")).splitlines()[::2] == [
        "| a_gb | b |",
        "| 2.5 |  |",
    ]
    assert "\n| Figure 4 |  |  |  | not run |" in write_report(tmp_path, {"figure4": figure4}).read_text()


def test_bert_is_judged_against_eager_and_told_against_sdpa():
    fixed = {"seq_len": 512, "n_layer": 24, "compile": True}
    times = {"eager": 30.0, "sdpa": 20.0, "ours": 10.0}
    rows = [{"implementation": name, "ms": ms, **fixed} for name, ms in times.items()]
    [verdict] = table1.judge(rows)
    assert (verdict.ours, verdict.note) == (3.0, "against PyTorch's own fused attention 2.00x")


def test_table_2_tells_the_swap_of_the_attention_alone_and_the_attention_of_2022(figures, tmp_path):
    speeds = {
        "Hugging Face, attention of 2022": 80e3, "Hugging Face eager": 100e3, "Hugging Face SDPA": 140e3,
        "Hugging Face, our attention": 150e3, "Megatron-like": 300e3, "ours": 600e3,
    }  # fmt: skip
    rows = [
        {"size": "gpt2", "model": name, "tokens_per_second": speed, "seq_len": 1024, "dropout": 0.1}
        | {"precision": "fp16"}
        for name, speed in speeds.items()
    ]
    against_hugging_face, against_megatron = table2.judge(rows)[:2]
    assert (against_hugging_face.ours, against_megatron.ours) == (6.0, 2.0)
    note = "swapping the attention alone gives 1.50x; with the attention of 2022 it is 7.50x"
    assert against_hugging_face.note == note
    table2.draw(rows, tmp_path / "a.png")
    [axis] = figures[0].axes
    # the first row on top
    assert [bar.get_width() for bar in axis.patches] == [x / 1000 for x in reversed(speeds.values())]
    assert [text.get_text() for text in axis.texts] == ["600", "300", "150", "140", "100", "80"]


def test_gains_of_the_long_range_arena_are_joined_by_their_geometric_mean():
    rows = [
        {"kind": "speed", "task": task, "attention": name, "seq_len": seq_len, "batch": batch, "ms": ms}
        for index, (task, (seq_len, batch)) in enumerate(table3.SHAPES.items())
        for name, ms in (("eager", 2.0**index), ("ours", 1.0), ("ours sparse", 0.5))
    ]
    assert [verdict.ours for verdict in table3.judge(rows)[:2]] == pytest.approx([4.0, 8.0])
    # one task is missing
    assert table3.judge(rows[3:])[0].ours is None


def test_longer_context_is_judged_against_the_baselines_speed_and_what_a_foreign_context_adds():
    rows = [{"kind": "context", "seq_len": n, "loss": x} for n, x in ((1024, 3.0), (2048, 2.9), (4096, 2.5))]
    rows[-1] |= {"gain_low": 0.4, "gain_high": 0.6, "total_tokens": 1000}
    rows.append({"kind": "foreign", "own": 2.0, "near_only": 2.5, "foreign": 2.375})
    speeds = {("ours", 1024): 200.0, ("ours", 4096): 150.0, ("Megatron-like", 1024): 100.0}
    rows += [
        {"kind": "speed", "model": model, "seq_len": n, "tokens_per_second": x}
        for (model, n), x in speeds.items()
    ]
    assert by_claim(table4, rows, "loss at 4K").ours == 0.5
    assert by_claim(table4, rows, "flash at 4K against").ours == 1.5
    assert by_claim(table4, rows, "control: what a far context").ours == 0.125


def test_losses_are_drawn_over_the_middle_of_their_positions(figures, tmp_path):
    rows = [{"kind": "position", "first": 512, "end": 1024, "loss": 2.0}]
    rows.append({"kind": "speed", "model": "ours", "seq_len": 4096, "tokens_per_second": 3000.0})
    table4.draw(rows, tmp_path / "a.png")
    speed, _, position = figures[0].axes
    assert list(position.lines[0].get_xdata()) == [768.0]
    assert [bar.get_width() for bar in speed.patches] == [3.0]


def test_a_path_of_few_steps_is_no_accuracy_and_memory_is_in_gigabytes():
    row = {"side": 32, "steps": 3, "accuracy": 99.0, "test_examples": 100}
    assert by_claim(table6, [row], "Pathfinder").ours is None
    assert by_claim(table6, [{**row, "steps": 100}], "Pathfinder").ours == 99.0
    assert by_claim(table6, [{**row, "side": 256, "peak_memory_bytes": 3e9}], "256 by 256").ours == 3.0


def test_table_7_names_the_length_of_the_least_gain_and_draws_how_much_faster_each_is(figures, tmp_path):
    times = {"ours": (1.0,) * 5, "eager": (4.0, 3.0, 5.0, 6.0, 7.0), "sdpa cudnn": (1.5,) * 5}
    shape, lengths = table7.SHAPES["E.5, D 128, causal"]
    rows = [
        {"group": "E.5, D 128, causal", "batch": shape.batch, "implementation": name, "seq_len": seq_len}
        | {"forward_ms": 0.0, "backward_ms": ms}
        for name, found in times.items()
        for seq_len, ms in zip(lengths, found, strict=True)
    ]
    verdict = table7.judge(rows)[0]
    assert (verdict.ours, verdict.note.partition(";")[0]) == (3.0, "least at T 256")
    table7.draw(rows, tmp_path / "a.png")
    lines = {line.get_label(): list(line.get_ydata()) for line in figures[0].axes[0].lines}
    assert lines["ours"] == [4.0, 3.0, 5.0, 6.0, 7.0]
    assert lines["sdpa cudnn"] == pytest.approx([x / 1.5 for x in times["eager"]])


def test_with_dropout_all_lengths_of_both_shapes_count_against_pytorchs_flash_attention():
    slow = ("E.5, D 64, dropout", 4096)
    rows = [
        {"group": group, "batch": shape.batch, "implementation": name, "seq_len": seq_len, "forward_ms": 0.0}
        | {"backward_ms": 2.0 if name == "ours" and (group, seq_len) == slow else 1.0}
        for group, (shape, lengths) in table7.SHAPES.items()
        for seq_len in lengths
        for name in ("ours", "sdpa flash")
    ]
    assert (table7.judge(rows)[1].ours, table7.judge(rows)[1].word) == (0.5, NOT_REACHED)


def test_a_far_context_from_elsewhere_is_another_windows(monkeypatch):
    # each token's loss is its own number times its reading's first
    monkeypatch.setattr(context, "window_losses", lambda model, x: (x[:, :1] * x[:, 1:]).float())
    begin = torch.arange(4.0) * 10
    readings = context.foreign_context_losses(None, begin[:, None] + torch.arange(9), 4)
    # scored are the last two of nine; the near context begins four before the last
    firsts = begin, begin + 4, begin.roll(2)
    assert list(readings) == [(first * (begin + 7.5)).mean().item() for first in firsts]


def test_ninety_five_percent_of_means_lie_in_the_interval():
    draws = torch.randn(400, generator=torch.Generator().manual_seed(0))
    low, high = context.bootstrap_interval(draws)
    expected = 2 * 1.96 * draws.std().item() / 20
    assert high - low == pytest.approx(expected, rel=0.06)


def test_an_accuracy_is_a_share_of_all_examples_in_percent():
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    model.forward = lambda tokens: tokens.float() @ model.weight
    tokens = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0]])
    assert encoder.accuracy(model, tokens, torch.tensor([0, 1, 1, 0]), 3) == 75.0
