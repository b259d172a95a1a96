"""Block sizes of the portable kernels: the only tuning file.

A tile is looked up by family of GPUs, kernel, padded head_dim and bytes of one element. "forward" keeps
BLOCK_M queries and walks keys, "dq" does the same, "dkdv" keeps BLOCK_N keys and walks queries.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # read by TMA where the GPU and the strides allow it
    tma: bool = False

    def options(self) -> dict[str, int]:
        """As the keyword arguments of a kernel launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# H200, torch 2.11, triton 3.6, bf16, causal and full, T 1024 to 16384; not measured yet
HOPPER = {
    ("forward", 2, 16): Tile(128, 64, 4, 3, True),
    ("forward", 2, 32): Tile(128, 64, 4, 3, True),
    ("forward", 2, 64): Tile(128, 64, 4, 3, True),
    ("forward", 2, 128): Tile(64, 64, 4, 3, True),
    ("forward", 2, 256): Tile(64, 64, 4, 2, True),
    ("forward", 4, 16): Tile(64, 32, 4, 2),
    ("forward", 4, 32): Tile(64, 32, 4, 2),
    ("forward", 4, 64): Tile(64, 32, 4, 2),
    ("forward", 4, 128): Tile(32, 32, 4, 2),
    ("forward", 4, 256): Tile(32, 32, 4, 1),
    ("dq", 2, 16): Tile(128, 64, 8, 3, True),
    ("dq", 2, 32): Tile(128, 64, 8, 3, True),
    ("dq", 2, 64): Tile(128, 64, 8, 3, True),
    ("dq", 2, 128): Tile(128, 64, 8, 3, True),
    ("dq", 2, 256): Tile(64, 32, 8, 2, True),
    ("dq", 4, 16): Tile(32, 32, 4, 2),
    ("dq", 4, 32): Tile(32, 32, 4, 2),
    ("dq", 4, 64): Tile(32, 32, 4, 2),
    ("dq", 4, 128): Tile(32, 32, 4, 1),
    ("dq", 4, 256): Tile(32, 32, 8, 1),
    ("dkdv", 2, 16): Tile(128, 64, 4, 2, True),
    ("dkdv", 2, 32): Tile(128, 64, 4, 2, True),
    ("dkdv", 2, 64): Tile(64, 64, 4, 2, True),
    ("dkdv", 2, 128): Tile(64, 64, 4, 2, True),
    ("dkdv", 2, 256): Tile(32, 64, 8, 2, True),
    ("dkdv", 4, 16): Tile(32, 32, 4, 2),
    ("dkdv", 4, 32): Tile(32, 32, 4, 2),
    ("dkdv", 4, 64): Tile(32, 32, 4, 2),
    ("dkdv", 4, 128): Tile(32, 32, 4, 1),
    ("dkdv", 4, 256): Tile(16, 32, 8, 1),
}
# small, and neither square nor alike, so that short sequences have several blocks of every kind
INTERPRETER = {"forward": Tile(64, 32, 4, 1), "dq": Tile(32, 64, 4, 1), "dkdv": Tile(32, 64, 4, 1)}


def choose_tile(
    kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device, dropout: bool = False
) -> Tile:
    """The tile of kernel "forward", "dq" or "dkdv" on this device."""
    if device.type == "cpu":
        return INTERPRETER[kernel]
    return find_tile(architecture(device), kernel, head_dim, dtype.itemsize, dropout)


def find_tile(arch: str, kernel: str, head_dim: int, itemsize: int, dropout: bool) -> Tile:
    """The row of the architecture's table: its row for dropout, if it has one."""
    table, width = tile_table(arch), padded_head_dim(head_dim)
    plain = table[kernel, itemsize, width]
    return table.get((f"{kernel} dropout", itemsize, width), plain) if dropout else plain


def tile_table(arch: str) -> dict[tuple[str, int, int], Tile]:
    """The tiles of an architecture such as "sm_90" or "gfx942"."""
    return HOPPER


@cache
def architecture(device: torch.device) -> str:
    """The name that compilers use for the GPU: "sm_90", "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile is wide."""
    return max(16, triton.next_power_of_2(head_dim))
