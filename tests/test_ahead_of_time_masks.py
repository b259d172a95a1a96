"""Kernels under every mask, dropout and block masks compile for their GPUs without spills.

With the pinned Triton; `make compile` does it with Triton 3.6 too. Apart from test_ahead_of_time.py, so that
another process runs them beside it: each takes minutes.
"""

from math import prod

import pytest

from tests.ahead_of_time import exceeds
from tests.compile_apart import compile_apart


@pytest.mark.parametrize(
    ("masks", "dropout", "block_size"),
    [("full,window,intervals", "0", "0"), ("intervals", "1", "0"), ("intervals", "0,1", "128")],
)
def test_no_mask_spills_nor_the_most_general_one_under_dropout_and_in_blocks(masks, dropout, block_size):
    # where tiles are measured
    measured = ["arch=sm_90", "head_dim=64,128", "dtype=bf16", f"block_size={block_size}"]
    rows = compile_apart("tests.ahead_of_time", "pinned", *measured, f"mask={masks}", f"dropout={dropout}")
    assert len(rows) == 6 * len(masks.split(",")) * len(dropout.split(","))
    assert not [row for row in rows if exceeds(row)]


@pytest.mark.parametrize(
    "given",
    [
        ("arch=sm_80,sm_89,sm_100", "kernel=dq,dkdv", "head_dim=128", "dtype=bf16", "block_size=0"),
        ("arch=sm_80,sm_100,gfx942", "kernel=forward", "head_dim=256", "dtype=bf16", "block_size=128"),
        ("arch=gfx942", "kernel=dq", "head_dim=256", "dtype=bf16", "block_size=128"),
        ("arch=sm_90", "kernel=dq,dkdv", "head_dim=64,128", "dtype=fp32", "block_size=64"),
    ],
)
def test_dropout_fits_and_spills_nothing_where_it_has_no_tile_of_its_own(given):
    rows = compile_apart("tests.ahead_of_time", "pinned", *given, "dropout=1")
    assert len(rows) == prod(len(values.split(",")) for values in given)
    assert not [row for row in rows if exceeds(row)]


def test_dk_and_dv_of_the_widest_heads_spill_nothing():
    widest = ["arch=sm_90", "kernel=dkdv", "head_dim=256", "dtype=bf16"]
    rows = compile_apart("tests.ahead_of_time", "pinned", *widest, "mask=causal,intervals", "dropout=0,1")
    assert len(rows) == 4
    assert not [row for row in rows if exceeds(row)]
