"""Block sizes of the portable kernels: their only tuning file.

A tile is looked up by GPU, kernel, bytes per element and padded head_dim. "forward" and "dq" keep BLOCK_M
queries and walk the keys; so does "decode", which fills the rows of a short tile with heads; "dkdv" keeps
BLOCK_N keys and walks the queries. A variant (variant_of) has its own row where another tile is better.
scripts/tune_tiles.py measures candidates, and tests/ahead_of_time.py compiles the rows for their GPUs. Tiles
that have not been measured were chosen by the compiler's report: as large as possible without spills.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

# the most registers of a thread. Without a limit NVIDIA's assembler may spill some to run more blocks at once
ALL_REGISTERS = 255


class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # read by TMA, on GPUs that have it
    tma: bool = False
    # limit on registers per thread: a low one, so that another block fits on the multiprocessor, or
    # ALL_REGISTERS; with None the assembler chooses
    registers: int | None = None
    # forward and dq: hold q and dout in registers throughout the loop, see tile_io.in_registers
    held: bool = False
    # dkdv: tiles are keys by queries, except under dropout
    keys_first: bool = False

    def within(self, block_size: int) -> "Tile":
        """The tile, no larger than a block of the block mask; a block_size of 0 means no block mask."""
        if block_size == 0:
            return self
        return self._replace(block_m=min(self.block_m, block_size), block_n=min(self.block_n, block_size))

    def options(self) -> dict[str, int]:
        """The tile as keyword arguments of a kernel launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **limit,
        }


Table = dict[tuple[str, int, int], Tile]


def rows(kernel: str, itemsize: int, *, to_64: Tile, to_128: Tile, to_256: Tile) -> Table:
    """The rows of a kernel for head_dim up to 64, to 128 and to 256."""
    tiles = {16: to_64, 32: to_64, 64: to_64, 128: to_128, 256: to_256}
    return {(kernel, itemsize, width): tile for width, tile in tiles.items()}


def dropping(*tiles: tuple[str, int, Tile], itemsize: int = 2) -> Table:
    """The rows of a kernel and head_dim under dropout, with a block mask or without."""
    return {
        (f"{kernel} {variant}", itemsize, width): tile
        for kernel, width, tile in tiles
        for variant in ("dropout", "dropout blocks")
    }


def all_registers(table: Table) -> Table:
    """The rows, with all registers that a thread can have with up to eight warps."""
    return {key: tile._replace(registers=ALL_REGISTERS) for key, tile in table.items()}


