import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from data.shards import write_shard
from data.sources import read_plain
from data.tokenizer import shard_mark
from model import GPT, AttentionConfig, ModelConfig
from model.generate import empty_caches
from model.pretrained import export_pretrained
from scripts import (
    benchmark_attention,
    benchmark_block_sparse,
    benchmark_checkpoints,
    benchmark_generate,
    benchmark_host,
    benchmark_ring,
    benchmark_training,
    evaluate_context,
    export_hf,
    flash_attn_4,
    plan,
    plot_run,
    sample,
)
from scripts.arguments import (
    OVERWRITE,
    argument,
    check_as_many,
    check_results,
    command_line,
    result_file,
    run_script,
    unknown_argument,
)
from scripts.sizes import MODELS, check_models, read_model
from tests.test_config import composed
from tests.test_export import write_tokenizer
from tests.test_saving import PROCESSES, settings
from train.checkpoint import run_tensors
from train.config import Config, parse
from train.distributed import Processes
from train.logger import readable
from train.plot import draw_bars
from train.saving import CheckpointSaver
from train.throughput import RESET

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "run_script(" in path.read_text())
SCRIPTS.remove("arguments")


def call(name: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"scripts.{name}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


@pytest.fixture
def call_here(monkeypatch, capsys):
    """The same in this process, where imports cost nothing more."""

    def call(name: str, *arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        code = 0
        try:
            runpy.run_module(f"scripts.{name}", run_name="__main__")
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return call


def slurm_job(folder: Path, srun: str, scontrol: str, **given: str) -> None:
    """Runs the slurm script in a folder, with these lines of bash for Slurm's two commands."""
    for name, line in (("srun", srun), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    slurm = {
        "SUBMIT_DIR": str(folder),
        "JOB_NODELIST": "a",
        "NNODES": "1",
        "GPUS_ON_NODE": "1",
        "JOB_ID": "7",
    }
    environment = {f"SLURM_{key}": value for key, value in (slurm | given).items()}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", str(ROOT / "scripts" / "slurm.sh")], env=environment, check=True, timeout=150)


def test_the_slurm_script_gives_each_node_the_cores_that_the_job_asked_for(tmp_path):
    slurm_job(tmp_path, 'echo "$SRUN_CPUS_PER_TASK" > cores', "echo localhost", CPUS_PER_TASK="32")
    assert (tmp_path / "cores").read_text() == "32\n"


def test_the_slurm_script_takes_the_first_of_many_nodes_however_slowly_they_are_named(tmp_path):
    slurm_job(tmp_path, 'echo "$@" > command', "echo node1; sleep 0.5; echo node2; echo node3")
    assert "--rdzv-endpoint=node1:" in (tmp_path / "command").read_text()


def test_the_slurm_script_gives_two_jobs_on_one_node_ports_of_their_own(tmp_path):
    for job in ("7", "8"):
        slurm_job(tmp_path, 'echo "$@" >> commands', "echo node1", JOB_ID=job)
    commands = (tmp_path / "commands").read_text().splitlines()
    first, second = (re.search(r"--rdzv-endpoint=node1:(\d+) ", command)[1] for command in commands)
    assert first != second


def test_the_slurm_script_asks_for_sbatch_where_slurm_does_not_run_it():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    command = ["bash", str(ROOT / "scripts" / "slurm.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode != 0
    assert "SLURM_SUBMIT_DIR: is set by Slurm alone: start this script with sbatch" in done.stderr


def write_metrics(folder: Path, losses: list[float | None], tokens_per_step: int = 100) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "tokens": n * tokens_per_step, "train_loss": loss, "val_loss": None}
        for n, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_the_arguments_of_every_script(name, call_here):
    done = call_here(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "arguments, as key=value:" in done.stdout
    assert done.stdout.count("\n  ") >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colour=red"], "error: colour is no argument: there are runs, "),
        (["run=[a]"], "error: run is no argument: did you mean runs? --help lists them"),
        (["loss.png"], "error: arguments are key=value, got 'loss.png'"),
        (["runs=[a=[b],c]"], "error: while parsing a flow sequence"),
        (["runs=[missing]"], "error: runs: missing holds no metrics.jsonl: give run folders, as runs/NAME"),
        (["runs=a"], "error: runs must be a list: write 'runs=[a]': --help lists"),
        ([], "error: runs is empty"),
    ],
)
def test_a_wrong_argument_ends_with_one_clear_error(arguments, message, call_here):
    done = call_here("plot_run", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)


def test_a_list_among_lists_that_is_none_is_told_by_its_place(call_here):
    done = call_here("tune_tiles", "candidates=[[64,64,4,2],64]")
    assert done.returncode == 2
    message = "error: item 1 of candidates must be a list: write lists of a list as [[1,2],[3,4]]: --help"
    assert done.stderr.startswith(message)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("plan", ["train=[model=gpt2_xl]", "seq_len=2048"], "train= is given, and seq_len=2048 belongs"),
        ("remeasure", ["a.json", "changes=[steps=1]", "steps=2"], "changes= is given, and steps=2 belongs"),
        (
            "remeasure",
            ["files=[a.json]", "b.json"],
            "files= is given, and b.json belongs to it too: give all",
        ),
    ],
)
def test_a_list_is_given_as_a_list_or_word_by_word(name, arguments, message, call_here):
    done = call_here(name, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")


def test_a_script_of_few_arguments_names_them_where_one_is_unknown(call_here):
    done = call_here("export_hf", "run=runs/a", "out=folder")
    assert done.returncode == 2
    there_are = "there are model, out, tokenizer, precision, and --help lists them"
    assert done.stderr == f"error: run is no argument: {there_are}\n"


def test_lists_that_belong_together_hold_as_many_values():
    arguments = SimpleNamespace(models=["a", "b"], steps=[1, 2], batches=[4])
    check_as_many(arguments, "models", "steps")
    message = "^models, steps, batches must hold as many values each, got 2, 2, 1: give the others, too"
    with pytest.raises(ValueError, match=message):
        check_as_many(arguments, "models", "steps", "batches")


@pytest.mark.parametrize(("n", "are_named"), [(6, True), (7, False)])
def test_as_many_as_six_arguments_are_named_where_one_is_unknown(n, are_named):
    names = [f"{letter}{letter}" for letter in "abcdefg"[:n]]
    told = unknown_argument("run", make_dataclass("Few", names))
    assert told == "run is no argument: " + f"there are {', '.join(names)}, and " * are_named


def test_an_argument_that_must_be_given_is_named(call_here):
    done = call_here("evaluate_context", "data=somewhere")
    assert done.returncode == 2
    assert done.stderr == "error: model must be given, as model=VALUE: --help lists the arguments\n"


def test_plot_run_draws_runs_and_measures_how_far_they_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a", [4.0, 3.0, 2.0])
    write_metrics(tmp_path / "b", [4.0, 3.1, 2.2])
    done = call("plot_run", "runs=[a,b]", "out=both.png", "differences=both.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    row = json.loads((tmp_path / "both.json").read_text())["rows"][0]
    assert (row["run"], row["yardstick"], row["steps"]) == ("b", "a", 3)
    assert row["mean_difference"] == pytest.approx(0.1)
    assert row["largest_difference"] == pytest.approx(0.2)


def test_plot_run_names_a_run_that_has_no_loss_yet_with_the_way_out(tmp_path):
    write_metrics(tmp_path / "new", [])
    arguments = plot_run.Arguments(runs=[str(tmp_path / "new")], out=str(tmp_path / "loss.png"))
    with pytest.raises(ValueError, match="new/metrics.jsonl holds no training loss yet: leave that run out"):
        plot_run.main(arguments)
    assert not (tmp_path / "loss.png").exists()


def test_plot_run_keeps_runs_of_the_same_name_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "runs" / "a", [4.0, 3.0])
    write_metrics(tmp_path / "copy" / "a", [4.0, 3.5])
    plot_run.main(plot_run.Arguments(runs=["runs/a", "copy/a"], differences="both.json"))
    row = json.loads(Path("both.json").read_text())["rows"][0]
    assert (row["yardstick"], row["run"], row["largest_difference"]) == ("a", "copy/a", 0.5)


def test_plot_run_names_a_run_by_its_folder_however_that_is_written(tmp_path, monkeypatch):
    for name in ("here/a", "there/a", "a"):
        write_metrics(tmp_path / name, [4.0, 3.0])
    monkeypatch.chdir(tmp_path / "here" / "a")
    runs = [".", "../../there/a/../a", "../../a"]
    plot_run.main(plot_run.Arguments(runs=runs, differences="both.json"))
    rows = json.loads(Path("both.json").read_text())["rows"]
    assert [row["yardstick"] for row in rows] == ["a", "a"]
    assert [row["run"] for row in rows] == runs[1:]
    # as typed, the second is called as the first
    monkeypatch.chdir(tmp_path)
    plot_run.main(plot_run.Arguments(runs=["here/a", "a"], differences="both.json", out="both.png"))
    (row,) = json.loads(Path("both.json").read_text())["rows"]
    assert (row["yardstick"], row["run"]) == ("a", str(tmp_path / "a"))


def test_plot_run_warns_of_losses_per_token_of_different_tokenizers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (("a", "gpt2"), ("b", "bytes"), ("c", "gpt2"), ("old", None)):
        write_metrics(tmp_path / name, [4.0, 3.0])
        if tokenizer:
            Path(name, "config.yaml").write_text(f"data:\n  tokenizer: {tokenizer}\n")
    plot_run.main(plot_run.Arguments(runs=["a", "c", "old"]))
    assert not capsys.readouterr().err
    plot_run.main(plot_run.Arguments(runs=["a", "b", "old"], out="both.png"))
    told = (
        "the runs have different data.tokenizer (a gpt2, b bytes): losses per token of these do not compare"
    )
    assert capsys.readouterr().err == f"WARNING: {told}\n"


def test_plot_run_refuses_a_run_that_is_given_twice(tmp_path, monkeypatch):
    write_metrics(tmp_path / "a", [4.0, 3.0])
    (tmp_path / "latest").symlink_to("a")
    monkeypatch.chdir(tmp_path / "a")
    for again in (".", "../a", "../latest"):
        message = f"^runs must be different folders, got . and {again}, which are one: leave one out$"
        with pytest.raises(ValueError, match=message):
            plot_run.main(plot_run.Arguments(runs=[".", again]))
    assert not Path("loss.png").exists()


def test_plot_run_writes_no_differences_of_a_single_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a", [4.0, 3.0])
    with pytest.raises(
        ValueError, match=r"^differences=d.json needs two runs to compare, got runs=\['a'\]: add"
    ):
        plot_run.main(plot_run.Arguments(runs=["a"], differences="d.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_plot_run_compares_runs_of_other_steps_after_equally_many_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a", [6.0, 5.0, 4.0, 3.0, 2.5, 2.0])
    write_metrics(tmp_path / "b", [5.0, 3.0, 2.1], tokens_per_step=200)
    write_metrics(tmp_path / "c", [5.0, 3.0, 2.1], tokens_per_step=101)
    (row,) = plot_run.compare({name: Path(name, "metrics.jsonl") for name in ("a", "b")})
    assert row["steps"] == 3
    assert row["mean_difference"] == pytest.approx(0.1 / 3)
    assert row["largest_difference"] == pytest.approx(0.1)


def test_plot_run_draws_runs_that_share_no_number_of_tokens_but_gives_no_difference(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a", [4.0, 3.0])
    write_metrics(tmp_path / "b", [4.0, 3.5])
    write_metrics(tmp_path / "c", [5.0, 3.0], tokens_per_step=101)
    write_metrics(tmp_path / "d", [4.5])
    message = "^differences=d.json: c and a logged no loss after the same number of tokens: leave one out"
    with pytest.raises(ValueError, match=message):
        plot_run.main(plot_run.Arguments(runs=["a", "b", "c"], differences="d.json"))
    # a refused command leaves nothing that the next one would be refused for
    assert not Path("loss.png").exists()
    plot_run.main(plot_run.Arguments(runs=["a", "b", "c", "d"]))
    assert Path("loss.png").exists()
    _, of_b, of_c, of_d = capsys.readouterr().out.splitlines()
    assert of_b == "b against a: 2 steps, mean |difference| 0.25000, largest 0.50000"
    assert of_c == "c against a: no loss of both after the same number of tokens"
    assert of_d == "d against a: 1 step, mean |difference| 0.50000, largest 0.50000"


def test_plot_run_refuses_a_title_that_cannot_be_drawn(tmp_path, call_here):
    write_metrics(tmp_path / "a", [4.0, 3.0])
    done = call_here("plot_run", f"runs=[{tmp_path}/a]", f"out={tmp_path}/a.png", "title=loss \udcff")
    assert done.returncode == 2
    assert done.stderr.startswith(r"error: title must be UTF-8, got 'loss \udcff': leave out")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("out", ["", "loss", "loss.txt"])
def test_plot_run_draws_over_no_picture_that_is_named_without_its_ending(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a", [4.0, 3.0])
    Path("loss.png").write_text("drawn before")
    with pytest.raises(ValueError, match=f"^out must end in one of .png, .pdf, .svg, .jpg, got '{out}'"):
        plot_run.main(plot_run.Arguments(runs=["a"], out=out))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "loss.png"}
    assert Path("loss.png").read_text() == "drawn before"


@dataclass
class Words:
    prompt: str = argument("", "any text")
    numbers: list[int] = argument([], "some numbers")


@pytest.mark.parametrize(
    "text",
    ["def f(x):", "# hello", "{'a': 1}", "[1", "${HOME}", r"a\${b}", "???", "a=b", "import ", "", "12"],
)
def test_a_text_is_taken_as_it_is_typed(text, monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["words", f"prompt={text}", "numbers=[1,2]"])
    run_script(given.append, Words, "")
    assert given == [Words(prompt=text, numbers=[1, 2])]


@dataclass
class Places:
    out: str = result_file("", "a file")
    model: str = argument("", "a folder", path=True)
    files: list[str] = argument([], "some files", path=True)
    prompt: str = argument("", "any text")
    overwrite: bool = argument(False, OVERWRITE)


def test_a_tilde_in_front_of_a_path_is_the_home_folder_and_in_a_text_it_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "taken").write_text("")
    given = []
    words = ["out=~/x.png", "model=~/runs/a", "files=[~/a.json,b.json]", "prompt=~/x"]
    monkeypatch.setattr(sys, "argv", ["places", *words])
    run_script(given.append, Places, "")
    home = str(tmp_path)
    expected = Places(f"{home}/x.png", f"{home}/runs/a", [f"{home}/a.json", "b.json"], "~/x")
    assert given == [expected]
    monkeypatch.setattr(sys, "argv", ["places", "out=~/taken"])
    with pytest.raises(SystemExit):
        run_script(given.append, Places, "")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("benchmark_checkpoints", {"folder", "out"}),
        ("compare_extensions", {"out"}),
        ("evaluate_context", {"model", "data", "out"}),
        ("export_hf", {"model", "out", "tokenizer"}),
        ("plan", {"probe", "compare", "out"}),
        ("plot_run", {"runs", "out", "differences"}),
        ("remeasure", {"files", "out"}),
        ("reproduce_paper", {"out"}),
        ("sample", {"run", "checkpoint", "tokenizer", "prompt_file"}),
    ],
)
def test_scripts_say_which_arguments_are_paths(name, paths):
    script = importlib.import_module(f"scripts.{name}")
    assert {item.name for item in fields(script.Arguments) if item.metadata.get("path")} == paths


@pytest.mark.parametrize("card", ["NVIDIA H200 MIG 1g.18gb", "H200-NVL", "NVIDIA H200 NVL"])
def test_a_plan_takes_no_part_or_other_form_of_a_card_for_the_whole_one(card):
    with pytest.raises(ValueError, match=f"^gpu='{card}' is not the H200 whose rates are known: give probe="):
        plan.choose_rates(plan.Arguments(gpu=card))
    assert plan.choose_rates(plan.Arguments(gpu="NVIDIA H200")) == plan.choose_rates(
        plan.Arguments(gpu="H200")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.alpha=3"], "lora.alpha=3 has no effect with lora.rank=0: add lora.rank=16"),
        (
            ["optim.momentum=0.5"],
            "optim.momentum=0.5 has no effect with optim.algorithm=adamw: add optim=muon",
        ),
        (["data.folder=2024_01"], "data.folder=2024_01 would be read as 202401: put quotes"),
    ],
)
def test_a_plan_refuses_the_words_that_training_refuses(words, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plan.main(plan.Arguments(gpu="H200", memory_gib=140.0, train=words))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("process=8", "processes"),
        ("gpus=8", "gpu"),
        ("+memory_gb=8", "memory_gib"),
        ("probe_bandwith=3e12", "probe_bandwidth"),
    ],
)
def test_a_plan_names_its_own_argument_that_a_word_may_mean(word, meant):
    message = (
        rf" is no argument: did you mean {meant}\? --help lists them, and python -m train --help its keys$"
    )
    with pytest.raises(ValueError, match=message):
        plan.main(plan.Arguments(gpu="H200", memory_gib=140.0, train=[word]))


