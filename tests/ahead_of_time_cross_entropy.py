"""Compiles the Hopper kernel of the loss without a GPU and prints what it uses, as one JSON line.

Run by test_cross_entropy.py in a separate process, because Triton's interpreter cannot run Gluon:
    python -m tests.ahead_of_time_cross_entropy
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.cross_entropy_hopper import BLOCK, NUM_WARPS, cross_entropy_kernel
from tests.assembler import machine_code_of, used_by

# GPT-2's vocabulary, padded
N_COLUMNS = 50304


def compile_kernel() -> dict:
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    constants = {"N_BLOCKS": triton.cdiv(N_COLUMNS, BLOCK), "BLOCK": BLOCK, "WITH_GRADIENT": True}
    names = cross_entropy_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in (*types, "n_columns")}
    source = GluonASTSource(cross_entropy_kernel, signature, values, attributes)
    used = used_by(source, GPUTarget("cuda", 90, 32), {"num_warps": NUM_WARPS}, machine_code_of)
    return {"triton": triton.__version__} | used


def main(arguments: list[str]) -> None:
    print(json.dumps(compile_kernel()))


if __name__ == "__main__":
    main(sys.argv[1:])
