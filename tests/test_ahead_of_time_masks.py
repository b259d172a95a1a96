"""Kernels under every mask, dropout and block masks compile for their GPUs without spills.

Apart from test_ahead_of_time.py, so that another process runs them beside it: each takes minutes.
"""

import pytest

from tests.ahead_of_time import SHARED_MEMORY, exceeds
from tests.compile_apart import compile_apart, each_triton


@each_triton
@pytest.mark.parametrize(
    ("block_size", "masks"), [(0, "full,causal,window,intervals"), (128, "causal,intervals")]
)
def test_no_mask_of_any_kind_spills_with_or_without_dropout(block_size, masks, version):
    # where tiles are measured
    measured = ["arch=sm_90", "head_dim=64,128", "dtype=bf16", f"block_size={block_size}"]
    rows = compile_apart("tests.ahead_of_time", version, *measured, f"mask={masks}", "dropout=0,1")
    assert len(rows) == 12 * len(masks.split(","))
    assert not [row for row in rows if exceeds(row)]


@each_triton
def test_dropout_spills_nothing_on_other_gpus(version):
    others = ["arch=sm_80,sm_89,sm_100,sm_120", "head_dim=64,128", "dtype=bf16", "dropout=1"]
    rows = compile_apart("tests.ahead_of_time", version, *others)
    assert len(rows) == 24
    assert not [row for row in rows if exceeds(row)]


@each_triton
def test_float32_spills_nothing_under_dropout_with_block_masks(version):
    float32 = ["arch=sm_90", "head_dim=32,64,128,256", "dtype=fp32", "dropout=1", "block_size=64"]
    rows = compile_apart("tests.ahead_of_time", version, *float32)
    assert len(rows) == 12
    assert not [row for row in rows if exceeds(row)]


@each_triton
def test_dk_and_dv_of_the_widest_heads_spill_nothing(version):
    widest = ["arch=sm_90", "kernel=dkdv", "head_dim=256", "dtype=bf16"]
    rows = compile_apart("tests.ahead_of_time", version, *widest, "mask=causal,intervals", "dropout=0,1")
    assert len(rows) == 4
    assert not [row for row in rows if exceeds(row)]


@each_triton
def test_the_widest_heads_fit_other_gpus_under_dropout_with_block_masks(version):
    # a kernel that asks for more shared memory than there is does not start
    others = [
        f"arch={','.join(sorted(SHARED_MEMORY.keys() - {'sm_90'}))}",
        "kernel=forward,dq",
        "head_dim=256",
    ]
    rows = compile_apart("tests.ahead_of_time", version, *others, "dtype=bf16", "dropout=1", "block_size=128")
    assert len(rows) == 2 * (len(SHARED_MEMORY) - 1)
    assert not [row for row in rows if exceeds(row)]
