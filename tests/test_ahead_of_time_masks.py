"""Kernels under every mask, dropout and block masks compile for their GPUs without spills.

With the pinned Triton; `make compile` does it with Triton 3.6 too. Apart from test_ahead_of_time.py, so that
another process runs them beside it: each takes minutes.
"""

import pytest

from tests.ahead_of_time import SHARED_MEMORY, exceeds
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


def test_dropout_spills_nothing_under_a_causal_mask():
    # sm_120 has the tiles of sm_89, gfx942 none for dropout
    given = ["arch=sm_80,sm_89,sm_90,sm_100", "head_dim=64,128", "dtype=bf16", "dropout=1"]
    rows = compile_apart("tests.ahead_of_time", "pinned", *given)
    assert len(rows) == 24
    assert not [row for row in rows if exceeds(row)]


def test_float32_spills_nothing_under_dropout_with_block_masks():
    float32 = ["arch=sm_90", "head_dim=32,64,128,256", "dtype=fp32", "dropout=1", "block_size=64"]
    rows = compile_apart("tests.ahead_of_time", "pinned", *float32)
    assert len(rows) == 12
    assert not [row for row in rows if exceeds(row)]


def test_dk_and_dv_of_the_widest_heads_spill_nothing():
    widest = ["arch=sm_90", "kernel=dkdv", "head_dim=256", "dtype=bf16"]
    rows = compile_apart("tests.ahead_of_time", "pinned", *widest, "mask=causal,intervals", "dropout=0,1")
    assert len(rows) == 4
    assert not [row for row in rows if exceeds(row)]


def test_the_widest_heads_fit_other_gpus_under_dropout_with_block_masks():
    # a kernel that asks for more shared memory than there is does not start
    others = [
        f"arch={','.join(sorted(SHARED_MEMORY.keys() - {'sm_90'}))}",
        "kernel=forward,dq",
        "head_dim=256",
    ]
    rows = compile_apart(
        "tests.ahead_of_time", "pinned", *others, "dtype=bf16", "dropout=1", "block_size=128"
    )
    assert len(rows) == 2 * (len(SHARED_MEMORY) - 1)
    assert not [row for row in rows if exceeds(row)]
