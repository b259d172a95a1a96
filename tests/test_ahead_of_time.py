"""Every kernel compiles for every GPU that has tiles, without the GPU: it fits, and does not spill.

Here for the commonest heads; all rows of the tables, some minutes of compiling:
    python -m tests.ahead_of_time
"""

import pytest

from tests.ahead_of_time import MAY_SPILL, SHARED_MEMORY
from tests.compile_apart import compile_apart, each_triton


@each_triton
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_fit_their_gpus_and_spill_no_more_than_is_listed(arch, version):
    arguments = [f"arch={arch}", "kernel=forward,dkdv,dq", "head_dim=64,128", "dtype=bf16"]
    # where tiles are measured, everything
    more = ["mask=causal,full,window,intervals", "dropout=0,1"] if arch == "sm_90" else []
    rows = compile_apart("tests.ahead_of_time", version, *arguments, *more)
    assert len(rows) == (48 if more else 6)
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[arch], row
        case = arch, row["kernel"], int(row["head_dim"]), row["mask"], row["dropout"] == "1"
        assert (row["spilled"] or 0) <= MAY_SPILL.get(case, 0), row


@each_triton
def test_the_largest_heads_fit_the_least_shared_memories(version):
    arguments = ["arch=sm_89,gfx942", "kernel=forward,dkdv,dq", "head_dim=256", "dtype=bf16,fp32"]
    rows = compile_apart("tests.ahead_of_time", version, *arguments)
    assert len(rows) == 12
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["arch"]], row


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
        assert row["spilled"] in (0, None), row
