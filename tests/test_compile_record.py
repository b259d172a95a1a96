"""A recorded kernel is believed while nothing of it has changed, and is what its compiler makes of it."""

import shutil
import subprocess

import pytest

from tests import compile_record
from tests.compile_apart import compile_apart, each_triton

TILE = '''"""A tile."""

import torch

from kernels.sizes import OTHERS, ROWS


def tile():
    """Rows."""
    return rows()


def rows():
    return ROWS


def launch():
    return torch.empty(OTHERS)
'''
SIZES = "WARPS = 4\nROWS = 16 * WARPS\nOTHERS = 1\n"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks for a row of kernels.tile with code and options; gives the row, and whether it was made anew."""
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(compile_record, "ROOT", tmp_path)
    monkeypatch.setattr(compile_record, "RECORDS", tmp_path / "compiled")
    monkeypatch.setenv("NOTE_COMPILED", str(tmp_path / "notes"))
    monkeypatch.delenv("COMPILE_ANEW", raising=False)

    def ask(tile=TILE, sizes=SIZES, compiler="triton_1", given="warps: 4", answer=7) -> tuple[dict, bool]:
        (tmp_path / "kernels" / "tile.py").write_text(tile)
        (tmp_path / "kernels" / "sizes.py").write_text(sizes)
        forget()
        made = []
        row = compile_record.compiled_once(
            compiler, "tile", given, ["kernels.tile:tile"], lambda: made.append(0) or {"registers": answer}
        )
        return row, bool(made)

    yield ask
    forget()


def forget() -> None:
    compile_record.code_behind.cache_clear()
    compile_record.definitions_in.cache_clear()
    compile_record.record_of.cache_clear()


def write_record(tmp_path) -> None:
    compile_record.main(str(tmp_path / "notes"))


def test_a_kernel_is_compiled_once_and_again_when_anything_of_it_has_changed(ask, tmp_path):
    assert ask() == ({"registers": 7}, True)
    # noted, and not yet a record
    assert ask() == ({"registers": 7}, True)
    write_record(tmp_path)
    assert ask(answer=8) == ({"registers": 7}, False)
    for change in (
        {"tile": TILE.replace("return rows()", "return 2 * rows()")},
        {"tile": TILE.replace("return ROWS", "return 2 * ROWS")},
        {"sizes": SIZES.replace("16 * WARPS", "8 * WARPS")},
        {"sizes": SIZES.replace("WARPS = 4", "WARPS = 8")},
        {"sizes": SIZES + "if WARPS:\n    ROWS = 128\n"},
        {"sizes": SIZES + "ROWS.change()\n"},
        {"compiler": "triton_2"},
        {"given": "warps: 8"},
    ):
        assert ask(**change, answer=8) == ({"registers": 8}, True)


def test_what_is_written_for_people_changes_no_kernel(ask, tmp_path):
    ask()
    write_record(tmp_path)
    commented = TILE.replace("Rows.", "How many rows.").replace("A tile", "Tiles") + "\n# behind it\n"
    assert ask(tile=commented, sizes="# of one warp\n" + SIZES, answer=8) == ({"registers": 7}, False)


def test_code_that_a_kernel_does_not_name_does_not_recompile_it(ask, tmp_path):
    ask()
    write_record(tmp_path)
    for change in (
        {"tile": TILE.replace("torch.empty", "torch.zeros")},
        {"tile": TILE.replace("OTHERS, ROWS", "ROWS").replace("torch.empty(OTHERS)", "tile()")},
        {"tile": TILE + "launch()\n"},
        {"sizes": SIZES.replace("OTHERS = 1", "OTHERS = 2")},
    ):
        assert ask(**change, answer=8) == ({"registers": 7}, False)


def test_of_a_module_imported_whole_only_named_attributes_count(ask, tmp_path):
    tile = "from kernels import sizes\n\n\ndef tile():\n    return sizes.ROWS\n"
    ask(tile=tile)
    write_record(tmp_path)
    others = SIZES.replace("OTHERS = 1", "OTHERS = 2")
    assert ask(tile=tile, sizes=others, answer=8) == ({"registers": 7}, False)
    assert ask(tile=tile, sizes=SIZES.replace("WARPS = 4", "WARPS = 8"), answer=8) == ({"registers": 8}, True)
    # handed on, anything of it may be read
    handed_on = tile.replace("sizes.ROWS", "vars(sizes)")
    ask(tile=handed_on)
    write_record(tmp_path)
    assert ask(tile=handed_on, sizes=others, answer=8) == ({"registers": 8}, True)


def test_a_missing_definition_is_reported(ask):
    ask()
    for code in ("kernels.tile:tiles", "kernels.missing", "torch:empty"):
        with pytest.raises(AssertionError, match=f"{code} is not of ours"):
            compile_record.code_behind(code)


@each_triton
def test_the_record_covers_all_our_code_that_triton_reads(version):
    rows = {row["kernel"]: row for row in compile_apart("tests.read_by_triton", version)}
    assert all(row["unknown"] == [] for row in rows.values()), rows
    # through methods, modules and values
    assert rows["kernels.hopper.forward:forward_kernel"]["read"] > 50


def test_no_row_counts_where_all_are_to_be_compiled_anew(ask, tmp_path, monkeypatch):
    ask()
    write_record(tmp_path)
    monkeypatch.setenv("COMPILE_ANEW", "1")
    assert ask(answer=8) == ({"registers": 8}, True)


def test_a_new_record_replaces_only_the_rows_of_compilers_that_ran(ask, tmp_path, capsys):
    ask(given="of before")
    ask(given="of before", compiler="triton_2")
    write_record(tmp_path)
    (tmp_path / "notes").unlink()
    ask(compiler="triton_2")
    write_record(tmp_path)
    assert ask(compiler="triton_2", answer=8) == ({"registers": 7}, False)
    assert ask(compiler="triton_2", given="of before", answer=8) == ({"registers": 8}, True)
    assert ask(given="of before", answer=8) == ({"registers": 7}, False)
    assert "triton_1.json: as it was, its compiler was not asked" in capsys.readouterr().out


OTHER_PYTHONS = [name for name in ("python3.11", "python3.12", "python3.13") if shutil.which(name)]
FINGERPRINT = "from tests.compile_record import code_behind; print(code_behind('kernels.hopper.forward'))"


@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_every_python_finds_the_same_code(python):
    other = subprocess.run([python, "-c", FINGERPRINT], capture_output=True, text=True)
    if other.returncode and "command not found" in other.stderr:
        pytest.skip(f"{python} is a name without a Python")
    assert other.stdout.strip() == compile_record.code_behind("kernels.hopper.forward"), other.stderr


PORTABLE = ("tests.ahead_of_time", "arch=sm_90,gfx942", "kernel=dq", "head_dim=64", "dtype=bf16")
HOPPER = ("tests.ahead_of_time_hopper", "kernel=dq", "mask=full")


@each_triton
@pytest.mark.parametrize("given", [PORTABLE, HOPPER], ids=["portable", "hopper"])
def test_recorded_rows_are_what_the_compiler_makes_today(given, version):
    module, *arguments = given
    n_rows = {PORTABLE: 2, HOPPER: 4}[given]
    recorded = compile_apart(module, version, *arguments)
    # neither by the record nor by what Triton keeps
    anew = {"COMPILE_ANEW": "1", "TRITON_ALWAYS_COMPILE": "1"}
    assert len(recorded) == n_rows
    assert recorded == compile_apart(module, version, *arguments, **anew)
