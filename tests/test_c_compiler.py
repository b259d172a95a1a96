"""train/c_compiler.py: what Triton builds with is looked for before a run, where Triton looks."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.test_config import composed
from train.c_compiler import check_c_compiler
from train.config import check_machine, parse

# neither Triton's kernels nor those that torch.compile has it make
WITHOUT_TRITON = ["attention=sdpa", "compile=false", "fused_loss=false"]


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """The one folder of PATH, empty; CC is not set."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_machine_without_a_c_compiler_is_refused_with_the_ways_out(programs):
    with pytest.raises(ValueError, match="neither CC is set nor gcc or clang in PATH: install one, .*CC="):
        check_c_compiler()


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_in_path_is_enough(programs, name):
    write_program(programs / name, "exit 0")
    check_c_compiler()


def test_the_compiler_that_cc_names_is_taken_and_no_other(programs, monkeypatch):
    write_program(programs / "gcc", "exit 0")
    monkeypatch.setenv("CC", str(programs / "icc"))
    with pytest.raises(ValueError, match="icc' cannot be started .*: set CC=/path/to/gcc, or unset it"):
        check_c_compiler()
    write_program(programs / "icc", "exit 0")
    check_c_compiler()


def test_missing_headers_of_python_are_told_in_the_compilers_words(programs):
    write_program(programs / "gcc", "echo '<stdin>:1:10: fatal error: Python.h: No such file' >&2; exit 1")
    message = r"gcc cannot compile .* \(<stdin>:1:10: fatal error: Python.h: No such file\): .* python3-dev"
    with pytest.raises(ValueError, match=message) as caught:
        check_c_compiler()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_gcc_finds_the_headers_of_this_python_and_misses_those_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    check_c_compiler()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    # where a compiler may look by itself
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"Python.h: No such file or directory\): install them"):
        check_c_compiler()


@pytest.mark.parametrize("user", ["attention=flash", "compile=true", "fused_loss=true"])
def test_a_run_that_uses_triton_is_refused_before_its_data_is_prepared(programs, monkeypatch, user):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = ["device=cuda", "fused_gelu=false", *WITHOUT_TRITON]
    check_machine(parse(composed(*given)))
    with pytest.raises(ValueError, match="Triton needs a C compiler"):
        check_machine(parse(composed(*given, user)))