def test_a_plan_leaves_the_keys_of_training_and_what_is_most_like_them_to_training():
    keys = [item.name for item in fields(Config)] + ["experiment", "optim.betas"]
    plan.refuse_misspelled([f"{key}=1" for key in keys])
    with pytest.raises(ValueError, match=r"^compil is no key; did you mean compile\?$"):
        plan.main(plan.Arguments(gpu="H200", memory_gib=140.0, train=["compil=true"]))


def test_what_others_are_to_read_is_passed_on_as_it_is_typed(monkeypatch):
    given, foreign = [], ["name=${seq_len}", "seq_len=???"]
    monkeypatch.setattr(sys, "argv", ["several", *foreign, "number=3"])
    run_script(given.append, Several, "", others="words")
    assert given == [Several(words=foreign, number=3)]


@dataclass(kw_only=True)
class Several:
    words: list[str] = argument(["a"], "a list")
    sizes: dict = argument({}, "a mapping")
    number: int | None = argument(4, "a number")
    quick: bool = argument(False, "a switch")
    text: str = argument("", "a text")
    usual: float = argument(0.5, "left as it is")


def test_a_command_line_gives_back_its_arguments(monkeypatch):
    arguments = Several(
        words=["yarn+window", "[x=1, 'y: 2']"],
        sizes={"seq_lens": [64, 128], "of": {"a": 1.5}},
        number=None,
        quick=True,
        text="def f(x):  # ${here}",
    )
    words = command_line(arguments)
    assert [word.split("=")[0] for word in words] == ["words", "sizes", "number", "quick", "text"]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    given = []
    run_script(given.append, Several, "")
    assert given == [arguments]


