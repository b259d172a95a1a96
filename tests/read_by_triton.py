"""Compares what Triton reads of our code when it compiles a kernel with what compile_record finds for it.

Run by test_compile_record.py in a separate process, because Triton's interpreter has no such kernels:
    python -m tests.read_by_triton
prints one JSON line for each kernel: how many definitions Triton reads, and which compile_record lacks.
"""

import gc
import json
import sys
from collections import defaultdict
from importlib import import_module

import triton
from triton.runtime import jit

from tests.compile_record import PACKAGES, ROOT, definitions_behind

# by Triton's name for a function, the functions that it calls
called: dict[str, list[jit.JITCallable]] = defaultdict(list)
hash_callee = jit.DependenciesFinder._update_hash


def note_callee(finder: jit.DependenciesFinder, function: jit.JITCallable) -> None:
    called[finder.name].append(function)
    hash_callee(finder, function)


def read_of(kernel: jit.JITFunction) -> set[tuple[str, str]]:
    """(module, name) of all functions and values of ours that go into Triton's own key of a kernel."""
    # has Triton walk through the functions that it has not yet walked through for another kernel
    _ = kernel.cache_key
    unread, functions = [kernel], set()
    while unread:
        function = unread.pop()
        if function not in functions:
            functions.add(function)
            unread += called[function._fn_name]
    # a method counts as its class
    read = {(function.__module__, function.fn.__qualname__.split(".")[0]) for function in functions}
    read |= {(scope.get("__name__", ""), name) for (name, _), (_, scope) in kernel.used_global_vals.items()}
    return {(module, name) for module, name in read if module.split(".")[0] in PACKAGES}


def kernels_of(module: str) -> list[jit.JITFunction]:
    found = [value for value in vars(import_module(module)).values() if isinstance(value, jit.JITFunction)]
    return [value for value in found if value.__module__ == module and value.__name__.endswith("kernel")]


def main(arguments: list[str]) -> None:
    jit.DependenciesFinder._update_hash = note_callee
    # what this process has compiled for other tests, Triton would not walk through again
    for function in gc.get_objects():
        if isinstance(function, jit.JITCallable):
            function.hash = None
    files = [path for path in sorted(ROOT.glob("kernels/**/*.py")) if ".jit" in path.read_text()]
    for module in (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files):
        for kernel in kernels_of(module):
            read, name = read_of(kernel), f"{module}:{kernel.__name__}"
            row = {"triton": triton.__version__, "kernel": name, "read": len(read)}
            unknown = sorted(read - definitions_behind(name).keys())
            print(json.dumps(row | {"unknown": unknown}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