# float32 is exact rather than fast: unless TF32 is asked for, products run without matrix units
FLOAT32 = all_registers(
    rows("forward", 4, to_64=Tile(32, 32, 4, 1), to_128=Tile(32, 32, 8, 1), to_256=Tile(16, 16, 8, 1))
    | rows("dq", 4, to_64=Tile(32, 32, 4, 1), to_128=Tile(32, 16, 8, 1), to_256=Tile(16, 16, 8, 1))
    | rows("dkdv", 4, to_64=Tile(32, 32, 4, 1), to_128=Tile(16, 32, 8, 1), to_256=Tile(16, 16, 8, 1))
    | {("dkdv", 4, 64): Tile(32, 32, 8, 1)}
    | dropping(("forward", 64, Tile(32, 32, 8, 1)), ("forward", 128, Tile(16, 32, 8, 1)), itemsize=4)
) | dropping(("dkdv", 256, Tile(16, 16, 8, 1)), itemsize=4)
# small tiles, so that many loads of keys are in flight. Those of 2 bytes up to head_dim 128 were measured, on
# an H200 without block masks (docs/long_context.md); the others were not
DECODE = rows(
    "decode", 4, to_64=Tile(16, 32, 4, 2), to_128=Tile(16, 16, 4, 2), to_256=Tile(16, 16, 4, 2)
) | rows("decode", 2, to_64=Tile(16, 32, 1, 4), to_128=Tile(16, 32, 1, 4), to_256=Tile(16, 32, 4, 2))
# head_dim 64 and 128 were measured on an H200: torch 2.11, triton 3.6, bf16, 2026-11-22. For what else was
# tried, see docs/kernels.md
HOPPER = (
    FLOAT32
    | DECODE
    | rows(
        "forward",
        2,
        to_64=Tile(64, 64, 4, 3, True, 128, held=True),
        to_128=Tile(64, 64, 4, 3, True),
        to_256=Tile(64, 64, 8, 2, True),
    )
    | rows(
        "dq",
        2,
        to_64=Tile(64, 64, 4, 3, True),
        to_128=Tile(64, 64, 4, 3, True, held=True),
        to_256=Tile(64, 64, 8, 2, True),
    )
    | rows(
        "dkdv",
        2,
        to_64=Tile(64, 64, 4, 2, True, 168, keys_first=True),
        to_128=Tile(64, 64, 4, 2, True, keys_first=True),
        to_256=Tile(32, 64, 8, 2, True),
    )
    | {
        ("forward dropout", 2, 64): Tile(64, 64, 4, 2, True, 128),
        ("dkdv dropout", 2, 64): Tile(64, 64, 4, 2, True),
        ("forward dropout blocks", 2, 64): Tile(64, 64, 4, 2, True, 128),
        ("dq dropout blocks", 2, 64): Tile(64, 64, 4, 5, True, 168),
        ("dkdv dropout blocks", 2, 32): Tile(64, 64, 4, 5, True),
        ("dkdv dropout blocks", 2, 64): Tile(64, 64, 4, 5, True),
        ("forward full", 2, 128): Tile(64, 64, 4, 3, True, held=True),
        ("dq full", 2, 64): Tile(64, 64, 4, 3, True, held=True),
        ("dq window", 2, 64): Tile(64, 64, 4, 2, True),
        # a list's entry is loaded before its tile, so of n stages only (n - 1) // 2 + 1 hold tiles
        ("forward blocks", 2, 64): Tile(64, 64, 4, 5, True, 128, held=True),
        ("dq blocks", 2, 64): Tile(64, 64, 4, 5, True, 168),
        ("dkdv blocks", 2, 64): Tile(64, 64, 4, 2, True, keys_first=True),
        ("forward blocks", 2, 128): Tile(64, 64, 4, 5, True, held=True),
        ("dq blocks", 2, 128): Tile(64, 64, 4, 5, True, held=True),
        ("forward small blocks", 2, 64): Tile(64, 64, 4, 3, True, 128, held=True),
        ("dq small blocks", 2, 64): Tile(64, 64, 4, 5, True),
        ("dkdv small blocks", 2, 64): Tile(64, 64, 4, 2, True, keys_first=True),
        ("forward small blocks", 2, 128): Tile(64, 64, 4, 5, True, held=True),
        ("dq small blocks", 2, 128): Tile(64, 64, 4, 5, True, held=True),
    }
)
BLACKWELL = (
    FLOAT32
    | DECODE
    | all_registers(
        dropping(
            *(("forward", width, Tile(64, 64, 4, 3, True)) for width in (16, 32, 64)),
            ("forward", 128, Tile(64, 64, 8, 3, True)),
            *(("dq", width, Tile(64, 32, 4, 3, True)) for width in (16, 32, 64)),
            ("dq", 128, Tile(64, 64, 8, 2, True)),
            ("dq", 256, Tile(64, 32, 8, 2, True)),
            ("dkdv", 64, Tile(64, 32, 4, 2, True)),
        )
    )
    | rows(
        "forward",
        2,
        to_64=Tile(128, 64, 4, 3, True),
        to_128=Tile(64, 64, 4, 3, True),
        to_256=Tile(64, 32, 8, 2, True, ALL_REGISTERS),
    )
    | rows(
        "dq",
        2,
        to_64=Tile(128, 64, 4, 3, True),
        to_128=Tile(64, 64, 4, 3, True, ALL_REGISTERS),
        to_256=Tile(64, 64, 8, 2, True),
    )
    | rows(
        "dkdv",
        2,
        to_64=Tile(64, 64, 4, 2, True),
        to_128=Tile(64, 64, 4, 3, True),
        to_256=Tile(32, 64, 8, 2, True),
    )
    | {
        ("forward full", 4, 64): Tile(32, 32, 8, 1, registers=ALL_REGISTERS),
        ("forward blocks", 4, 128): Tile(16, 32, 8, 1, registers=ALL_REGISTERS),
        ("forward small blocks", 4, 128): Tile(16, 32, 8, 1, registers=ALL_REGISTERS),
        ("forward window", 2, 128): Tile(64, 64, 4, 3, True, ALL_REGISTERS),
        ("dkdv full", 2, 64): Tile(64, 64, 4, 2, True, ALL_REGISTERS),
        ("forward blocks", 2, 128): Tile(128, 64, 8, 3, True),
        ("forward small blocks", 2, 32): Tile(64, 64, 4, 2, True),
        ("forward small blocks", 2, 128): Tile(64, 64, 8, 3, True),
    }
)
AMPERE_DROPOUT = all_registers(
    dropping(
        ("forward", 64, Tile(64, 32, 8, 2)),
        ("forward", 128, Tile(64, 32, 4, 2)),
        ("dq", 16, Tile(64, 64, 4, 3)),
        ("dq", 32, Tile(64, 64, 4, 3)),
        ("dq", 64, Tile(64, 32, 4, 3)),
        ("dkdv", 64, Tile(64, 32, 8, 2)),
        ("dkdv", 128, Tile(32, 64, 8, 2)),
    )
)
AMPERE_BLOCKS = {
    (f"dq {variant}", 2, width): tile
    for variant in ("blocks", "small blocks")
    for width, tile in {
        16: Tile(64, 64, 4, 3, registers=ALL_REGISTERS),
        32: Tile(64, 64, 4, 3, registers=ALL_REGISTERS),
        64: Tile(64, 64, 8, 2),
    }.items()
}
AMPERE = (
    FLOAT32
    | DECODE
    | AMPERE_DROPOUT
    | AMPERE_BLOCKS
    | rows(
        "forward",
        2,
        to_64=Tile(128, 64, 8, 3, registers=ALL_REGISTERS),
        to_128=Tile(64, 64, 8, 2),
        to_256=Tile(64, 32, 8, 2),
    )
    | rows("dq", 2, to_64=Tile(64, 64, 4, 3), to_128=Tile(64, 64, 8, 2), to_256=Tile(64, 32, 8, 2))
    | rows("dkdv", 2, to_64=Tile(64, 64, 8, 2), to_128=Tile(64, 64, 8, 2), to_256=Tile(32, 32, 8, 2))
    | {("dq full", 2, 64): Tile(64, 32, 4, 3)}
    | dropping(("dq", 256, Tile(64, 32, 8, 2, registers=ALL_REGISTERS)))
    | dropping(("dkdv", 256, Tile(16, 16, 4, 1)), itemsize=4)
)
# GPUs with 99 KiB of shared memory
ADA = (
    FLOAT32
    | DECODE
    | AMPERE_DROPOUT
    | AMPERE_BLOCKS
    | rows("forward", 2, to_64=Tile(128, 64, 8, 3), to_128=Tile(128, 64, 8, 2), to_256=Tile(64, 32, 8, 2))
    | rows("dq", 2, to_64=Tile(64, 64, 4, 3), to_128=Tile(64, 64, 8, 2), to_256=Tile(32, 32, 4, 1))
    | rows(
        "dkdv",
        2,
        to_64=Tile(32, 32, 4, 2),
        to_128=Tile(64, 64, 8, 2),
        to_256=Tile(32, 32, 8, 2, registers=ALL_REGISTERS),
    )
    | {
        ("forward full", 4, 64): Tile(32, 32, 8, 1, registers=ALL_REGISTERS),
        ("forward", 4, 128): Tile(16, 32, 8, 1, registers=ALL_REGISTERS),
        ("forward", 2, 32): Tile(128, 32, 8, 3),
        ("forward blocks", 2, 128): Tile(64, 32, 8, 2),
        ("forward small blocks", 2, 128): Tile(64, 32, 8, 2),
        ("dq full", 2, 64): Tile(64, 32, 4, 3),
        ("dkdv full", 2, 64): Tile(64, 32, 4, 2),
        ("dkdv blocks", 2, 256): Tile(32, 32, 8, 1),
        ("dkdv small blocks", 2, 256): Tile(32, 32, 8, 1),
    }
    | all_registers(
        dropping(
            ("forward", 16, Tile(128, 64, 8, 3)),
            ("forward", 256, Tile(32, 32, 8, 2)),
            ("dq", 256, Tile(32, 32, 8, 1)),
            ("dkdv", 16, Tile(32, 32, 4, 2)),
            ("dkdv", 32, Tile(32, 32, 4, 2)),
        )
    )
)
CDNA = (
    DECODE
    | rows("forward", 4, to_64=Tile(32, 32, 4, 1), to_128=Tile(32, 32, 8, 1), to_256=Tile(16, 16, 8, 1))
    | rows("dq", 4, to_64=Tile(32, 32, 4, 2), to_128=Tile(32, 32, 4, 1), to_256=Tile(32, 16, 4, 1))
    | rows("dkdv", 4, to_64=Tile(32, 32, 4, 1), to_128=Tile(16, 32, 4, 1), to_256=Tile(32, 16, 4, 1))
    | rows("forward", 2, to_64=Tile(128, 64, 4, 2), to_128=Tile(64, 64, 4, 2), to_256=Tile(64, 32, 8, 2))
    | rows("dq", 2, to_64=Tile(128, 64, 4, 2), to_128=Tile(64, 64, 4, 2), to_256=Tile(64, 32, 4, 1))
    | rows("dkdv", 2, to_64=Tile(64, 64, 4, 2), to_128=Tile(64, 64, 4, 1), to_256=Tile(32, 32, 4, 2))
)
TABLES = {"sm_80": AMPERE, "sm_90": HOPPER, "sm_100": BLACKWELL, "sm_103": BLACKWELL}
# small and not square, so that short sequences have several blocks of every kind
INTERPRETER = {
    "forward": Tile(64, 32, 4, 1, held=True),
    "dq": Tile(32, 64, 4, 1),
    "dkdv": Tile(32, 64, 4, 1, keys_first=True),
    "decode": Tile(16, 32, 4, 1),
}