@dataclass(kw_only=True)
class Measuring:
    out: str = result_file("rows.json", "rows", picture=True)
    more: str = result_file("", "more rows; empty for none")
    overwrite: bool = argument(False, OVERWRITE)


@pytest.mark.parametrize(
    ("there", "words", "refused"),
    [
        ("rows.json", [], "out=rows.json: rows.json exists"),
        ("rows.png", [], "out=rows.json: rows.png exists"),
        ("a.json", ["more=a.json"], "more=a.json: a.json exists"),
        ("a.png", ["more=a.json"], None),
        ("rows.json", ["overwrite=true"], None),
        ("rows.json", ["out=other.json"], None),
    ],
)
def test_results_that_are_there_are_replaced_only_when_asked(
    tmp_path, monkeypatch, capsys, there, words, refused
):
    monkeypatch.chdir(tmp_path)
    Path(there).write_text("measured before")
    monkeypatch.setattr(sys, "argv", ["measure", *words])
    done = []
    with pytest.raises(SystemExit, match="2") if refused else nullcontext():
        run_script(done.append, Measuring, "")
    assert bool(done) == (refused is None)
    if refused:
        message = f"error: {refused}, choose another name, or add overwrite=true\n"
        assert capsys.readouterr().err == message


@pytest.mark.parametrize("overwrite", [True, False])
def test_results_that_no_file_can_hold_are_refused_before_anything_is_measured(
    overwrite, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("rows.json").mkdir()
    with pytest.raises(ValueError, match=r"^out=rows.json: rows.json is a folder, choose another name$"):
        check_results(Measuring(overwrite=overwrite))
    with pytest.raises(ValueError, match=r"^out must name a file, got nothing: use out=rows.json$"):
        check_results(Measuring(out="", overwrite=overwrite))


def test_results_are_not_to_be_replaced_where_none_are_written():
    with pytest.raises(ValueError, match="^overwrite=true, but no file is written: give out=FILE, or leave"):
        check_results(Places(overwrite=True))
    check_results(Places(out="rows.json", overwrite=True))


def test_a_link_that_leads_nowhere_is_there_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.json", "folder"):
        Path(name).symlink_to("nowhere")
    with pytest.raises(ValueError, match="rows.json exists, choose another name, or add overwrite=true"):
        check_results(Measuring())
    check_results(Measuring(overwrite=True))
    with pytest.raises(ValueError, match="rows.json exists, choose another name"):
        evaluate_context.new_files("rows.json")
    with pytest.raises(ValueError, match="out must be a new or empty folder, got 'folder'"):
        export_hf.check_out("folder")


def test_rows_are_not_named_as_the_picture_that_would_be_drawn_over_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^out=rows.png must name the JSON file, .*: use rows.json"):
        check_results(Measuring(out="rows.png", overwrite=True))
    # nothing is drawn beside these
    check_results(Measuring(more="more.png"))


@pytest.mark.parametrize("more", ["rows.json", "./rows.json", "folder/../rows.json", "rows.png"])
def test_two_results_of_one_name_are_refused_whether_or_not_they_may_replace(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"^more={more}: .* is what out=rows.json writes already"):
            check_results(Measuring(out="rows.json", more=more, overwrite=overwrite))


def test_ctrl_c_ends_a_script_in_one_line():
    program = (
        "import time; from dataclasses import make_dataclass; from scripts.arguments import run_script\n"
        "def main(arguments): print('under way', flush=True); time.sleep(60)\n"
        "run_script(main, make_dataclass('Arguments', []), '')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # a shell starts what it puts into the background with Ctrl-C ignored, these tests too
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=150)[0]
    assert (first, rest, process.returncode) == ("under way\n", "stopped by Ctrl-C\n", 130)


def run_piped(main: str, *words: str, gone: bool) -> tuple[int, str]:
    """The exit code and errors of a script that calls main, when its output's reader is gone or not."""
    program = (
        "from dataclasses import make_dataclass; from scripts.arguments import run_script\n"
        f"run_script(lambda arguments: {main}, make_dataclass('Arguments', []), '')"
    )
    reads, writes = os.pipe()
    if gone:
        os.close(reads)
    # buffered, as users have it: what is still to be written shows at the end only
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    process = subprocess.run(
        [sys.executable, "-c", program, *words], env=env, stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    if not gone:
        os.close(reads)
    return process.returncode, process.stderr


def test_help_whose_reader_has_read_enough_ends_by_sigpipe_without_a_word():
    assert run_piped("None", "--help", gone=True) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("main", ["[print(i, flush=True) for i in range(99999)]", "print('one line')"])
def test_a_script_whose_reader_has_read_enough_ends_by_sigpipe_without_a_word(main):
    assert run_piped(main, gone=True) == (-signal.SIGPIPE, "")


def test_a_broken_pipe_that_is_not_the_output_is_told():
    main = "(_ for _ in ()).throw(BrokenPipeError(32, 'a worker is gone'))"
    assert run_piped(main, gone=False) == (2, "error: [Errno 32] a worker is gone\n")


@pytest.mark.parametrize("command", ["train", "scripts.sample", "scripts.prepare_data"])
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback_unless_it_is_ignored(
    command, ignored, tmp_path
):
    # what all of them import
    seconds = 1 if ignored else 60
    (tmp_path / "omegaconf.py").write_text(
        f"import sys, time\nprint('under way', flush=True)\ntime.sleep({seconds})\nsys.exit(3)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=150)[0]
    code = 3 if ignored else -signal.SIGINT
    assert (first, rest, process.returncode) == ("under way\n", "", code)


def test_a_text_that_the_terminal_has_no_letters_for_is_printed_with_escapes():
    program = (
        "from dataclasses import make_dataclass; from scripts.arguments import run_script\n"
        "run_script(lambda arguments: print('caf\\xe9'), make_dataclass('Arguments', []), '')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("caf\\xe9\n", "", 0)


def test_a_missing_file_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["words", "prompt=missing.txt"])
    with pytest.raises(SystemExit, match="2"):
        run_script(lambda words: Path(words.prompt).read_text(), Words, "")
    assert re.fullmatch(r"error: .*No such file or directory: 'missing.txt'\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device must be one of cuda, cpu, got 'tpu'"),
        ({"attention": "flash"}, "attention=flash runs on a GPU, got device=cpu: use attention=sdpa"),
        ({"precision": "int8"}, "precision must be one of bf16, fp16, fp32, got 'int8'"),
        ({"top_p": 2.0}, r"^top_p must be in \(0, 1\] or null, got 2.0"),
        ({"tokens": -1}, "^tokens must be at least 0, got -1"),
        ({"seed": 2**64}, f"^seed must be from 0 to 18446744073709551615, got {2**64}"),
        ({"run": ""}, "give either run="),
        ({"prompt": "a", "prompt_file": "b"}, "^give either prompt=a or prompt_file=b, not both"),
        ({"prompt": "", "prompt_file": "b"}, "^give either prompt= or prompt_file=b, not both"),
    ],
)
def test_sample_refuses_what_it_cannot_do_before_it_reads_the_model(arguments, message):
    given = {"run": "missing", "tokenizer": "bytes", "device": "cpu", **arguments}
    with pytest.raises(ValueError, match=message):
        sample.main(sample.Arguments(**given))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("binary.txt", "byte 3 is not UTF-8"),
        ("folder", "Is a directory"),
        ("missing.txt", "No such file or directory"),
    ],
)
def test_sample_names_the_prompt_file_that_it_cannot_read(tmp_path, name, reason):
    (tmp_path / "binary.txt").write_bytes(b"def\xa2")
    (tmp_path / "folder").mkdir()
    message = f"prompt_file={tmp_path / name} cannot be read ({reason}): give a file of UTF-8 text"
    with pytest.raises(ValueError, match=re.escape(message)):
        sample.main(
            sample.Arguments(run="missing", tokenizer="bytes", prompt_file=str(tmp_path / name), device="cpu")
        )


