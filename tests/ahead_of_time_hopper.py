"""Compiles every shipped configuration of the Hopper kernels without a GPU, and prints what each uses.

Run by test_hopper.py in a separate process, because Triton's interpreter cannot run Gluon:
    python -m tests.ahead_of_time_hopper mask=causal,full
prints one JSON line for each kernel, head_dim, dtype, mask and form of the forward kernel.
"""

import json
import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.hopper.backward_64 import backward_64_kernel
from kernels.hopper.backward_128 import backward_128_kernel
from kernels.hopper.backward_256 import backward_256_kernel
from kernels.hopper.descriptors import copy_width, rest_width, tile_width
from kernels.hopper.dq import dq_kernel
from kernels.hopper.forward import ROWS, forward_kernel
from kernels.hopper.launch import registers
from kernels.hopper.sums import PART
from kernels.hopper.tiles import backward_tile, dq_tile, forward_tile, keeps_maximum
from tests.assembler import machine_code_of, used_by

INTEGERS = ("notes_ptr", "bounds_ptr", "counts_ptr", "counter_ptr", "spans_ptr", "entries_ptr", "bits_ptr")
HEAD_DIMS = (64, 128, 192, 256)
MASKS = ("full", "causal", "window", "intervals", "blocks")


def descriptor(dtype: str, *shape: int, swizzle: int = 128) -> str:
    bits = 32 if dtype == "fp32" else 16
    return (
        f"tensordesc<{dtype}{list(shape)},NVMMASharedLayout("
        f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, "
        f"rank={len(shape)}, transposed=False, fp4_padded=False, cga_layout=[])>"
    )


def forward_configuration(head_dim: int, dtype: str, mask: str, seq_q: int, dropout: bool) -> tuple:
    """The kernel, its descriptors by argument, its constants, registers of a thread, as in launch.py."""
    width = tile_width(head_dim)
    tile = forward_tile(width, mask, seq_q, dropout, dtype == "bf16")
    rows = {"q_desc": ROWS.value, "out_desc": ROWS.value, "k_desc": tile.block_n, "v_desc": tile.block_n}
    descriptors = {name: descriptor(dtype, 1, 1, n, copy_width(head_dim)) for name, n in rows.items()}
    descriptors["out_desc"] = descriptor(dtype, 1, 1, ROWS.value, rest_width(head_dim) or width)
    constants = {
        "MASK": mask,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": width,
        "REST": rest_width(head_dim),
        "CONSUMERS": tile.consumers,
        "Q_STAGES": tile.q_stages,
        "STAGES": tile.stages,
        "BLOCKS": tile.blocks,
        "DEALT": tile.dealt,
        "KEEPS_MAXIMUM": dtype == "bf16" and keeps_maximum(tile, mask, dropout),
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
    }
    return forward_kernel, descriptors, constants, registers(tile.consumers, tile.blocks)


def backward_configuration(
    head_dim: int, dtype: str, mask: str, seq_q: int, dropout: bool, sums_dq: bool = True
) -> tuple:
    """The same for the backward pass."""
    width = tile_width(head_dim)
    tile = backward_tile(width, sums_dq)
    kernel = {64: backward_64_kernel, 128: backward_128_kernel, 256: backward_256_kernel}[width]
    keys, rows_out, width_out = {64: (128, 64, 64), 128: (128, 128, 128), 256: (64, 64, 64)}[width]
    rows = {"q_desc": 64, "dout_desc": 64, "k_desc": keys, "v_desc": keys}
    descriptors = {name: descriptor(dtype, 1, 1, n, copy_width(head_dim)) for name, n in rows.items()}
    descriptors |= dict.fromkeys(("dk_desc", "dv_desc"), descriptor(dtype, 1, 1, rows_out, width_out))
    descriptors["minus_lse_desc"] = descriptor("fp32", 64, swizzle=0)
    descriptors["minus_delta_desc"] = descriptor("fp32", 64, swizzle=0)
    descriptors["sum_desc"] = descriptors["dq_desc"] = descriptor("fp32", 64, 64, swizzle=0)
    descriptors["part_desc"] = descriptor("fp32", PART.value, 64, swizzle=0)
    constants = {
        "MASK": mask,
        "STAGES": tile.stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
    }
    if width == 256:
        constants |= {"REST": rest_width(head_dim), "P_STAGES": tile.ds_stages}
    else:
        constants |= {"SUMS_DQ": sums_dq, "KV_STAGES": tile.kv_stages, "DS_STAGES": tile.ds_stages}
        constants["REDUCER_REGISTERS"] = tile.reducer_registers
    if width == 64:
        constants["DQ_STAGES"] = tile.dq_stages
    return kernel, descriptors, constants, registers(3 if sums_dq else 2)


