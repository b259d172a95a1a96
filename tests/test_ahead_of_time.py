"""Every kernel compiles for every GPU that has tiles, without the GPU: it fits, and spills nothing.

Here that is every tile of the tables, at the widest of the heads that share it, under the mask that it is for
(a causal one, where it is for all). `make compile` compiles all heads under all masks, with dropout and
without, and with block masks.
"""

import re

import pytest

from kernels.tiles import tile_table
from tests.ahead_of_time import KERNELS, SHARED_MEMORY, exceeds
from tests.compile_apart import compile_apart, each_triton

DTYPES = {2: "bf16", 4: "fp32"}
# what is compiled for a variant of kernels.tiles.variant_of
VARIANTS = {
    "": (),
    "full": ("mask=full",),
    "window": ("mask=window",),
    "small blocks": ("block_size=64",),
    "blocks": ("block_size=128",),
    "dropout": ("dropout=1",),
    "dropout blocks": ("dropout=1", "block_size=128"),
}


def distinct_rows(arch: str) -> dict[tuple[str, ...], list[str]]:
    """Of each tile of the table the widest head: what names the kernel, and the head sizes."""
    variants = list(VARIANTS)
    # of block sizes, and of dropout with blocks and without, that share a tile, the one that asks for more
    hardest = {}
    for (name, itemsize, width), tile in tile_table(arch).items():
        kernel, _, variant = name.partition(" ")
        alike = (kernel, itemsize, tile, width, variant.removeprefix("small ").removesuffix(" blocks"))
        hardest[alike] = max(hardest.get(alike, ""), variant, key=variants.index)
    widest = {}
    for (kernel, itemsize, tile, width, _), variant in hardest.items():
        if kernel in KERNELS:
            shared = (kernel, itemsize, tile, variant)
            widest[shared] = max(widest.get(shared, 0), width)
    rows = {}
    for (kernel, itemsize, _, variant), width in widest.items():
        given = (f"arch={arch}", f"kernel={kernel}", f"dtype={DTYPES[itemsize]}", *VARIANTS[variant])
        rows.setdefault(given, []).append(str(width))
    return rows


@each_triton
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_tile_of_the_tables_fits_its_gpu_and_spills_nothing(arch, version):
    table = distinct_rows(arch)
    assert {kernel for given in table for kernel in KERNELS if f"kernel={kernel}" in given} == KERNELS.keys()
    for given, widths in table.items():
        rows = compile_apart("tests.ahead_of_time", version, *given, f"head_dim={','.join(widths)}")
        assert len(rows) == len(widths)
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
