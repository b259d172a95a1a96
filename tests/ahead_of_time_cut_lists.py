"""Compiles the kernel that cuts the lists of block masks without a GPU, and prints what it uses, in JSON.

Run by test_cut_lists.py in a separate process, because the other tests run Triton's interpreter:
    python -m tests.ahead_of_time_cut_lists
"""

import json
import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.hopper.cut_lists import CHUNK, cut_kernel
from tests.assembler import used_by


def compile_kernel(mask: str, of_queries: bool) -> dict:
    constants = {"MASK": mask, "OF_QUERIES": of_queries, "BLOCK": 128, "CHUNK": CHUNK}
    names = cut_kernel.arg_names
    kinds = {name: "constexpr" if name in constants else "i32" for name in names}
    pointers = [name for name in names if name.endswith("_ptr")]
    signature = kinds | dict.fromkeys(pointers, "*i32")
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(cut_kernel, signature, values, attributes)
    return used_by(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})


def main(arguments: list[str]) -> None:
    for mask, of_queries in product(("causal", "window", "intervals"), (True, False)):
        row = {"triton": triton.__version__, "mask": mask, "of_queries": of_queries}
        print(json.dumps(row | compile_kernel(mask, of_queries)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
