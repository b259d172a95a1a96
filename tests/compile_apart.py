"""Runs an ahead_of_time module in a process of its own: in the tests' own Triton is the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# where `make test` puts the Triton of docs/results
OLDER = os.environ.get("TRITON_3_6", "")
is_missing = not Path(OLDER, "triton", "__init__.py").exists()
each_triton = pytest.mark.parametrize(
    "version",
    [
        "pinned",
        pytest.param("3.6.0", marks=pytest.mark.skipif(is_missing, reason="needs TRITON_3_6, see Makefile")),
    ],
)


def compile_apart(module: str, version: str, *arguments: str) -> list[dict]:
    """The rows that `python -m module arguments` prints, with the Triton of that version."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if version != "pinned":
        environment["PYTHONPATH"] = OLDER
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert version == "pinned" or {row["triton"] for row in rows} == {version}, rows
    return rows