def test_a_prompt_file_is_read_as_text_is_for_training(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (trained,) = read_plain(tmp_path / "prompt.txt", Counter())
    assert sample.read_prompt(str(tmp_path / "prompt.txt")) == trained == "one\r\ntwo\n"


@pytest.mark.parametrize("n_texts", [1, 2])
def test_a_prompt_is_printed_before_each_text_and_a_prompt_file_before_none(n_texts, capsys):
    pieces = [(number, piece) for piece in ("b", "c") for number in range(n_texts)]
    for prompt in ("a", ""):
        sample.print_texts(iter(pieces), n_texts, "a", shows_prompt=bool(prompt))
        texts = "".join(f"--- sample {number} ---\n{prompt}bc\n" for number in (1, 2))
        assert capsys.readouterr().out == (f"{prompt}bc\n" if n_texts == 1 else texts)


@pytest.mark.parametrize("script", [benchmark_generate, evaluate_context])
def test_scripts_that_run_a_model_refuse_what_they_cannot_do(script):
    needed = {"model": "missing", "data": "missing"} if script is evaluate_context else {}
    for given, message in (
        ({"precision": "foo"}, "precision must be one of bf16, fp16, fp32, got 'foo'"),
        ({"device": "tpu", "precision": "fp32"}, "device must be one of cuda, cpu, got 'tpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Arguments(**needed, **given))
    for key in ("sequences", "scored", "prompts") if needed else ():
        arguments = {"device": "cpu", "precision": "fp32", "attention": "sdpa", key: 0}
        with pytest.raises(ValueError, match=f"{key} must be at least 1, got 0"):
            script.main(script.Arguments(**needed, **arguments))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder", "^out must end in .json, got folder"),
        ("rows.png", "^out must end in .json, got rows.png"),
        ("folder.json", "^out=folder.json: folder.json exists, choose another name"),
        ("rows.json", "^out=rows.json: rows.json exists, choose another name"),
        ("drawn.json", "^out=drawn.json: drawn.png exists, choose another name"),
        ("rows.json/new.json", "^out=rows.json/new.json: nothing can be written to /.*/rows.json, choose"),
    ],
)
def test_an_evaluation_writes_over_nothing_and_says_so_before_it_begins(out, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "folder.json"):
        Path(name).mkdir()
    for name in ("rows.json", "drawn.png"):
        Path(name).touch()
    with pytest.raises(ValueError, match=message):
        evaluate_context.main(evaluate_context.Arguments(model="missing", data="missing", out=out))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "^data='.*' has no manifest.json, .*: choose another data, or prepare it with python -m"),
        ("{}", "no manifest of ours, format must be 'nanoflash corpus': choose another data$"),
    ],
)
def test_an_evaluation_names_its_own_argument_where_no_text_was_prepared(manifest, message, tmp_path):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    given = {"device": "cpu", "precision": "fp32", "out": str(tmp_path / "context.json")}
    with pytest.raises(ValueError, match=message):
        evaluate_context.main(evaluate_context.Arguments(model="missing", data=str(tmp_path), **given))


def test_an_evaluation_reads_text_whose_tokenizer_is_gone_by_the_models_own_if_it_is_the_same(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        write_tokenizer(folder)
    (other / "tokenizer.json").write_text("{}")
    write_shard(tmp_path / "val.bin", np.ones(3, np.uint16), tokenizer=shard_mark(str(own)))
    splits = {"val": {"shards": [{"file": "val.bin"}]}}
    arguments = evaluate_context.Arguments(model="m", data=str(tmp_path))

    def tokenizer(prepared: Path, models: Path) -> str:
        manifest = {"config": {"tokenizer": str(prepared)}, "splits": splits}
        return evaluate_context.text_tokenizer(arguments, manifest, str(models))

    assert tokenizer(other, own) == str(other)
    assert tokenizer(tmp_path / "gone", own) == str(own)
    gone = (
        f"^data={tmp_path} was prepared with the tokenizer of {tmp_path}/gone, where no tokenizer.json is, "
    )
    with pytest.raises(ValueError, match=gone + "and that of .*other, the model's own, does not open it"):
        tokenizer(tmp_path / "gone", other)
    with pytest.raises(ValueError, match=gone + "nor in .*away, where the model has its own: put it back"):
        tokenizer(tmp_path / "gone", tmp_path / "away")
    manifest = {"config": {"tokenizer": str(tmp_path / "gone")}, "splits": splits, "end_of_text": 5}
    with pytest.raises(ValueError, match=gone + "and with token 5 as the end of text, which is 0 in .*own"):
        evaluate_context.text_tokenizer(arguments, manifest, str(own))


def test_a_result_in_a_folder_that_is_read_only_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    # root may write everywhere, but on a read-only disk
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    arguments = benchmark_attention.Arguments(out=str(tmp_path / "new" / "deeper" / "rows.json"))
    with pytest.raises(ValueError, match=f"^out=.*: nothing can be written to {tmp_path}, choose another"):
        check_results(arguments)
    (tmp_path / "new").mkdir()
    check_results(arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_len": 1024}, "^seq_len must be from 2 to the model's 512 positions, got 1024"),
        ({"seq_len": 0}, "^seq_len must be from 2 to the model's 512 positions, got 0"),
        ({"seq_len": 32}, r"^lengths must be from 64 to the model's 512 .* got \[32\] with seq_len=32"),
        ({"lengths": [256, 1024]}, r"^lengths must be from 64 .* got \[256, 1024\] with seq_len=512"),
        ({"lengths": [16]}, r"^lengths must be from 64 .* got \[16\]"),
    ],
)
def test_an_evaluation_refuses_lengths_that_the_model_has_no_room_for(given, message):
    with pytest.raises(ValueError, match=message):
        evaluate_context.checked_lengths(evaluate_context.Arguments(model="a", data="b", **given), 512)


def test_an_evaluation_refuses_a_seed_that_it_cannot_draw_from_before_it_reads_the_text():
    with pytest.raises(ValueError, match="^seed must be at least 0, got -1"):
        evaluate_context.main(
            evaluate_context.Arguments(model="a", data="b", device="cpu", precision="fp32", seed=-1)
        )


def test_an_evaluation_refuses_a_model_too_short_for_recall():
    arguments = evaluate_context.Arguments(model="a", data="b", seq_len=16)
    with pytest.raises(ValueError, match="model=a has 32 positions, recall needs 64: train it with"):
        evaluate_context.checked_lengths(arguments, 32)


def test_an_evaluation_takes_the_models_length_and_its_halves():
    arguments = evaluate_context.Arguments(model="a", data="b")
    assert evaluate_context.checked_lengths(arguments, 1024) == (1024, [1024, 512, 256])


def test_an_evaluation_scores_as_many_tokens_as_it_is_told_or_refuses_to():
    given = {"model": "a", "data": "b"}
    for scored, seq_len, expected in ((None, 1024, 256), (None, 256, 128), (128, 256, 128)):
        arguments = evaluate_context.Arguments(**given, scored=scored)
        assert evaluate_context.checked_scored(arguments, seq_len) == expected
    with pytest.raises(ValueError, match="^scored must be at most 128, half of seq_len=256, got 300: lower"):
        evaluate_context.checked_scored(evaluate_context.Arguments(**given, scored=300), 256)


def test_needles_lie_inside_their_prompt():
    with pytest.raises(ValueError, match=r"depths must be from 0 to 1, got \[0.5, 2.0\]"):
        evaluate_context.main(evaluate_context.Arguments(model="a", data="b", depths=[0.5, 2.0]))


@pytest.mark.parametrize(
    ("given", "unable"), [({"window": 1024}, "cudnn fa2"), ({"dropout_p": 0.1}, "cudnn flex fa4")]
)
def test_benchmark_attention_refuses_implementations_that_lack_an_option(given, unable):
    with pytest.raises(ValueError, match=f"only: leave {unable} out of implementations"):
        benchmark_attention.main(benchmark_attention.Arguments(**given))


def test_speed_counts_the_scores_that_a_causal_mask_keeps():
    # of 16 one, and three times two
    assert benchmark_attention.visible_share(4, 2) == 7 / 16
    assert benchmark_attention.visible_share(4, None) == benchmark_attention.visible_share(4, 4) == 0.5


def test_pictures_of_attention_name_each_length_as_it_is(figures, tmp_path):
    lengths = [512, 1024, 1536, 16384]
    times = {f"{direction}_{unit}": 1.0 for direction in ("forward", "backward") for unit in ("ms", "tflops")}
    times |= {"allowed_forward_ms": 1.0, "allowed_backward_ms": 1.0}
    rows = [
        {"implementation": "ours", "seq_len": length, "head_dim": 64, "causal": True, "packed": False}
        | {"deterministic": False, "density": 1.0, "pattern": "dense", **times}
        for length in lengths
    ]
    result = {"gpu": None, "torch": "2", "triton": "3"}
    benchmark_attention.plot(rows, result, tmp_path / "a.png")
    benchmark_block_sparse.plot(rows, result, tmp_path / "b.png")
    names = ["512", "1K", "1536", "16K"]
    for axis in figures[0].axes:
        assert [label.get_text() for label in axis.get_xticklabels()] == names
    assert [axis.get_title() for axis in figures[1].axes[:4]] == [f"forward, D 64, T {x}" for x in names]


