"""Compiles the decode kernel for GPUs that this machine lacks, and prints what it uses, as JSON lines.

Run by test_ahead_of_time.py in a separate process, because the other tests run Triton's interpreter:
    python -m tests.ahead_of_time_decode arch=sm_90,gfx942 head_dim=64 group=1,4 block_size=0,128 dtype=bf16
"""

import json
import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.portable.decode import decode_kernel, with_rows
from kernels.tiles import find_tile, padded_head_dim
from tests.ahead_of_time import DTYPES, POINTERS, SHARED_MEMORY
from tests.assembler import used_by

CHOICES = {
    "arch": list(SHARED_MEMORY),
    "head_dim": ["64", "128", "256"],
    "group": ["1", "4"],
    "block_size": ["0", "128"],
    "dtype": ["bf16", "fp32"],
    "turns": ["0", "1"],
}


def compile_kernel(
    arch: str,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: str,
    tile=None,
    n_query: int = 1,
    turns: bool = False,
) -> dict:
    """Shared memory, registers and spilled bytes, by default with one new query per sequence.

    turns: the query and its key are turned, as with rotary positions.
    """
    tile = with_rows(tile or find_tile(arch, "decode", head_dim, DTYPES[dtype].itemsize, ""), n_query * group)
    constants = {
        "N_QUERY": n_query,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "PRECISION": "ieee",
        # a single new query comes with its key
        "APPENDS": n_query == 1,
        "TURNS": turns,
        "OVERLAPS": arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90,
        "HEAD_DIM": head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded_head_dim(head_dim),
    }
    if n_query > 1:
        constants |= {"new_k_ptr": None, "new_v_ptr": None}
    if not turns:
        constants |= {"cos_ptr": None, "sin_ptr": None}
    if not block_size:
        constants |= {"spans_ptr": None, "entries_ptr": None, "bits_ptr": None}
    pointers = POINTERS | {
        "parts_ptr": "*fp32",
        "lengths_ptr": "*i64",
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
    }
    names = decode_kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, f"*{dtype}")
        else:
            signature[name] = "fp32" if "scale" in name else "i32"
        if signature[name].startswith("*") or name.startswith("stride_"):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(
        decode_kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes
    )
    is_amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return used_by(source, target, options)


def main(arguments: list[str]) -> None:
    chosen = CHOICES | {name: values.split(",") for name, _, values in (a.partition("=") for a in arguments)}
    for combination in product(*(chosen[name] for name in CHOICES)):
        arch, head_dim, group, block_size, dtype, turns = combination
        used = compile_kernel(arch, int(head_dim), int(group), int(block_size), dtype, turns=turns == "1")
        row = dict(zip(CHOICES, combination, strict=True))
        print(json.dumps(row | {"triton": triton.__version__} | used), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