def dkdv_configuration(head_dim: int, dtype: str, mask: str, seq_q: int, dropout: bool) -> tuple:
    """The same for the deterministic kernel of dk and dv."""
    return backward_configuration(head_dim, dtype, mask, seq_q, dropout, sums_dq=False)


def dq_configuration(head_dim: int, dtype: str, mask: str, seq_q: int, dropout: bool) -> tuple:
    """The same for the deterministic kernel of dq."""
    width = tile_width(head_dim)
    tile = dq_tile(width, mask, dropout)
    rows = {"q_desc": 64, "dout_desc": 64, "out_desc": 64, "dq_desc": 64}
    rows |= {"k_desc": tile.block_n, "v_desc": tile.block_n}
    descriptors = {name: descriptor(dtype, 1, 1, n, copy_width(head_dim)) for name, n in rows.items()}
    descriptors["dq_desc"] = descriptor(dtype, 1, 1, rows["dq_desc"], width)
    constants = {
        "MASK": mask,
        "HAS_DLSE": True,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": width,
        "REST": rest_width(head_dim),
        "CONSUMERS": tile.consumers,
        "Q_STAGES": tile.q_stages,
        "STAGES": tile.stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
    }
    return dq_kernel, descriptors, constants, registers(tile.consumers)


KERNELS = {
    "forward": forward_configuration,
    "backward": backward_configuration,
    "dkdv": dkdv_configuration,
    "dq": dq_configuration,
}


def compile_kernel(
    kernel: str, head_dim: int, dtype: str, mask: str, seq_q: int, dropout: bool = False
) -> dict:
    """What the compiled kernel uses: shared memory, spilled bytes and so on, and how many run at once."""
    function, descriptors, constants, most_registers = KERNELS[kernel](head_dim, dtype, mask, seq_q, dropout)
    constants["DROPOUT"] = dropout
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in descriptors:
            signature[name] = descriptors[name]
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in INTEGERS else "*fp32"
            if name == "seed_ptr":
                signature[name] = "*i64"
            if name == "dq_ptr":
                signature[name] = f"*{dtype}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif name.startswith("by_"):
            signature[name] = "i64"
        else:
            signature[name] = "fp32" if "scale" in name else "i32"
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(function, signature, values, attributes)
    options = {"num_warps": 4, "maxnreg": most_registers}
    used = used_by(source, GPUTarget("cuda", 90, 32), options, machine_code_of)
    return used | {"blocks": constants.get("BLOCKS", 1)}


def main(arguments: list[str]) -> None:
    everything = {"mask": MASKS, "dtype": ["bf16"], "kernel": KERNELS, "dropout": ["false"]}
    chosen = everything | {
        name: values.split(",") for name, _, values in (a.partition("=") for a in arguments)
    }
    for mask, head_dim, dtype, kernel, dropout in product(
        chosen["mask"], HEAD_DIMS, chosen["dtype"], chosen["kernel"], chosen["dropout"]
    ):
        # no sums of dq are made for wide heads
        if kernel == "backward" and head_dim > 128:
            continue
        drops = dropout == "true"
        # the forward tile depends on the number of keys
        tiles = {
            forward_tile(tile_width(head_dim), mask, n, drops, dtype == "bf16"): n for n in (256, 2048, 65536)
        }
        for seq_q in tiles.values() if kernel == "forward" else [1024]:
            name = {"triton": triton.__version__, "kernel": kernel, "head_dim": head_dim}
            name |= {"dtype": dtype, "mask": mask, "seq_q": seq_q, "dropout": drops}
            print(json.dumps(name | compile_kernel(kernel, head_dim, dtype, mask, seq_q, drops)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