def test_flash_attention_4_is_left_out_where_it_is_missing_and_asked_for_the_same_masks(monkeypatch, capsys):
    names = ["ours", "fa4"]
    flash_attn_4.leave_out_if_missing(names)
    assert names == ["ours"]
    assert capsys.readouterr().out == "fa4 is left out: flash-attn-4 is not installed\n"
    asked = []
    module = SimpleNamespace(flash_attn_func=lambda *qkv, **named: asked.append(named) or ("out", "lse"))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    for pattern, window in (("dense", None), ("causal()", None), ("window(1024)", 1024)):
        match = benchmark_block_sparse.FA4_PATTERN.fullmatch(pattern)
        assert match[1] == (window and str(window))
        assert flash_attn_4.flash_attn_4(causal=True, window=window)("q", "k", "v") == "out"
    assert asked[1:] == [
        {"causal": True, "window_size": (None, None)},
        {"causal": True, "window_size": (1023, 0)},
    ]
    assert not benchmark_block_sparse.FA4_PATTERN.fullmatch("window(1024) | strided(16)")


def test_benchmarks_refuse_a_window_that_looks_ahead_and_a_dropout_that_flex_has_not():
    with pytest.raises(ValueError, match=r"window=64 looks back only: use causal=\[true\]"):
        benchmark_attention.main(benchmark_attention.Arguments(window=64, implementations=["ours"]))
    with pytest.raises(ValueError, match="dropout_p=0.1: leave flex fa4 out of implementations"):
        benchmark_block_sparse.main(benchmark_block_sparse.Arguments(dropout_p=0.1))
    with pytest.raises(ValueError, match="document_tokens=500: leave flex fa4 out of implementations"):
        benchmark_block_sparse.main(benchmark_block_sparse.Arguments(document_tokens=500))
    with pytest.raises(ValueError, match="document_tokens must be at least 0, got -1"):
        benchmark_block_sparse.main(benchmark_block_sparse.Arguments(document_tokens=-1))


@pytest.mark.parametrize(
    ("script", "argument"),
    [
        (sample, "run"),
        (sample, "checkpoint"),
        (evaluate_context, "model"),
        (export_hf, "model"),
    ],
)
def test_a_script_names_the_argument_whose_folder_holds_no_model(script, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    given = {} if script is export_hf else {"device": "cpu"}
    given |= {"data": "text"} if script is evaluate_context else {}
    given |= {"out": "out.json"} if script is not sample else {}
    monkeypatch.setattr(evaluate_context, "read_manifest", lambda *_, **named: {})
    for source, message in (
        ("missing", f"^{argument}: missing does not exist: give a run's folder"),
        ("runs", f"^{argument}: runs holds neither config.json, .* nor a checkpoint: give runs/NAME"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Arguments(**given, precision="fp32", **{argument: source}))
    if script is not sample:
        with pytest.raises(ValueError, match=f"^{argument} must name a run's folder, .* got ''"):
            script.main(script.Arguments(**given, precision="fp32", **{argument: ""}))


def write_model(folder: Path, **sizes: int) -> None:
    """A Hugging Face folder of a model of one layer, without a tokenizer."""
    torch.manual_seed(0)
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, dropout=0.0, **sizes)
    export_pretrained(GPT(config, AttentionConfig(implementation="reference")), folder)


@pytest.mark.parametrize("script", [sample, export_hf])
def test_a_damaged_checkpoint_is_told_once_by_a_script_that_takes_the_one_before(script, tmp_path, capsys):
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 257, "max_seq_len": 8}
    model = GPT(ModelConfig(**sizes, dropout=0.0), AttentionConfig(implementation="reference"))
    config = {"model": sizes | {"dropout": 0.0}, "attention": asdict(model.attention)}
    config["data"] = {"tokenizer": "bytes"}
    checkpoints = tmp_path / "run" / "checkpoints"
    with CheckpointSaver(checkpoints, settings(), PROCESSES) as saver:
        for step in (1, 2):
            saver.save(run_tensors(model, None), {"step": step, "val_loss": None, "config": config})
    shard = checkpoints / "step_00000002" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    if script is sample:
        arguments = sample.Arguments(run=str(tmp_path / "run"), tokens=1, device="cpu", precision="fp32")
    else:
        arguments = export_hf.Arguments(model=str(tmp_path / "run"), out=str(tmp_path / "out"))
    script.main(arguments)
    assert capsys.readouterr().err.count("step_00000002 is damaged") == 1


def test_sample_refuses_a_tokenizer_that_the_model_does_not_know(tmp_path):
    write_model(tmp_path / "model", vocab_size=100, max_seq_len=8)
    given = {"checkpoint": str(tmp_path / "model"), "device": "cpu", "precision": "fp32"}
    with pytest.raises(ValueError, match="tokenizer=bytes has 257 tokens, the model 100: give the one that"):
        sample.main(sample.Arguments(**given, tokenizer="bytes"))


def test_sample_stops_at_ids_that_the_model_has_alone(tmp_path):
    write_model(tmp_path / "model", vocab_size=300, max_seq_len=8)
    given = {"checkpoint": str(tmp_path / "model"), "tokenizer": "bytes", "device": "cpu"}
    given |= {"precision": "fp32", "prompt": "a", "tokens": 1}
    sample.main(sample.Arguments(**given, stop_tokens=[0, 299]))
    for token in (-1, 300):
        with pytest.raises(ValueError, match=rf"^stop_tokens must be ids from 0 to 299, got \[{token}\]"):
            sample.main(sample.Arguments(**given, stop_tokens=[token]))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_an_export_has_weights_in_the_precision_that_is_asked_for(precision, dtype, tmp_path, capsys):
    write_model(tmp_path / "model", vocab_size=257, max_seq_len=8)
    out = tmp_path / "out"
    export_hf.main(
        export_hf.Arguments(
            model=str(tmp_path / "model"), out=str(out), tokenizer="bytes", precision=precision
        )
    )
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {dtype}
    assert f" parameters, {precision}\n" in capsys.readouterr().out


@pytest.mark.parametrize("script", [sample, export_hf])
def test_a_tokenizer_that_is_not_the_models_own_is_refused_by_name(script, tmp_path):
    published, model = tmp_path / "published", tmp_path / "model"
    write_tokenizer(published)
    write_model(model, vocab_size=257, max_seq_len=8)
    key = "checkpoint" if script is sample else "model"
    given = {"device": "cpu", "tokens": 0} if script is sample else {"out": str(tmp_path / "out")}
    given |= {key: str(model), "precision": "fp32"}
    own = f"{key}={model} has its tokenizer in {model}, where no tokenizer.json is: give tokenizer=gpt2, b"
    with pytest.raises(ValueError, match=f"^{own}"):
        script.main(script.Arguments(**given))
    with pytest.raises(
        ValueError, match="^tokenizer=nowhere holds no tokenizer.json: give tokenizer=gpt2, b"
    ):
        script.main(script.Arguments(**given, tokenizer="nowhere"))
    for file in published.glob("tokenizer*"):
        shutil.copy(file, model)
    other = f"tokenizer=bytes gives other tokens than {model}, which {key}={model} reads: leave it out"
    with pytest.raises(ValueError, match=f"^{other}"):
        script.main(script.Arguments(**given, tokenizer="bytes"))
    assert not (tmp_path / "out").exists()
    script.main(script.Arguments(**given, tokenizer=str(published)))


def test_an_export_into_a_folder_that_is_read_only_is_refused_before_it_reads_the_model(
    tmp_path, monkeypatch
):
    out = tmp_path / "empty"
    out.mkdir()
    # root may write everywhere, but on a read-only disk
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != out)
    with pytest.raises(
        ValueError, match=f"^out={out}: nothing can be written to {out}, choose another place"
    ):
        export_hf.main(export_hf.Arguments(model="missing", out=str(out), precision="fp32"))


@pytest.mark.parametrize("out", ["", "file", "full", "file/below"])
def test_an_export_names_the_folder_that_it_cannot_write_before_it_reads_the_model(
    out, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    for name in ("file", "full/kept"):
        Path(name).write_text("kept")
    message = f"^out must be a new or empty folder, got '{out}': nothing is overwritten"
    if out == "file/below":
        message = "^out=file/below: nothing can be written to .*/file, choose another place"
    with pytest.raises(ValueError, match=message):
        export_hf.main(export_hf.Arguments(model="missing", out=out, precision="fp32"))
    assert (Path("file").read_text(), Path("full/kept").read_text()) == ("kept", "kept")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate")],
)
def test_sample_refuses_more_samples_than_go_on_together_and_names_those_without_memory(
    error, tmp_path, monkeypatch
):
    with pytest.raises(ValueError, match=f"^samples must be from 1 to 65536, got {10**23}$"):
        sample.main(sample.Arguments(checkpoint="m", samples=10**23))
    write_model(tmp_path / "model", vocab_size=257, max_seq_len=16)

    def too_many(*given, **named):
        raise error

    monkeypatch.setattr(sample, "stream_text", lambda *given, **named: map(too_many, [0]))
    given = {
        "checkpoint": str(tmp_path / "model"),
        "tokenizer": "bytes",
        "device": "cpu",
        "precision": "fp32",
    }
    with pytest.raises(
        ValueError,
        match="^samples=9 of prompts of 4 tokens and tokens=5 do not fit into the memory of device=cpu",
    ):
        sample.main(sample.Arguments(**given, samples=9, tokens=5))


