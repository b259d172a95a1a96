"""Every kernel compiles for every GPU that has tiles, without the GPU: it fits, and spills nothing.

Here that is every tile of the tables, at the widest of the heads that share it, under a causal mask. `make
compile` compiles all heads under all masks, with dropout and without, and with block masks.
"""

import re
from itertools import product

import pytest

from kernels.tiles import find_tile
from tests.ahead_of_time import DTYPES, EVERYTHING, KERNELS, SHARED_MEMORY, exceeds
from tests.compile_apart import compile_apart, each_triton


def widest_heads(arch: str, kernel: str, dtype: str) -> list[str]:
    """Of the head sizes that share a tile the widest."""
    widest = {}
    for head_dim in EVERYTHING["head_dim"]:
        widest[find_tile(arch, kernel, int(head_dim), DTYPES[dtype].itemsize, "causal")] = head_dim
    return list(widest.values())


@each_triton
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_in_every_tile_fits_its_gpu_and_spills_nothing(arch, version):
    for kernel, dtype in product(KERNELS, EVERYTHING["dtype"]):
        heads = widest_heads(arch, kernel, dtype)
        assert "256" in heads
        given = [f"arch={arch}", f"kernel={kernel}", f"dtype={dtype}", f"head_dim={','.join(heads)}"]
        rows = compile_apart("tests.ahead_of_time", version, *given)
        assert len(rows) == len(heads)
        assert not [row for row in rows if exceeds(row)]


@each_triton
def test_a_new_length_or_mask_compiles_no_kernel(version):
    # tensors, their strides, multiples of n_head * head_dim, and what the model fixes
    fixed = re.compile(r"\w+_(ptr|source)|stride_(q|k|v|o|do|dq|dk)[bthd]|n_head|group_size|\w*scale\w*")
    rows = compile_apart("tests.specialized", version)
    assert {row["kernel"] for row in rows} == KERNELS.keys()
    for row in rows:
        assert "stride_qt" in row["specialized"]
        assert not [name for name in row["specialized"] if not fixed.fullmatch(name)], row


@each_triton
def test_the_decode_kernel_fits_every_gpu_without_spilling(version):
    # the most queries that share keys, of one token: 128
    one = ["head_dim=64", "group=1", "block_size=0,128", "dtype=bf16", "turns=1"]
    learned = ["head_dim=64", "group=1", "block_size=0", "dtype=bf16", "turns=0"]
    many = ["arch=sm_80,sm_90", "head_dim=128", "group=32,128", "block_size=0", "dtype=bf16", "turns=1"]
    chosen = (one, learned, many) if version == "pinned" else (one, many)
    rows = [row for given in chosen for row in compile_apart("tests.ahead_of_time_decode", version, *given)]
    assert len(rows) == len(chosen) * len(SHARED_MEMORY) + 4
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["arch"]], row
        assert row["spilled"] == 0, row
