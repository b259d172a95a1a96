"""Every kernel compiles for every GPU that has tiles, without the GPU: it fits, and does not spill.

Here for the commonest heads; all rows of the tables, some minutes of compiling:
    python -m tests.ahead_of_time
TRITON_3_6=FOLDER, where pip install --target FOLDER triton==3.6.0 put it, adds that version to the test.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.ahead_of_time import MAY_SPILL, SHARED_MEMORY

VERSIONS = [None, *([os.environ["TRITON_3_6"]] if os.environ.get("TRITON_3_6") else [])]


@pytest.mark.parametrize("version", VERSIONS, ids=["pinned", "3.6.0"][: len(VERSIONS)])
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_fit_their_gpus_without_spilling(arch, version):
    arguments = [f"arch={arch}", "kernel=forward,dkdv,dq", "head_dim=64,128", "dtype=bf16"]
    rows = compile_in_own_process("tests.ahead_of_time", version, *arguments, "mask=causal", "dropout=0")
    assert len(rows) == 6
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[arch], row
        assert row["spilled"] in (0, None) or (arch, row["kernel"], int(row["head_dim"])) in MAY_SPILL, row


@pytest.mark.parametrize("version", VERSIONS, ids=["pinned", "3.6.0"][: len(VERSIONS)])
def test_the_decode_kernel_fits_every_gpu_without_spilling(version):
    arguments = ["head_dim=64", "group=1", "block_size=0,128", "dtype=bf16"]
    rows = compile_in_own_process("tests.ahead_of_time_decode", version, *arguments)
    assert len(rows) == 2 * len(SHARED_MEMORY)
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["arch"]], row
        assert row["spilled"] in (0, None), row


def compile_in_own_process(module: str, version: str | None, *arguments: str) -> list[dict]:
    """The rows that python -m module prints, with this folder's Triton; here Triton is the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if version:
        environment["PYTHONPATH"] = version
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert version is None or {row["triton"] for row in rows} == {"3.6.0"}
    return rows