def test_sample_tells_how_many_tokens_the_models_positions_leave(tmp_path, capsys):
    write_model(tmp_path / "model", vocab_size=257, max_seq_len=16)

    def printed(tokens: int) -> tuple[str, str]:
        given = {"tokenizer": "bytes", "prompt": "def", "tokens": tokens, "samples": 2}
        model = str(tmp_path / "model")
        sample.main(sample.Arguments(checkpoint=model, device="cpu", precision="fp32", **given))
        return capsys.readouterr()

    # the end of the document before is a token too
    whole, remark = printed(12)
    assert remark == ""
    assert printed(13) == (
        whole,
        "tokens=13, but of the model's 16 positions the prompt takes 4: at most 12 tokens come; lower "
        "tokens, shorten the prompt, or extend the model (docs/long_context.md)\n",
    )


def test_sample_names_the_prompt_that_the_models_positions_do_not_hold(tmp_path):
    write_model(tmp_path / "model", vocab_size=257, max_seq_len=16)
    (tmp_path / "long.txt").write_text("x" * 20)
    given = {
        "checkpoint": str(tmp_path / "model"),
        "tokenizer": "bytes",
        "device": "cpu",
        "precision": "fp32",
    }
    for prompt in ({"prompt": "x" * 20}, {"prompt_file": str(tmp_path / "long.txt")}):
        [name] = prompt
        message = (
            f"^{name}: the prompt has 21 tokens, the model 16 positions: shorten it, or extend the model"
        )
        with pytest.raises(ValueError, match=message):
            sample.main(sample.Arguments(**given, **prompt))


def test_sample_begins_a_text_as_the_model_in_a_hugging_face_folder_has_learned_it(tmp_path, monkeypatch):
    folder, seen = tmp_path / "model", []
    write_model(folder, vocab_size=257, max_seq_len=16)
    monkeypatch.setattr(sample, "stream_text", lambda *_, begin, **named: seen.append(begin) or [])
    given = {"checkpoint": str(folder), "tokens": 2, "device": "cpu", "precision": "fp32"}
    sample.main(sample.Arguments(**given, tokenizer="bytes"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 2}))
    sample.main(sample.Arguments(**given, tokenizer="bytes"))
    # the same tokenizer, which knows better
    words = tokenizers.models.WordLevel({"<end>": 0, "<s>": 1, "def": 2}, unk_token="<end>")
    vocabulary = tokenizers.Tokenizer(words)
    vocabulary.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    vocabulary.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    sample.main(sample.Arguments(**given))
    assert seen == [[256], [2], [1]]
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 257}))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"config.json: bos_token_id must be a token, from 0 to 256 with"):
        sample.main(sample.Arguments(**given, tokenizer="bytes"))


def test_sample_needs_a_run_or_a_checkpoint(tmp_path, call_here):
    assert "give either run=" in call_here("sample").stderr
    assert "nor a checkpoint" in call_here("sample", f"run={tmp_path}").stderr


def test_benchmark_training_writes_a_row_for_each_combination(tmp_path):
    done = call(
        "benchmark_training", "models=[tiny]", "seq_lens=[32,64]", "implementations=[sdpa,reference]",
        "tokens_per_step=128", "tokens_per_microbatch=64", "steps=1", "warmup_steps=1", "device=cpu",
        "precision=fp32", "compile=false", "fused_loss=false", "bias=none",
        f"out={tmp_path}/r.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert {"gpu", "driver", "torch", "triton", "command", "date", "commit"} <= set(result)
    rows = result["rows"]
    assert [(r["seq_len"], r["implementation"]) for r in rows] == [
        (32, "sdpa"), (32, "reference"), (64, "sdpa"), (64, "reference"),
    ]  # fmt: skip
    assert all(r["tokens_per_second"] > 0 and r["mfu_palm"] is None for r in rows)
    assert {r["bias"] for r in rows} == {"none"}
    assert rows[0]["final_loss"] == pytest.approx(rows[1]["final_loss"], abs=1e-4)


def test_benchmark_training_gives_each_row_its_own_peak_of_memory():
    arguments = benchmark_training.Arguments(
        models=["tiny"], seq_lens=[2048, 64], implementations=["sdpa"], tokens_per_step=2048,
        tokens_per_microbatch=2048, steps=1, warmup_steps=0, device="cpu", compile=False, fused_loss=False,
        precision="fp32",
    )  # fmt: skip
    peaks = []
    for _, model, seq_len, step in benchmark_training.steps_to_measure(arguments):
        given = replace(arguments, tokens_per_step=seq_len, tokens_per_microbatch=seq_len)
        peaks.append(benchmark_training.measure(given, model, seq_len, step)["peak_memory_bytes"])
    if not os.access(RESET, os.W_OK):
        pytest.skip("this container lets no process forget its peak")
    # what a process holds already counts in both
    assert peaks[1] < peaks[0] - 2**28


def test_the_picture_of_a_ladder_says_which_rung_found_no_memory(figures, tmp_path):
    draw_bars({"a": 90421.6, "b": None, "c": 0.4}, tmp_path / "ladder.png", "ladder", "tokens/s")
    [axis] = figures[0].axes
    assert [text.get_text() for text in axis.texts] == ["90,422", "out of memory", "0"]
    assert [bar.get_width() for bar in axis.patches] == [90421.6, 0.0, 0.4]


def test_benchmark_training_says_of_each_row_whether_gelu_was_inside_of_the_products(monkeypatch):
    # as on Hopper
    monkeypatch.setattr(benchmark_training, "has_fused_gelu", lambda device: True)
    usual = benchmark_training.Arguments(
        models=["tiny"], seq_lens=[32], implementations=["sdpa"], tokens_per_step=64, steps=1,
        tokens_per_microbatch=64, warmup_steps=0, device="cpu", compile=False, fused_loss=False,
    )  # fmt: skip
    for given, had in (
        ({}, True),
        ({"fused_gelu": False}, False),
        ({"recompute": ["full"]}, False),
        ({"precision": "fp32"}, False),
    ):
        arguments = replace(usual, **given)
        [(*_, step)] = benchmark_training.steps_to_measure(arguments)
        assert benchmark_training.measure(arguments, "tiny", 32, step)["fused_gelu"] is had, given


def test_benchmark_training_writes_each_job_with_its_aim_as_json_and_as_a_table(tmp_path, monkeypatch):
    made = [
        benchmark_training.Job("tiny", 32, "a lot", tokens_per_microbatch=64, tokens_per_step=128),
        benchmark_training.Job("tiny", 64, tokens_per_microbatch=128, tokens_per_step=128),
    ]
    monkeypatch.setattr(benchmark_training, "JOBS", made)
    arguments = benchmark_training.Arguments(
        jobs=True, implementations=["sdpa"], steps=1, warmup_steps=1, device="cpu", precision="fp32",
        compile=False, fused_loss=False, out=str(tmp_path / "r.json"),
    )  # fmt: skip
    benchmark_training.main(arguments)
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["seq_len"], row["batch"], row["aim"]) for row in rows] == [(32, 2, "a lot"), (64, 2, "")]
    head, _, *lines = (tmp_path / "r.md").read_text().splitlines()
    assert [line.count("|") for line in lines] == [head.count("|")] * 2
    speed = readable(rows[0]["tokens_per_second"])
    assert lines[0].startswith(f"| tiny, T 32, B 2, 128 tokens | sdpa | {speed} |")
    assert lines[0].endswith("| a lot |")
    with pytest.raises(ValueError, match="jobs=true brings its own models, .*, got seq_lens: leave it out"):
        benchmark_training.main(replace(arguments, seq_lens=[32]))
    with pytest.raises(ValueError, match="jobs=true brings its own models, .*, got ladder: leave it out"):
        list(benchmark_training.aims(benchmark_training.Arguments(jobs=True, ladder=True)))
    with pytest.raises(ValueError, match=r"out=r.md must name the JSON file, .*: use r.json"):
        check_results(replace(arguments, out="r.md"))


