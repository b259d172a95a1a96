"""train/overrides.py, and python -m train itself with overrides that Hydra refuses."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

from tests.test_config import composed
from train import __main__ as command
from train.config import Config, parse
from train.overrides import (
    CONF,
    explain,
    refuse_equal_names,
    refuse_idle_overrides,
    refuse_no_choice,
    refuse_numbers_for_texts,
    refuse_second_choice,
    unknown_key,
    wrong_yaml,
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "lr is no key; did you mean optim.learning_rate?"),
        ("model.n_layers=3", "model.n_layers is no key; did you mean model.n_layer?"),
        ("seq_len.x=3", "seq_len.x is no key; did you mean seq_len?"),
        ("colour=red", "colour is no key: python -m train --help lists them"),
        ("experimnet=laptop", "experimnet is no key; did you mean experiment?"),
        (
            "model.qk_norm=true",
            "model.qk_norm has no value in conf/ to change: write +model.qk_norm=VALUE to add",
        ),
        (
            "data=tezt",
            "data=tezt is no choice; did you mean text? there are fineweb_edu, openwebtext, pypacka",
        ),
        ("optim=", "optim= is no choice: there are adamw, muon"),
        ("seq_len", "'seq_len' cannot be read: write KEY=VALUE, and quote brackets"),
        ("data.paths=[a", "'data.paths=[a' cannot be read: write KEY=VALUE, and quote brackets"),
        ("name=a,b", "name=a,b has several values: add --multirun for a run with each, or put brackets"),
        ("optim.learning_rate=1e-3,1e-4", "optim.learning_rate=1e-3,1e-4 has several values: add --multirun"),
        ("model=gpt2,tiny", "model=gpt2,tiny has several values: add --multirun for a run with each"),
        ("sample.prompt=it is, 'so'", "sample.prompt=it is, 'so' has several values: add --multirun"),
        ("+model=tiny", "model is chosen twice: write model=NAME without +, and in the defaults list of a "),
        (
            "experiment.seed=3",
            "experiment holds no values of its own: choose one by experiment=NAME, and begin",
        ),
        ("+seq_len=3", "Could not append to config. An item is already at 'seq_len'. Either remove + prefix"),
    ],
)
def test_what_hydra_refuses_is_told_in_one_line_with_the_change_to_make(override, message):
    with pytest.raises(HydraException) as caught:
        composed(override)
    line = explain(caught.value, Config)
    assert line.startswith(message)
    assert "\n" not in line


@pytest.mark.parametrize("words", [("model=tiny", "+model=gpt2"), ("+model=gpt2", "model=tiny")])
def test_a_group_that_is_chosen_and_added_too_is_told_to_be_chosen_once(words):
    with pytest.raises(HydraException) as caught:
        composed(*words)
    assert explain(caught.value, Config).startswith("model is chosen twice: write model=NAME without +")


@pytest.mark.parametrize("word", ['attention.patterns=["window(16)"]', "attention.block_size=64"])
def test_patterns_where_sdpa_is_chosen_are_told_with_the_attention_that_takes_them(word):
    with pytest.raises(HydraException) as refused:
        composed("experiment=laptop", word)
    told = explain(refused.value, Config)
    assert told.startswith(f"{word.partition('=')[0]} has no value in the attention that is chosen, as in sd")
    assert told.endswith("add attention=reference, or attention=flash on a GPU")
    parse(composed("experiment=laptop", "attention=reference", word))


def test_a_choice_of_the_users_own_folder_is_named_among_the_others(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("n_layer: 2\n")
    with pytest.raises(HydraException) as caught:
        composed("model=mne", f"hydra.searchpath=[file://{tmp_path}]")
    assert explain(caught.value, Config).startswith("model=mne is no choice; did you mean mine?")


RULES = "in conf/experiment/ the first line of a file is `# @package _global_`, and its defaults list changes"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["seq_len: 64"], "experiment holds no values of its own: .* the line `# @package _global_`$"),
        (["defaults: [override /model: tiny]"], f"In 'experiment/mine': .*override model: {RULES}"),
        (
            ["# @package _global_", "defaults: [/model: tiny]"],
            "model is chosen twice: .* in the defaults list of a file `- override /model: NAME`$",
        ),
        (["# @package _global_", "defaults: [override model: tiny]"], f"In 'experiment/mine': .*: {RULES}"),
        (["# @package _global_", "defaults: [model: tiny]"], f"experiment/model=tiny is no choice: {RULES}"),
    ],
)
def test_an_experiment_of_the_users_own_that_cannot_be_composed_is_told_with_the_lines_that_it_needs(
    lines, message, tmp_path
):
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("\n".join(lines))
    words = ["experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    with pytest.raises((HydraException, ValueError)) as caught:
        parse(composed(*words))
    line = explain(caught.value, Config)
    assert re.match(message, line)
    assert "\n" not in line
    # as the errors advise
    file.write_text("# @package _global_\ndefaults: [override /model: tiny]\nseq_len: 64")
    config = parse(composed(*words))
    assert (config.model.n_layer, config.seq_len) == (parse(composed("model=tiny")).model.n_layer, 64)


def test_a_whole_configuration_that_is_not_there_is_told_by_its_argument():
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(HydraException) as caught:
        compose("nope")
    assert explain(caught.value, Config) == "--config-name=nope is no choice: there are config"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.lr", "optim.learning_rate"),
        ("wd", "optim.weight_decay"),
        ("train.n_head", "model.n_head"),
        ("num_layers", "model.n_layer"),
        ("grad_clip", "optim.gradient_clip"),
    ],
)
def test_a_key_is_guessed_from_its_last_word_its_initials_and_its_likeness(key, meant):
    assert unknown_key(key, Config) == f"{key} is no key; did you mean {meant}?"


def settings(
    weights=None, rank=0, spikes="ignore", schedule="cosine", algorithm="adamw", decay=0.2, sparse=False,
    base=None, pose=None,
) -> SimpleNamespace:  # fmt: skip
    """A configuration, of which only these settings are there; all are switched off unless given."""
    return SimpleNamespace(
        seq_len=64,
        pose_seq_len=pose,
        start=SimpleNamespace(weights=weights, rotary_base=base),
        lora=SimpleNamespace(rank=rank),
        spikes=SimpleNamespace(action=spikes),
        optim=SimpleNamespace(schedule=schedule, algorithm=algorithm, decay_fraction=decay),
        attention=SimpleNamespace(sparse=sparse),
    )


@pytest.mark.parametrize("word", ["model.n_layer=2", "model=llama", "+model.qk_norm=true"])
def test_a_model_beside_weights_is_refused_in_place_of_being_ignored(word):
    refuse_idle_overrides([word], settings())
    given = ["model.dropout=0.1", "seq_len=64", word]
    with pytest.raises(ValueError, match="has no effect with start.weights=runs/a, whose model is taken"):
        refuse_idle_overrides(given, settings(weights="runs/a"))


@pytest.mark.parametrize(
    ("word", "switch", "on", "way_out"),
    [
        ("lora.alpha=3", {"rank": 0}, {"rank": 8}, "lora.rank=0: add lora.rank=16, or leave it out"),
        ("start.rotary_base=9", {"weights": None}, {"weights": "a"}, "start.weights=null: add start"),
        ("start.positions=yarn", {"weights": None}, {"weights": "a"}, "start.weights=null: add start"),
        (
            "start.positions=linear",
            {"room": 128},
            {"weights": "a", "room": 128, "base": 1e6},
            "seq_len=64, for which the weights have room: raise it, or leave it out",
        ),
        (
            "start.positions=yarn",
            {"room": 128},
            {"weights": "a", "room": 127, "pose": 128},
            "seq_len=64, for which the weights have room: raise it, or leave it out",
        ),
        (
            "start.positions=interpolate",
            {"room": 64, "pose": None},
            {"weights": "a", "room": 63},
            "seq_len=64, for which the weights have room: raise it, or leave it out",
        ),
        ("spikes.z_score=3", {"spikes": "ignore"}, {"spikes": "log"}, "spikes.action=ignore: add spikes.act"),
        (
            "optim.decay_fraction=0.5",
            {"schedule": "cosine"},
            {"schedule": "wsd"},
            "optim.schedule=cosine: add optim.schedule=wsd, or leave it out",
        ),
        (
            "optim.momentum=0.9",
            {"algorithm": "adamw"},
            {"algorithm": "muon"},
            "optim.algorithm=adamw: add optim=muon, or leave it out",
        ),
        (
            "optim.final_learning_rate_ratio=0",
            {"decay": 0.0},
            {"decay": 0.1},
            "optim.decay_fraction=0: add optim.decay_fraction=0.2, or leave it out",
        ),
        (
            "attention.block_size=64",
            {"sparse": False},
            {"sparse": True},
            "dense layers alone: add attention=strided, or leave it out",
        ),
    ],
)
def test_settings_of_what_is_switched_off_are_refused(word, switch, on, way_out):
    all_on = {"rank": 8, "weights": "runs/a", "spikes": "skip", "schedule": "wsd", "algorithm": "muon"}
    all_on |= {"sparse": True, "pose": 100}
    switches = ["lora.rank=0", "spikes.action=ignore", "+start.weights=null", "optim.schedule=cosine"]
    switches += ["optim=adamw", "optim.algorithm=adamw", "optim.learning_rate=0.1"]

    def refuse(*words, room=0, **given):
        refuse_idle_overrides(["seq_len=64", *words], settings(**given), room)

    refuse(*switches)
    refuse(word, **on)
    with pytest.raises(ValueError, match=f"^{word} has no effect with {re.escape(way_out)}"):
        refuse(word, **all_on | switch)


@pytest.mark.parametrize("value", ["null", "NULL", "3", "1e-3", "true"])
def test_a_group_whose_value_is_no_name_is_refused_with_the_names_that_there_are(value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "seed=null", f"optim={value}"])
    monkeypatch.setattr(command, "WANTS_TRACEBACK", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    told = f"error: optim={value} is no choice: there are adamw, muon, or leave it out\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "word",
    ["--multirun", "optim=muon", "optim=adamw,muon", "optim={beta1: 1}", "~experiment", "seed=null"],
)
def test_a_name_for_a_group_and_null_for_other_keys_are_left_to_their_own_checks(word):
    refuse_no_choice([word])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=gpt2", "seed=1", "model=tiny"], "^model=gpt2 and model=tiny: give one of them$"),
        (
            ["experiment=finetune_long", "experiment=laptop"],
            r"^experiment=finetune_long and experiment=laptop: give one .*, or experiment=\[A,B\], where",
        ),
    ],
)
def test_a_group_that_is_chosen_twice_is_refused_instead_of_losing_the_first(words, message):
    with pytest.raises(ValueError, match=message):
        refuse_second_choice(words)
    # a value may be given again, behind those of a script
    refuse_second_choice([words[0], "seed=1", "seed=2", "--multirun"])


def test_of_two_experiments_the_values_of_the_later_count():
    both = composed("experiment=[finetune_long,laptop]", "start.weights=x")
    assert (both.device, both.seq_len, both.export) == ("cpu", 256, True)


def through_a_shell(typed: str) -> list[str]:
    """The words that a program gets of those that are typed into a shell."""
    script = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    command = f"{shlex.join(script)} {typed}"
    return json.loads(subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize(
    ("word", "read", "key", "meant"),
    [
        ("name=2026_11_25", "20261125", "name", "2026_11_25"),
        ("name=1e-3", "0.001", "name", "1e-3"),
        ("sample.prompt=1_000", "1000", "sample.prompt", "1_000"),
        ("sample.prompt=true", "True", "sample.prompt", "true"),
        ("start.weights=1.50", "1.5", "start.weights", "1.50"),
        ("data.paths=[2024_01, notes]", "202401", "data.paths", ["2024_01", "notes"]),
        ("data.paths=['1_0,2_0',2_0]", "20", "data.paths", ["1_0,2_0", "2_0"]),
    ],
)
def test_a_text_that_would_become_another_number_is_refused_with_quotes_that_work(word, read, key, meant):
    with pytest.raises(ValueError, match=f"^{re.escape(word)} would be read as {read}: put quotes") as caught:
        refuse_numbers_for_texts(["seed=1_0", word], Config)
    advised = through_a_shell(str(caught.value).partition("as in ")[2])
    refuse_numbers_for_texts(advised, Config)
    assert OmegaConf.select(composed(*advised), key) == meant


@pytest.mark.parametrize(
    "word",
    [
        "name=12",
        "name=007",
        "name=a,12",
        'name="1_0"',
        "name=seed${seed}",
        "start.weights=null",
        "sample.prompt='in(1_0,2_0)'",
        "data.paths=[a,2024]",
        "total_tokens=300_000",
        "optim.learning_rate=1e-3",
        "--help",
    ],
)
def test_texts_that_stay_as_they_are_typed_and_numbers_are_taken(word):
    refuse_numbers_for_texts([word], Config)


def test_a_comma_without_multirun_is_told_with_quotes_and_brackets_that_work():
    with pytest.raises(HydraException) as caught:
        composed("sample.prompt=a, b")
    [advised] = through_a_shell(explain(caught.value, Config).partition("as in ")[2])
    assert composed(advised).sample.prompt == "a, b"
    assert composed("data.paths=[a, b]").data.paths == ["a", "b"]


def test_a_wrong_override_ends_the_command_with_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "lr=3"])
    monkeypatch.setattr(command, "WANTS_TRACEBACK", False)
    # command() changes it
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    assert capsys.readouterr().err == "error: lr is no key; did you mean optim.learning_rate?\n"
    # every process of torchrun finds it; one says it
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "WANTS_TRACEBACK", True)
    with pytest.raises(HydraException):
        command.command()


@pytest.mark.parametrize("word", ["data.paths=[/tmp/jürgen]", "start.weights=~/models/x", "name=a#b"])
def test_a_character_that_hydra_does_not_read_is_told_with_its_key_and_the_way_out(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", word])
    monkeypatch.setattr(command, "WANTS_TRACEBACK", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    expected = f"error: {word!r} cannot be read: write KEY=VALUE, and quote brackets, commas, ~, accents"
    assert capsys.readouterr().err.startswith(expected)
    # as the error advises
    key, _, value = word.partition("=")
    text = value.strip("[]")
    quoted = f"{key}={value.replace(text, json.dumps(text, ensure_ascii=False))}"
    refuse_numbers_for_texts([quoted], Config)
    assert OmegaConf.select(composed(quoted), key) == ([text] if value != text else text)


def test_a_sweep_over_texts_is_refused_as_it_was_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--multirun", "name=a,1_0"])
    monkeypatch.setattr(command, "WANTS_TRACEBACK", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    assert capsys.readouterr().err.startswith("error: name=a,1_0 would be read as 10: put quotes")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("n_layer: 2\nn_layer: 3\n", 'found duplicate key n_layer in "{}", line 2, column 1'),
        (
            "n_layer: 2\n\tn_head: 3\n",
            "found character '\\t' that cannot start any token in \"{}\", line 2, ",
        ),
        ("n_layer: [2\n", "expected ',' or ']', but got '<stream end>' in \"{}\", line 2, column 1"),
        ("n_layer: 2\0\n", 'unacceptable character #x0000: special characters are not allowed in "{}", '),
    ],
)
def test_a_fault_in_a_file_of_the_users_own_is_told_in_one_line_with_its_place(
    text, fault, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "model" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train", f"--config-dir={tmp_path}", "model=mine"])
    monkeypatch.setattr(command, "WANTS_TRACEBACK", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit, match="2"):
        command.command()
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert fault.format(file) in errors
    assert errors.endswith(": correct it there\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (
            "n_layer: 2\n# café\n".encode("latin-1"),
            r"a file in conf/ or .* not UTF-8, at '# caf\\xe9': save it",
        ),
        (
            b"- a\n- b\n",
            r"model must be a group of keys with values, got \['a', 'b'\]: .* or correct its file",
        ),
        (b"", "model.n_layer must be given, as model.n_layer=VALUE"),
    ],
    ids=["latin-1", "a list", "empty"],
)
def test_a_file_of_the_users_own_that_holds_no_values_is_told_by_what_to_look_for(content, fault, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_bytes(content)
    words = [sys.executable, "-m", "train", f"--config-dir={tmp_path}", "model=mine"]
    done = subprocess.run(words, cwd=CONF.parent, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2
    assert re.match(f"error: {fault}", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_list_of_the_command_line_that_is_no_yaml_is_told_with_the_quotes_that_it_needs():
    with pytest.raises(YAMLError) as caught:
        OmegaConf.from_cli(["runs=[a[b,c]"])
    line = wrong_yaml(caught.value)
    assert line.endswith(": lists are YAML: quote items that contain brackets")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["seed=1,2"], "pystdlib-12x768-1024"),
        (["seed=range(1,4)", "name=run"], "run"),
        (["model=glob(gpt2_*)", "seed=1,2", "name=${model.n_layer}"], "36"),
        (["data=text", "model=mine,tiny", "name=${seq_len}"], "1024"),
    ],
)
def test_equal_names_of_a_sweep_are_told_with_the_way_out(words, name, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("n_layer: 2\n")
    words = ["--config-dir", str(tmp_path), *words]
    # one run, which Hydra refuses
    refuse_equal_names(words)
    with pytest.raises(ValueError, match=f"^name={name} would be that of .* as 'name=seed.*' does$"):
        refuse_equal_names([*words, "--multirun"])


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1,2", "name=seed${seed}"],
        ["seq_len=512,1024"],
        # not known before the run
        ["seed=1,2", "name=run${hydra:job.num}"],
        ["seed=1,2", "name=run${sede}"],
    ],
)
def test_names_of_a_sweep_that_differ_or_are_not_known_yet_are_taken(words):
    refuse_equal_names(["--multirun", *words])


def test_values_that_are_not_in_conf_are_left_to_their_runs(tmp_path):
    # with a name in their own configuration
    refuse_equal_names(["--config-path", str(tmp_path), "--multirun", "seed=1,2"])
    with pytest.raises(ValueError, match="would be that of 2 runs"):
        refuse_equal_names(["--multirun", "seed=1,2"])
