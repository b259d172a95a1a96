"""Matrix products with an epilogue: what the compiler makes of them, without a GPU."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from kernels.epilogue_library import is_installed
from tests.compile_record import compiled_once
from train.compile_ahead import CHANNELS, ROWS

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs quack-kernels")


def compiled(*arguments: str) -> list[dict]:
    module = "tests.ahead_of_time_epilogues"

    def make() -> dict:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-2000:]
        return {"rows": [json.loads(line) for line in process.stdout.splitlines()]}

    quack, dsl = (metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl"))
    name = f"products {' '.join(arguments)}"
    return compiled_once(f"quack_{quack}_dsl_{dsl}", name, "", [module], make)["rows"]


def test_every_product_compiles_for_hopper_and_keeps_its_tile_in_registers():
    rows = compiled("sm_90a")
    assert len(rows) == 10
    for row in rows:
        assert row["hgmma"] > 0, row
        # bytes; an accumulator alone has 768 a thread
        assert row["stack"] <= 32, row


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_120a"])
def test_products_of_mlps_compile_for_blackwell_and_keep_their_tiles_in_registers(architecture):
    rows = compiled(architecture)
    assert len(rows) == 8
    for row in rows:
        # bytes; a tile of pairs does not quite fit on sm_120a
        most = 8 if (architecture, row["product"]) == ("sm_120a", "swiglu's gradient") else 0
        assert row["stack"] <= most, row


def test_one_kernel_serves_all_sizes():
    """So that train/compile_ahead.py may compile those of a small model in place of the run's own."""
    sizes = [[ROWS, CHANNELS, 4 * CHANNELS], [32_768, 768, 3072], [1024, 1600, 6400], [16, 8, 8]]
    counts = [row["kernels"] for row in compiled("sm_90a", json.dumps(sizes))]
    assert counts == [10] * len(sizes)