def test_the_jobs_of_the_benchmark_are_steps_of_whole_sequences_of_known_models():
    check_models([job.model for job in benchmark_training.JOBS])
    for _, given in benchmark_training.aims(benchmark_training.Arguments(jobs=True)):
        [(label, name, seq_len, step)] = benchmark_training.steps_to_measure(given)
        overrides = [f"model={name}", f"seq_len={seq_len}"]
        for key in ("tokens_per_step", "tokens_per_microbatch"):
            overrides.append(f"{key}={max(getattr(given, key), seq_len)}")
        assert parse(composed(*overrides)).accumulation(1) in (1, 2)
        assert (label, step.implementation) == ("flash", "flash")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"peers": ["nanogpt"]}, "peers must be one of transformers, liger, got 'nanogpt'"),
        (
            {"peers": ["liger"]},
            "peers: liger-kernel has nothing for GPT-2: leave it out, or use models=",
        ),
        ({"peers": ["transformers"], "bias": "none"}, "GPT2LMHeadModel needs model.bias=all, it is none"),
        ({"peers": ["transformers"], "ladder": True}, "ladder=true sets peers itself, got "),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"device": "tpu"}, "device must be one of cuda, cpu, got 'tpu'"),
        ({"seq_lens": []}, "nothing to measure: seq_lens must not be empty, name one"),
        ({"seq_lens": [32, 0]}, r"seq_lens must be at least 1, got \[32, 0\]"),
        ({"tokens_per_step": 0}, "tokens_per_step must be at least 1, got 0"),
        ({"implementations": ["sdpa", "flex"]}, "implementations must be one of flash, sdpa, reference, got"),
        ({"recompute": ["all"]}, "recompute must be one of none, selective, full, got 'all'"),
        ({"seq_lens": [32, 48]}, "tokens_per_microbatch=64 must be a multiple of seq_len=48: change one of"),
        (
            {"tokens_per_step": 96},
            "tokens_per_step=96 must be a multiple of tokens_per_microbatch=64: change",
        ),
        ({}, r"flash .* run on a GPU, got device=cpu: use implementations=\[sdpa\] fused_loss=false$"),
        ({"implementations": ["sdpa"]}, "the fused loss run on a GPU, got device=cpu: use"),
        ({"implementations": ["sdpa", "flash"], "fused_loss": False}, "got device=cpu: use"),
        ({"ladder": True}, "fused_loss=false, without ladder=true$"),
        ({"ladder": True, "compile": False}, "ladder=true sets compile itself, got False: leave it out"),
        (
            {"ladder": True, "seq_lens": [32, 64]},
            r"ladder=true measures a single one, got seq_lens=\[32, 64\]: name one",
        ),
    ],
)
def test_benchmark_training_refuses_what_it_would_not_do_before_a_row_is_measured(
    given, message, monkeypatch
):
    monkeypatch.setattr(benchmark_training, "measure", None)
    usual = {"models": ["tiny"], "seq_lens": [32], "device": "cpu", "tokens_per_microbatch": 64}
    with pytest.raises(ValueError, match=message):
        benchmark_training.main(benchmark_training.Arguments(**usual | given))


def test_benchmark_training_takes_the_mean_over_the_steps_that_it_times(monkeypatch):
    watch = SimpleNamespace(start=lambda: None, seconds=lambda: 6.0)
    monkeypatch.setattr(benchmark_training, "Stopwatch", lambda device: watch)
    given = benchmark_training.Arguments(
        models=["tiny"], seq_lens=[32], implementations=["sdpa"], tokens_per_step=128, steps=3,
        tokens_per_microbatch=64, warmup_steps=1, device="cpu", precision="fp32", compile=False,
        fused_loss=False,
    )  # fmt: skip
    [(*_, step)] = benchmark_training.steps_to_measure(given)
    row = benchmark_training.measure(given, "tiny", 32, step)
    assert (row["step_ms"], row["tokens_per_second"]) == (2000.0, 64.0)


def test_benchmark_training_refuses_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process is timed, got 2: start it without torchrun"):
        benchmark_training.main(benchmark_training.Arguments(models=["tiny"], device="cpu"))


def test_benchmark_checkpoints_leaves_a_folder_as_it_was(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "thesis.txt").write_text("mine")
    given = {"models": ["tiny"], "tokens_per_step": 32, "saves": 1, "device": "cpu"}
    out = tmp_path / "rows.json"
    benchmark_checkpoints.main(benchmark_checkpoints.Arguments(**given, folder=str(disk), out=str(out)))
    assert json.loads(out.read_text())["rows"][0]["bytes"] > 3_400_000 * 4
    assert [path.name for path in disk.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "reason"), [("file", "File exists"), ("file/below", "Not a directory")], ids=["file", "below"]
)
def test_benchmark_checkpoints_names_a_folder_that_is_none(name, reason, tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / name)
    message = f"^folder={re.escape(folder)} cannot be made [(]{reason}[)]: name one that is there or can be"
    with pytest.raises(ValueError, match=message):
        benchmark_checkpoints.main(
            benchmark_checkpoints.Arguments(models=["tiny"], folder=folder, device="cpu")
        )


def test_benchmark_checkpoints_refuses_steps_of_other_tokens_than_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(benchmark_checkpoints, "measure", lambda *given: pytest.fail("it measures"))
    arguments = benchmark_checkpoints.Arguments(tokens_per_step=1500, device="cpu")
    message = "^tokens_per_step above 1024 must be a multiple of it, got 1500: use 2048$"
    with pytest.raises(ValueError, match=message):
        benchmark_checkpoints.main(arguments)


def test_benchmark_checkpoints_refuses_several_processes(tmp_path, monkeypatch):
    two = Processes(0, 2, torch.device("cpu"), dist.HashStore(), None)
    monkeypatch.setattr(benchmark_checkpoints, "join_processes", lambda device: nullcontext(two))
    with pytest.raises(ValueError, match="one process is timed, got 2: start it without torchrun"):
        benchmark_checkpoints.main(benchmark_checkpoints.Arguments(models=["tiny"], folder=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [1, 3])
def test_benchmark_generate_times_as_many_tokens_as_it_is_asked_to(tokens, tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(benchmark_generate, "median", lambda seconds: timed.append(len(seconds)) or 1.0)
    given = {"models": ["tiny"], "seq_lens": [8], "implementations": ["sdpa"], "compiled": [False]}
    out = tmp_path / "rows.json"
    benchmark_generate.main(
        benchmark_generate.Arguments(**given, tokens=tokens, precision="fp32", device="cpu", out=str(out))
    )
    assert timed == [tokens]
    assert json.loads(out.read_text())["rows"][0]["tokens_per_second"] == 1.0


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_benchmark_generate_counts_the_bytes_of_the_cache_that_generation_has(name):
    attention = AttentionConfig(implementation="reference", patterns=["dense", "window(16)"])
    with torch.device("meta"):
        model = GPT(replace(read_model(name, 96), n_layer=2), attention)
    caches = empty_caches(model, 96, torch.zeros(3, dtype=torch.int64))
    held = sum(x.numel() * x.element_size() for cache in caches for x in (cache.k, cache.v))
    assert benchmark_generate.cache_bytes(model, 3, 96) == held


@pytest.mark.parametrize(
    "script", [benchmark_attention, benchmark_block_sparse, benchmark_host, benchmark_ring]
)
def test_a_benchmark_that_is_ended_leaves_the_rows_that_it_has_measured(script, tmp_path, monkeypatch):
    asked = []

    def measure(arguments, *shape, **mask):
        asked.append(shape)
        if len(asked) == 3:
            raise KeyboardInterrupt
        names = ("implementation", "pattern", "deterministic", "density", "head_dim", "seq_len", "causal")
        rates = (f"{d}_{unit}" for d in ("forward", "backward") for unit in ("ms", "tflops"))
        return [dict.fromkeys((*names, "packed", "extra_bytes", "max_error", *rates), 1)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(script, "measure", measure)
    given = {"implementations": ["ours"]}
    if script is benchmark_ring:
        two = Processes(0, 2, torch.device("cpu"), dist.HashStore(), None)
        monkeypatch.setattr(benchmark_ring, "join_processes", lambda device: nullcontext(two))
        given = {"implementation": "reference", "device": "cpu"}
    out = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        script.main(script.Arguments(head_dims=[64, 128, 256], out=str(out), **given))
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_a_benchmark_of_the_host_refuses_a_width_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark_host, "measure", lambda *given: pytest.fail("it measures"))
    given = {"implementations": ["ours"], "out": str(tmp_path / "rows.json")}
    with pytest.raises(ValueError, match="^width=768 must be a multiple of head_dim 100: change one"):
        benchmark_host.main(benchmark_host.Arguments(**given, head_dims=[64, 100]))


@pytest.mark.parametrize("script", [benchmark_attention, benchmark_block_sparse])
def test_a_benchmark_of_nothing_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"gpt2": False} if script is benchmark_attention else {}
    out = tmp_path / "rows.json"
    with pytest.raises(ValueError, match="^nothing to measure: .*seq_lens.* must not be empty"):
        script.main(script.Arguments(seq_lens=[], implementations=["ours"], out=str(out), **given))
    assert not out.exists()


LISTS = [
    (benchmark_attention, ("implementations",)),
    (benchmark_block_sparse, ("implementations",)),
    (benchmark_checkpoints, ("models",)),
    (
        benchmark_generate,
        ("models", "seq_lens", "batches", "patterns", "implementations", "compiled"),
    ),
    (benchmark_host, ("implementations", "head_dims")),
    (benchmark_ring, ("head_dims",)),
]


@pytest.mark.parametrize(("script", "key"), [(script, key) for script, keys in LISTS for key in keys])
def test_a_benchmark_refuses_a_list_that_leaves_nothing_to_measure(script, key, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "rows.json"
    with pytest.raises(ValueError, match=f"^nothing to measure: {key} must not be empty"):
        script.main(script.Arguments(**{key: []}, out=str(out)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"device": "cpu"},
            "^implementation=flash runs on a GPU, got device=cpu: use implementation=reference",
        ),
        ({"implementation": "sdpa"}, "^implementation must be one of flash, reference, got 'sdpa'"),
        ({"tokens_per_gpu": 101}, "^tokens_per_gpu must be a multiple of 2, got 101: use 102"),
        (
            {"tokens_per_gpu": 300, "windows": [], "patterns": ["window(128)"]},
            "^tokens_per_gpu must be a multiple of 256 for patterns, got 300: use 512",
        ),
    ],
)
def test_a_ring_benchmark_refuses_what_cannot_be_shared_or_run_before_it_measures(given, message, tmp_path):
    out = tmp_path / "rows.json"
    with pytest.raises(ValueError, match=message):
        benchmark_ring.main(benchmark_ring.Arguments(**given, out=str(out)))
    assert not list(tmp_path.iterdir())


