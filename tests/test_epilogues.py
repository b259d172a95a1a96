"""Matrix products with an epilogue: what the compiler makes of them, without a GPU."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from kernels.epilogue_library import is_installed
from tests.compile_record import compiled_once

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs quack-kernels")


def compiled(architecture: str) -> list[dict]:
    module = "tests.ahead_of_time_epilogues"

    def make() -> dict:
        command = [sys.executable, "-m", module, architecture]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-2000:]
        return {"rows": [json.loads(line) for line in process.stdout.splitlines()]}

    quack, dsl = (metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl"))
    return compiled_once(f"quack_{quack}_dsl_{dsl}", f"products {architecture}", "", [module], make)["rows"]


def test_every_product_compiles_for_hopper_and_keeps_its_tile_in_registers():
    rows = compiled("sm_90a")
    assert len(rows) == 8
    for row in rows:
        assert row["hgmma"] > 0, row
        # bytes; an accumulator alone has 768 a thread
        assert row["stack"] <= 32, row


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_120a"])
def test_products_with_gelu_compile_for_blackwell_and_keep_their_tiles_in_registers(architecture):
    rows = compiled(architecture)
    assert len(rows) == 6
    assert all(row["stack"] == 0 for row in rows), rows
