"""Compiles the matrix products of epilogues.py without a GPU, and prints what each uses, as JSON lines.

Run by test_epilogues.py in separate processes, since quack must know the GPU before it is imported:
    python -m tests.ahead_of_time_epilogues sm_90a
    python -m tests.ahead_of_time_epilogues sm_90a '[[128, 64, 256], [1024, 768, 3072]]'
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# compute capabilities, as quack writes them
CAPABILITIES = {"sm_90a": "90", "sm_100a": "100", "sm_120a": "120"}
# clusters of two blocks that run at a time, which only a driver could count
CLUSTERS = 66
# the number of CUDA among the machines of ELF files
CUDA = 190
# GPT-2 124M
N_ROWS, N_EMBD, WIDTH = 1024, 768, 3072


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def transposed(*shape: int) -> Tensor:
    return torch.empty_strided(shape, (1, shape[0]), device="cuda", dtype=torch.bfloat16)


def products(
    n_rows: int = N_ROWS, n_embd: int = N_EMBD, mlp_width: int = WIDTH
) -> dict[str, Callable[[], object]]:
    from kernels import epilogues

    def exponentials(n_columns: int, width: int) -> None:
        epilogues.mm_exp2_and_sum(
            tensor(n_rows, n_embd), transposed(n_embd, n_columns), tensor(n_rows, dtype=torch.float32),
            tensor(n_columns, dtype=torch.float32), tensor(n_rows, n_columns), width,
        )  # fmt: skip

    x, w1, dout, w2 = (
        tensor(n_rows, n_embd),
        transposed(n_embd, mlp_width),
        tensor(n_rows, n_embd),
        tensor(n_embd, mlp_width),
    )
    hidden, slope = tensor(n_rows, mlp_width), tensor(n_rows, mlp_width)
    return {
        "gelu": lambda: epilogues.mm_gelu(x, w1, None),
        "gelu with bias": lambda: epilogues.mm_gelu(x, w1, tensor(mlp_width)),
        "swiglu": lambda: epilogues.mm_swiglu(x, transposed(n_embd, 2 * mlp_width)),
        "swiglu's gradient": lambda: epilogues.mm_swiglu_gradient(dout, w2, tensor(n_rows, 2 * mlp_width)),
        "residual": lambda: epilogues.mm_added(hidden, w2.T, None, x),
        "residual and bias": lambda: epilogues.mm_added(hidden, w2.T, tensor(n_embd), x),
        "scaled": lambda: epilogues.mm_scaled(dout, w2, slope),
        "scaled and sum": lambda: epilogues.mm_scaled_and_sum(dout, w2, slope),
        "exponentials, 192 columns": lambda: exponentials(50304, 192),
        "exponentials, 128 columns": lambda: exponentials(32000, 128),
    }


@contextmanager
def compiling_for(architecture: str) -> Iterator[None]:
    """A context in which products are compiled for this architecture and not run."""
    os.environ.update(QUACK_ARCH=CAPABILITIES[architecture], CUTE_DSL_ARCH=architecture)
    import quack.epilogue.frontend as frontend
    import quack.gemm_runtime.host as host

    from kernels import epilogues

    host.get_max_active_clusters = lambda *arguments, **named: CLUSTERS
    frontend.run_gemm_epi_plan = lambda *arguments, **named: None
    # tensors without data have no address
    epilogues._check = lambda **matrices: None
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def compile_products(architecture: str) -> Iterator[dict]:
    with compiling_for(architecture):
        import quack.cache

        for name, product in products().items():
            if name.startswith("exponentials") and architecture != "sm_90a":
                continue
            with tempfile.TemporaryDirectory() as folder:
                quack.cache.CACHE_DIR = folder
                product()
                (compiled,) = Path(folder).rglob("*.o")
                yield {"product": name} | machine_code_of(compiled)


def count_products(architecture: str, sizes: str) -> Iterator[dict]:
    """How many kernels there are after the products of each size; sizes: rows, channels, width of the MLP."""
    with compiling_for(architecture), tempfile.TemporaryDirectory() as folder:
        import quack.cache

        quack.cache.CACHE_DIR = folder
        for size in json.loads(sizes):
            for product in products(*size).values():
                product()
            yield {"size": size, "kernels": len(list(Path(folder).rglob("*.o")))}


def machine_code_of(compiled: Path) -> dict:
    """Registers and stack bytes of a thread, and the number of instructions for Hopper's tensor cores."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin_in(compiled.read_bytes()))
        binary.flush()
        command = [tools / "cuobjdump", "-res-usage", binary.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [tools / "nvdisasm", "-ndf", "-c", binary.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(item.split(":") for line in usage.splitlines() if "REG:" in line for item in line.split())
    return {"registers": int(used["REG"]), "stack": int(used["STACK"]), "hgmma": code.count("HGMMA")}


def cubin_in(host_object: bytes) -> bytes:
    """The GPU's ELF file inside an ELF file of the host."""
    start = host_object.index(b"\x7fELF", 1)
    machine, programs, sections = (
        struct.unpack_from(kind, host_object, start + place)[0]
        for kind, place in (("<H", 18), ("<Q", 32), ("<Q", 40))
    )
    assert machine == CUDA, machine
    program_size, n_programs, section_size, n_sections = struct.unpack_from("<4H", host_object, start + 54)
    end = max(programs + program_size * n_programs, sections + section_size * n_sections)
    return host_object[start : start + end]


def main(arguments: list[str]) -> None:
    for row in (compile_products if len(arguments) == 1 else count_products)(*arguments):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