def choose_tile(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    variant: str = "",
    block_size: int = 0,
) -> Tile:
    """The tile of kernel "forward", "dq", "dkdv" or "decode" on this device.

    variant: from variant_of. block_size: of the block mask, 0 without one.
    """
    if device.type == "cpu":
        return INTERPRETER[kernel]
    return find_tile(architecture(device), kernel, head_dim, dtype.itemsize, variant).within(block_size)


def variant_of(mask: str, block_size: int, *, dropout: bool) -> str:
    """What a tile may depend on besides head_dim: dropout, a block mask, or a mask of portable/masks.py."""
    if dropout:
        return "dropout blocks" if block_size else "dropout"
    if block_size:
        return "small blocks" if block_size == 64 else "blocks"
    return {"intervals": "window"}.get(mask, mask)


def find_tile(arch: str, kernel: str, head_dim: int, itemsize: int, variant: str) -> Tile:
    """The row of the architecture's table; the variant's own row, if it has one."""
    table, width = tile_table(arch), padded_head_dim(head_dim)
    return table.get((f"{kernel} {variant}", itemsize, width), table[kernel, itemsize, width])


def tile_table(arch: str) -> Table:
    """The tiles of an architecture such as "sm_90" or "gfx942"; small ones for a GPU without a table."""
    return CDNA if arch.startswith("gfx") else TABLES.get(arch, ADA)


@cache
def architecture(device: torch.device) -> str:
    """The name that compilers use for the GPU: "sm_90", "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


# cached: Triton's own function takes Python ten times as long, and every launch asks
@cache
def padded_head_dim(head_dim: int) -> int:
    """The width of a tile: head_dim rounded up to a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))