def test_a_ring_benchmark_of_neither_windows_nor_patterns_is_refused(tmp_path):
    out = tmp_path / "rows.json"
    with pytest.raises(ValueError, match="^nothing to measure: windows and patterns must not both be empty"):
        benchmark_ring.main(benchmark_ring.Arguments(windows=[], patterns=[], out=str(out)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        (benchmark_ring, {"patterns": ["windw(64)"]}, "^'windw.64.' in 'windw.64.' is no pattern: combine"),
        (benchmark_ring, {"patterns": ["butterfly()"]}, "^patterns: butterfly.. sees keys behind the query"),
        (benchmark_ring, {"windows": [0, -1]}, r"^windows must be at least 0, .* got \[0, -1\]"),
        (
            benchmark_block_sparse,
            {"patterns": ["dense", "windw(64)"]},
            "in 'windw.64.' is no pattern: combine",
        ),
        (
            benchmark_block_sparse,
            {"patterns": ["dense", "butterfly()"]},
            r"^patterns: butterfly\(\) sees keys behind the query: add & causal\(\)$",
        ),
        (benchmark_block_sparse, {"block_size": 32}, r"^block_size must be one of \(64, 128\), got 32"),
    ],
)
def test_a_benchmark_refuses_a_mask_that_there_is_not_before_it_measures(script, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        script.main(script.Arguments(**given, out=str(tmp_path / "rows.json")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [benchmark_attention, benchmark_block_sparse, benchmark_host])
def test_a_benchmark_of_a_package_alone_that_is_missing_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash_attn_4, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^nothing to measure: implementations must not be empty"):
        script.main(script.Arguments(implementations=["fa4"], out=str(tmp_path / "rows.json")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "key", "value"),
    [
        (benchmark_attention, "seq_lens", [0]),
        (benchmark_attention, "head_dims", [0]),
        (benchmark_attention, "repeats", 0),
        (benchmark_block_sparse, "head_dims", [0]),
        (benchmark_block_sparse, "repeats", 0),
        (benchmark_ring, "repeats", 0),
        (benchmark_ring, "tokens_per_gpu", 0),
    ],
)
def test_benchmarks_refuse_numbers_below_one_before_measuring(script, key, value, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "measure", lambda *given: pytest.fail("it measures"))
    given = {} if script is benchmark_ring else {"implementations": ["ours"]}
    with pytest.raises(ValueError, match=f"^{key} must be at least 1, got {re.escape(str(value))}"):
        script.main(script.Arguments(**given, **{key: value}))


def test_benchmark_generate_refuses_a_memory_without_speed(tmp_path):
    with pytest.raises(ValueError, match="^bandwidth must be above 0, got 0.0"):
        benchmark_generate.main(
            benchmark_generate.Arguments(
                bandwidth=0.0,
                device="cpu",
                precision="fp32",
                implementations=["sdpa"],
                out=str(tmp_path / "a.json"),
            )
        )


@pytest.mark.parametrize(("key", "nothing"), [("tokens", 0), ("batches", [0]), ("seq_lens", [8, 0])])
def test_benchmark_generate_refuses_to_time_nothing(key, nothing, tmp_path):
    given = {"models": ["tiny"], "seq_lens": [8], "implementations": ["sdpa"], "compiled": [False]}
    given |= {"precision": "fp32", "device": "cpu", "out": str(tmp_path / "rows.json"), key: nothing}
    with pytest.raises(ValueError, match=f"^{key} must be at least 1, got {re.escape(str(nothing))}"):
        benchmark_generate.main(benchmark_generate.Arguments(**given))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [benchmark_checkpoints, benchmark_ring])
@pytest.mark.parametrize("device", ["gpu", "cuda:0"])
def test_benchmarks_name_the_devices_that_there_are(script, device):
    with pytest.raises(ValueError, match=f"^device must be one of cuda, cpu, got '{device}'"):
        script.main(script.Arguments(device=device))


@pytest.mark.parametrize("key", ["tokens_per_step", "saves"])
def test_benchmark_checkpoints_refuses_to_time_nothing(key):
    with pytest.raises(ValueError, match=f"^{key} must be at least 1, got 0"):
        benchmark_checkpoints.main(benchmark_checkpoints.Arguments(device="cpu", **{key: 0}))


@pytest.mark.parametrize("script", [benchmark_training, benchmark_checkpoints, benchmark_generate])
def test_benchmarks_refuse_a_model_that_conf_does_not_have(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="models must be of gpt2, .*, tiny, got gpt9"):
        script.main(script.Arguments(models=["tiny", "gpt9"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_benchmarks_measure_the_model_that_training_composes(name):
    seq_len = 256
    assert read_model(name, seq_len) == parse(composed(f"model={name}", f"seq_len={seq_len}")).model


@pytest.mark.parametrize(
    ("other", "mean", "largest"), [([4.3, 2.9, 1.8], 0.2, 0.3), ([4.1, 3.4, 2.2], 0.7 / 3, 0.4)]
)
def test_plot_run_measures_how_far_curves_differ_either_way_and_anywhere(other, mean, largest, tmp_path):
    write_metrics(tmp_path / "a", [4.0, 3.0, 2.0])
    write_metrics(tmp_path / "b", other)
    (row,) = plot_run.compare({name: tmp_path / name / "metrics.jsonl" for name in "ab"})
    assert row["mean_difference"] == pytest.approx(mean)
    assert row["largest_difference"] == pytest.approx(largest)


def test_a_loss_of_0_is_compared_and_one_that_was_not_finite_is_not(tmp_path):
    write_metrics(tmp_path / "a", [4.0, 0.5, 2.0])
    write_metrics(tmp_path / "b", [4.0, 0.0, None])
    (row,) = plot_run.compare({name: tmp_path / name / "metrics.jsonl" for name in "ab"})
    assert (row["steps"], row["largest_difference"]) == (2, 0.5)


def test_a_picture_of_runs_has_the_title_that_is_given(tmp_path, monkeypatch):
    titles = []
    for name in ("a", "b"):
        write_metrics(tmp_path / name, [4.0, 3.0])
    monkeypatch.setattr(plot_run, "draw_loss", lambda metrics, picture, title: titles.append(title))
    monkeypatch.chdir(tmp_path)
    for given in ({}, {"title": "two runs"}):
        plot_run.main(plot_run.Arguments(runs=["a", "b"], **given))
    assert titles == ["a, b", "two runs"]


def test_sample_generates_as_it_is_asked_to(tmp_path, monkeypatch):
    write_model(tmp_path / "model", vocab_size=257, max_seq_len=16)
    seen = []

    def stream_text(model, tokenizer, config, prompts, seed, *, stop_tokens, compiled, **_):
        seen.append((model.head_weight.dtype, config, prompts, seed, stop_tokens, compiled))
        return []

    monkeypatch.setattr(sample, "stream_text", stream_text)
    given = {"checkpoint": str(tmp_path / "model"), "tokenizer": "bytes", "device": "cpu"}
    wanted = {"tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9}
    more = {"precision": "bf16", "samples": 2, "seed": 5, "compile": True, "stop_tokens": [10]}
    sample.main(sample.Arguments(**given, **wanted, **more, prompt="ab"))
    [(dtype, config, prompts, seed, stop_tokens, compiled)] = seen
    assert (dtype, prompts, seed, compiled) == (torch.bfloat16, ["ab", "ab"], 5, True)
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert 10 in stop_tokens
