"""Every kernel compiles for every GPU that has tiles, without the GPU: it fits, and spills nothing."""

import pytest

from tests.ahead_of_time import SHARED_MEMORY, exceeds
from tests.compile_apart import compile_apart, each_triton


@each_triton
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_at_every_size_fits_its_gpu_and_spills_nothing(arch, version):
    rows = compile_apart("tests.ahead_of_time", version, f"arch={arch}")
    # forward, dk and dv, dq; five head sizes in two dtypes
    assert len(rows) == 30
    assert not [row for row in rows if exceeds(row)]


@each_triton
def test_the_decode_kernel_fits_every_gpu_without_spilling(version):
    # the most queries that share keys, of one token: 128
    one = ["head_dim=64", "group=1", "block_size=0,128", "dtype=bf16", "turns=1"]
    learned = ["head_dim=64", "group=1", "block_size=0", "dtype=bf16", "turns=0"]
    many = ["arch=sm_80,sm_90", "head_dim=128", "group=32,128", "block_size=0", "dtype=bf16", "turns=1"]
    rows = [
        row
        for given in (one, learned, many)
        for row in compile_apart("tests.ahead_of_time_decode", version, *given)
    ]
    assert len(rows) == 3 * len(SHARED_MEMORY) + 4
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["arch"]], row
        assert row["spilled"] == 0, row
