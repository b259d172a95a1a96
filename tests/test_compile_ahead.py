"""train/compile_ahead.py: what a launch compiles before it calls it, beside its own work."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import epilogue_library
from model.gpt import lacks_products
from tests.test_config import composed
from tests.test_prepare import alive
from train import compile_ahead
from train.compile_ahead import (
    is_compiled_ahead,
    may_call_products,
    products_compiled_beside,
    train_small,
)
from train.config import Config, parse
from train.distributed import Processes

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ON_GPU = ["device=cuda", "attention=flash", "fused_loss=true"]


def config_of(*overrides: str) -> Config:
    return parse(composed("experiment=laptop", "name=test", *overrides))


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """As on a GPU that quack-kernels serves, which has compiled nothing there."""
    monkeypatch.setattr(epilogue_library, "serves", lambda device: True)
    monkeypatch.setattr(epilogue_library, "is_installed", lambda: True)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "kept"))


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [([], 1, True), (["compile=false"], 1, False), ([], 2, False)],
    ids=["one", "not compiled", "two"],
)
def test_a_run_is_compiled_ahead_where_it_is_compiled_for_one_process_and_lacks_text(
    tmp_path, given, world_size, expected
):
    folder = tmp_path / "text"
    config = config_of("compile=true", f"data.folder={folder}", *given)
    processes = Processes(0, world_size, CPU, None, None)
    for make in (lambda: None, folder.mkdir):
        make()
        assert is_compiled_ahead(config, processes) == expected
    # whatever it is, prepare looks at it first
    (folder / "a file").touch()
    assert not is_compiled_ahead(config, processes)


def test_a_daemon_which_may_start_no_process_compiles_when_it_trains(hopper, monkeypatch, tmp_path):
    daemon = SimpleNamespace(daemon=True)
    monkeypatch.setattr(compile_ahead, "current_process", lambda: daemon)
    config = config_of("compile=true", "precision=bf16", f"data.folder={tmp_path / 'text'}")
    assert not is_compiled_ahead(config, Processes(0, 1, CPU, None, None))
    monkeypatch.setattr(compile_ahead, "start_child", lambda *given, **options: pytest.fail("started"))
    with products_compiled_beside(config, CPU):
        pass


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["precision=bf16", "fused_gelu=true", "fused_loss=false"], True),
        (["precision=fp16", "fused_gelu=false", "fused_loss=true"], True),
        (["precision=bf16", "fused_gelu=false", "fused_loss=false"], False),
        (["precision=fp32", "fused_gelu=true", "fused_loss=true"], False),
    ],
    ids=["gelu", "loss", "neither", "32 bits"],
)
def test_products_are_compiled_ahead_where_they_may_be_called(given, expected):
    assert may_call_products(config_of(*given)) == expected


def test_products_are_lacking_where_a_device_has_them_and_none_is_compiled(hopper, monkeypatch):
    assert lacks_products(CPU)
    for name in ("serves", "is_installed", "has_none_compiled"):
        with monkeypatch.context() as changed:
            changed.setattr(epilogue_library, name, lambda *given: False)
            assert not lacks_products(CPU)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["model=gpt2", "model.dropout=0.1", "precision=fp16", "recompute=selective"],
        ["model=llama", "+model.qk_norm=true", "seq_len=32", "tokens_per_microbatch=32"],
        ["model.n_head=4", "+model.n_kv_head=2", "model.bias=qkv", "recompute=full"],
        ["attention=strided", "attention.implementation=reference"],
    ],
    ids=["laptop", "gpt2", "llama", "groups", "patterns"],
)
def test_the_small_model_has_the_layers_of_the_run_whatever_these_are(monkeypatch, given):
    given = ["model.max_seq_len=4096", "tokens_per_step=65536", "data.tokenizer=bytes", *given]
    built = []

    def build(*arguments):
        built.append(build_weights(*arguments))
        return built[0]

    build_weights = compile_ahead.build_weights
    monkeypatch.setattr(compile_ahead, "build_weights", build)
    config = config_of("model.vocab_size=257", "precision=bf16", *given)
    train_small(config, CPU)
    (gpt,) = built
    assert all(p.grad is not None for p in gpt.parameters())
    own, small = config.model, gpt.config
    for key in ("vocab_size", "dropout", "norm", "mlp", "bias", "qk_norm", "tied_head", "rotary"):
        assert getattr(small, key) == getattr(own, key), key
    assert (gpt.blocks[0].recompute, small.n_layer, small.n_embd) == (config.recompute, 1, 64)


def hang(*arguments) -> None:
    time.sleep(1000)


def fail(*arguments) -> None:
    print("as a user would see it")
    print("as a user would see it", file=sys.stderr)
    os.system("echo as a user would see it")
    raise RuntimeError("as of a compiler")


def stand_in(pipe, function) -> None:
    compile_ahead.train_small = function
    compile_ahead.compile_products(pipe, None, CPU)


@pytest.fixture
def stands_in(hopper, monkeypatch):
    """Has the process run this function in place of a model; a function that gives its number."""
    start_child, started = compile_ahead.start_child, []

    def as_(function):
        def start(target, *arguments, daemon):
            process, pipe = start_child(stand_in, function, daemon=daemon)
            started.append(process)
            return process, pipe

        monkeypatch.setattr(compile_ahead, "start_child", start)
        return started

    return as_


def test_the_process_ends_with_the_run_whether_it_is_done_or_not(stands_in):
    started = stands_in(hang)

    def train():
        with products_compiled_beside(config_of("precision=bf16"), CPU):
            assert alive(started[0].pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not alive(started[0].pid)
    assert not multiprocessing.active_children()


def test_a_process_that_fails_says_nothing_and_keeps_nobody_from_training(stands_in, capfd):
    started = stands_in(fail)
    with products_compiled_beside(config_of("precision=bf16"), CPU):
        started[0].join(60)
        assert started[0].exitcode == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("why", ["compiled before", "not the first here", "32 bits"])
def test_no_process_is_started_where_none_is_needed(stands_in, monkeypatch, tmp_path, why):
    started = stands_in(fail)
    if why == "compiled before":
        (tmp_path / "kept" / "of a version").mkdir(parents=True)
        (tmp_path / "kept" / "of a version" / "one.o").touch()
    if why == "not the first here":
        monkeypatch.setenv("LOCAL_RANK", "1")
    with products_compiled_beside(config_of("precision=fp32" if why == "32 bits" else "precision=bf16"), CPU):
        assert not started


def test_what_was_compiled_before_is_found_where_quack_kernels_keeps_it(monkeypatch, tmp_path):
    monkeypatch.delenv("QUACK_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "someone")
    assert epilogue_library.has_none_compiled()
    folder = tmp_path / "someone" / "quack_cache" / "of a version"
    folder.mkdir(parents=True)
    (folder / "one.lock").touch()
    assert epilogue_library.has_none_compiled()
    (folder / "one.o").touch()
    assert not epilogue_library.has_none_compiled()
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "other"))
    assert epilogue_library.has_none_compiled()
    # nothing would be kept
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    assert not epilogue_library.has_none_compiled()


@pytest.mark.skipif(not epilogue_library.is_installed(), reason="needs quack-kernels")
def test_quack_kernels_keeps_products_where_they_are_looked_for():
    code = (
        "import quack.cache.jit as jit, tempfile, getpass, pathlib\n"
        "print(jit.get_cache_path() == pathlib.Path(tempfile.gettempdir(), getpass.getuser(), 'quack_cache'))"
    )
    given = {key: value for key, value in os.environ.items() if key != "QUACK_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=150)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.gpu
def test_a_step_of_the_run_finds_all_its_products_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "kept"))
    if not lacks_products(torch.device("cuda")):
        pytest.skip("needs Hopper and quack-kernels")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text(f"the number after {index} is {index + 1}" * 50)
    given = [*ON_GPU, "precision=bf16", "model.n_embd=768", "model.n_head=12", "seq_len=256", "data=text"]
    given += ["data.paths=[text]", "tokens_per_step=4096", "tokens_per_microbatch=4096", "sample.tokens=0"]
    given += ["total_tokens=16384", "evaluation.tokens=4096", "data.validation_fraction=0.2"]
    config = replace(config_of(*given), compile=False)
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    code = "import pickle, sys, torch; from train.compile_ahead import compile_products\n"
    code += "compile_products(None, pickle.load(sys.stdin.buffer), torch.device('cuda', 0))"
    command = [sys.executable, "-c", code]
    subprocess.run(command, input=pickle.dumps(config), env=environment, check=True, timeout=150)
    compiled = set((tmp_path / "kept").rglob("*.o"))
    assert len(compiled) == 4
    command = [sys.executable, "-m", "train", "experiment=laptop", "name=test", *given]
    subprocess.run(command, env=environment, check=True, timeout=250)
    assert set((tmp_path / "kept").rglob("*.o")) == compiled
