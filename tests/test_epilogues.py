"""Matrix products with an epilogue: what the compiler makes of them, without a GPU."""

import pytest

from kernels.epilogue_library import is_installed
from tests.compile_apart import compile_apart


@pytest.mark.skipif(not is_installed(), reason="needs quack-kernels")
def test_every_product_compiles_for_hopper_and_keeps_its_tile_in_registers():
    rows = {row.pop("product"): row for row in compile_apart("tests.ahead_of_time_epilogues", "pinned")}
    assert len(rows) == 6
    for row in rows.values():
        assert row["hgmma"] > 0
        # bytes; an accumulator alone has 768 a thread
        assert row["stack"] <= 32
