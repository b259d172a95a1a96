"""Which implementation runs what, as python -m kernels.operators prints it."""

import pytest

from kernels import hopper, operators
from kernels.operators import implementation_table

KINDS = {"plain", "window", "documents", "dropout", "deterministic"}
KINDS |= {"block mask", "block mask of 64", "documents and block mask"}


def table() -> dict[tuple[str, int, str], tuple[str, str]]:
    """(dtype, head_dim, kind) -> implementation and reason."""
    found = {}
    for line in implementation_table("cpu").splitlines():
        problem, (name, reason) = line[:41], line[41:].split(maxsplit=1)
        dtype, _, head_dim, kind = problem.split(maxsplit=3)
        found[dtype, int(head_dim), kind.strip()] = name, reason
    return found


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "build_error", lambda: None)
    # a GPU's table, made without one
    monkeypatch.setattr(operators, "is_interpreted_wrongly", lambda device, dtype: False)


@pytest.mark.usefixtures("on_hopper")
def test_on_hopper_all_of_16_bit_heads_of_32_to_256_but_blocks_of_64_runs_on_its_kernels():
    found = table()
    assert {kind for _, _, kind in found} == KINDS
    assert len(found) == 3 * 5 * len(KINDS)
    for (dtype, head_dim, kind), (name, reason) in found.items():
        is_taken = dtype != "float32" and head_dim in (32, 64, 128, 256)
        if is_taken and kind != "block mask of 64":
            assert (name, reason) == ("hopper", "the fastest that takes this problem")
        else:
            assert name == "portable"
            words = "dtype" if dtype == "float32" else "not of 64" if is_taken else "heads of 32 to 256"
            assert reason.startswith("hopper ")
            assert words in reason


def test_elsewhere_everything_runs_on_the_portable_kernels_but_what_the_interpreter_computes_wrongly():
    for (dtype, _, _), (name, reason) in table().items():
        if dtype == "bfloat16":
            assert (name, reason) == ("none", "Triton's interpreter multiplies bfloat16 wrongly")
        else:
            assert name == "portable"
            assert "needs a GPU of compute capability 9.0, the tensors are on cpu" in reason


def test_without_a_gpu_and_without_the_interpreter_nothing_runs(monkeypatch):
    monkeypatch.setattr("kernels.checks.INTERPRETED", False)
    reason = "needs a GPU, or TRITON_INTERPRET=1 to run slowly on the CPU"
    assert set(table().values()) == {("none", reason)}


@pytest.mark.usefixtures("on_hopper")
def test_a_triton_that_cannot_build_hoppers_kernels_is_the_reason_given(monkeypatch):
    monkeypatch.setattr(hopper, "build_error", lambda: "Gluon lacks warpgroup_mma")
    found = table()
    assert {name for name, _ in found.values()} == {"portable"}
    assert found["bfloat16", 64, "plain"][1] == "hopper Gluon lacks warpgroup_mma"


def test_calls_are_of_another_kind_by_the_implementation_that_is_asked_for_or_has_failed(monkeypatch):
    kinds = [operators.choices()]
    for name in ("portable", "hopper"):
        with operators.use_implementation(name):
            kinds.append(operators.choices())
    assert operators.choices() == kinds[0]
    monkeypatch.setattr(hopper, "failures", [] if hopper.failures else ["it does not build"])
    kinds.append(operators.choices())
    assert len(set(kinds)) == 4


def test_what_uses_another_implementation_inside_of_one_leaves_the_outer():
    with operators.use_implementation("portable"):
        with operators.use_implementation("hopper"):
            assert operators.forced == "hopper"
        assert operators.forced == "portable"
    assert operators.forced is None
