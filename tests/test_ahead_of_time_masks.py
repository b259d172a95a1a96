"""Kernels under every mask, dropout and block masks compile for their GPUs without spills.

Apart from test_ahead_of_time.py, so that another process runs them beside it: each takes minutes.
"""

import pytest

from tests.ahead_of_time import exceeds
from tests.compile_apart import compile_apart, each_triton


@each_triton
@pytest.mark.parametrize("block_size", [0, 64, 128])
def test_no_mask_of_any_kind_spills_with_or_without_dropout(block_size, version):
    # where tiles are measured
    measured = ["arch=sm_90", "head_dim=64,128", "dtype=bf16", f"block_size={block_size}"]
    rows = compile_apart(
        "tests.ahead_of_time", version, *measured, "mask=full,causal,window,intervals", "dropout=0,1"
    )
    assert len(rows) == 48
    assert not [row for row in rows if exceeds(row)]


@each_triton
@pytest.mark.parametrize("variant", [("dropout=1", "block_size=0"), ("dropout=0", "block_size=128")], ids=str)
def test_dropout_and_block_masks_spill_nothing_on_other_gpus(variant, version):
    others = ["arch=sm_80,sm_89,sm_100,sm_120", "head_dim=64,128", "dtype=bf16"]
    rows = compile_apart("tests.ahead_of_time", version, *others, *variant)
    assert len(rows) == 24
    assert not [row for row in rows if exceeds(row)]
