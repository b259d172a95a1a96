"""Compiles the portable kernels for GPUs that this machine lacks, and prints the resources that each uses.

Run by test_ahead_of_time.py in a separate process, because the other tests run Triton's interpreter:
    python -m tests.ahead_of_time arch=sm_90 kernel=forward head_dim=64,128 mask=causal,window dropout=0,1
prints one JSON line for each combination of the given values; without arguments, for each kernel, head size
and dtype of the tables under a causal mask. It fails if a kernel does not fit its GPU, or spills registers.
"""

import json
import re
import sys
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.portable.dkdv import dkdv_kernel
from kernels.portable.dq import dq_kernel
from kernels.portable.forward import forward_kernel
from kernels.tiles import find_tile, padded_head_dim, variant_of
from tests.assembler import used_by

KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# bytes that one thread block may use
SHARED_MEMORY = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
}
POINTERS = {
    "lse_ptr": "*fp32",
    "lse_log2_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "bounds_ptr": "*i32",
    "key_bounds_ptr": "*i32",
    "spans_ptr": "*i32",
    "entries_ptr": "*i32",
    "bits_ptr": "*i32",
    "seed_ptr": "*i64",
}


def compile_kernel(
    kernel: str,
    arch: str,
    head_dim: int,
    dtype: str,
    mask: str,
    dropout: bool,
    block_size: int = 0,
    tile=None,
    *,
    group: int = 1,
) -> dict:
    """What the compiled kernel uses: shared memory, registers and spilled bytes.

    group: heads of queries that share keys, 1 or any larger number.
    """
    function = KERNELS[kernel]
    variant = variant_of(mask, block_size, dropout=dropout)
    tile = (tile or find_tile(arch, kernel, head_dim, DTYPES[dtype].itemsize, variant)).within(block_size)
    constants = {
        "MASK": mask,
        "BLOCK_SIZE": block_size,
        "DROPOUT": dropout,
        "PRECISION": "ieee",
        "TMA": tile.tma,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    own = {"HELD": tile.held, "KEYS_FIRST": tile.keys_first and not dropout}
    constants |= {name: value for name, value in own.items() if name in function.arg_names}
    # as at run time: an absent pointer is None, and an integer of 1 is a constant
    absent = () if mask == "intervals" else ("bounds_ptr", "key_bounds_ptr")
    absent += () if dropout else ("seed_ptr",)
    absent += () if block_size else ("spans_ptr", "entries_ptr", "bits_ptr")
    constants |= {name: None for name in absent if name in function.arg_names}
    ones = r"stride_(q|k|v|do)d" + (r"|group_size" if group == 1 else "")
    constants |= {name: 1 for name in function.arg_names if re.fullmatch(ones, name)}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_source") and constants["TMA"]:
            rows = tile.block_n if name in ("k_source", "v_source") else tile.block_m
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows}, {constants['BLOCK_D']}]>"
        elif name.endswith(("_ptr", "_source")):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        elif "scale" in name or name == "limit":
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        is_stride = name.startswith("stride_") and not function.params[index].do_not_specialize
        if signature[name].startswith("*") or (is_stride and name not in constants):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, {(function.arg_names.index(k),): v for k, v in constants.items()}, attributes
    )
    target = (
        GPUTarget("hip", arch, 64)
        if arch.startswith("gfx")
        else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    )
    options = {name: value for name, value in tile.options().items() if not name.startswith("BLOCK")}
    return used_by(source, target, options)


def exceeds(row: dict) -> bool:
    """Whether a kernel does not fit its GPU, or spills."""
    return row["shared"] > SHARED_MEMORY[row["arch"]] or row["spilled"] > 0


EVERYTHING = {
    "arch": list(SHARED_MEMORY),
    "kernel": list(KERNELS),
    "head_dim": ["16", "32", "64", "128", "256"],
    "dtype": ["bf16", "fp32"],
    "mask": ["causal"],
    "dropout": ["0"],
    "block_size": ["0"],
    "group": ["1"],
}


def main(arguments: list[str]) -> None:
    chosen = EVERYTHING | {
        name: values.split(",") for name, _, values in (a.partition("=") for a in arguments)
    }
    names = ("arch", "kernel", "head_dim", "dtype", "mask", "dropout", "block_size", "group")
    too_much = []
    for combination in product(*(chosen[name] for name in names)):
        row = dict(zip(names, combination, strict=True))
        used = compile_kernel(
            row["kernel"],
            row["arch"],
            int(row["head_dim"]),
            row["dtype"],
            row["mask"],
            row["dropout"] == "1",
            int(row["block_size"]),
            group=int(row["group"]),
        )
        row |= {"triton": triton.__version__} | used
        print(json.dumps(row), flush=True)
        if exceeds(row):
            too_much.append(row)
    if too_much:
        sys.exit(f"these do not fit their GPU, or spill: {too_much}")


if __name__ == "__main__":
    main(sys.argv[1:])
