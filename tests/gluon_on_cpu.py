"""Runs the Hopper kernels on a CPU: Gluon as plain Python on PyTorch's tensors, each partition a coroutine.

Triton's interpreter cannot run Gluon. Here kernels/hopper is imported a second time, with Gluon replaced by
modules made here, and its launch.py calls the kernels, program by program. What the timing of a GPU may bring
about is brought about here:

- Partitions take turns at random. If all of them wait, that is a deadlock, and an error.
- A copy into shared memory is made when it is issued, and changes what is still read then; or at random
  later, and what does not wait for it reads what was there before.
- A product is computed, and a copy to global memory made, when it is waited for, as late as possible: what a
  buffer held that was released before is lost. What is used before it is waited for, or never waited for, is
  an error.
- Fresh shared memory holds NaN.

Layouts, registers, warps, fences and the width of integers have no counterpart, and of inline assembly only
what gluon_assembly.py knows. Programs run one after the other: those that wait for each other, as in sums.py,
only run on a GPU.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import torch
import triton.experimental.gluon
import triton.language.core

import kernels.hopper
from kernels import launches
from kernels.dropout import WORD
from tests.gluon_assembly import assembly
from tests.gluon_partitions import Barriers, Partitions, complete, init_barrier, program, wait_barrier
from tests.gluon_tensors import (
    Block,
    Constant,
    Memory,
    Pointer,
    RealConstant,
    Tensor,
    add_atomically,
    as_tensor,
    copy_in,
    copy_out,
    load,
    product,
    store,
    unwrapped,
    wait_for_products,
)

GLUON = "triton.experimental.gluon"


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(shape[0])
    return Memory(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


def elementwise(function: Callable):
    return lambda *xs: Tensor(function(*map(as_tensor, xs)))


def where(condition, a, b):
    condition, a, b = map(unwrapped, (condition, a, b))
    if isinstance(condition, torch.Tensor):
        return Tensor(torch.where(condition, a, b))
    return Tensor(a if condition else b)


def broadcast_pair(function: Callable, of_integers: Callable):
    def compute(a, b):
        a, b = unwrapped(a), unwrapped(b)
        if isinstance(a, int) and isinstance(b, int):
            return Tensor(of_integers(a, b))
        a, b = as_tensor(a), as_tensor(b)
        if a.is_floating_point() != b.is_floating_point():
            a, b = a.float(), b.float()
        return Tensor(function(a, b))

    return compute


def high_product(a, b):
    """The upper 32 bits of a product of two unsigned words."""
    a, b = map(unwrapped, (a, b))
    if not (isinstance(a, int) and isinstance(b, int)):
        a, b = as_tensor(a).long(), as_tensor(b).long()
    return Tensor((a & WORD) * (b & WORD) >> 32)


def full(shape, x, dtype, layout=None):
    x = unwrapped(x)
    # words without a sign are beyond int32, and wrap around
    return Tensor(torch.full(shape, x, dtype=torch.int64 if isinstance(x, int) else dtype).to(dtype))


def language() -> ModuleType:
    """Gluon's language."""
    gl = ModuleType(f"{GLUON}.language")
    for dtype in ("int16", "int32", "int64", "bfloat16", "float16", "float32"):
        setattr(gl, dtype, getattr(torch, dtype))
    gl.constexpr = lambda x: {int: Constant, float: RealConstant}.get(type(x), lambda x: x)(x)
    gl.tensor, gl.shared_memory_descriptor = Tensor, Memory
    for layout in ("NVMMADistributed", "NVMMAShared", "Slice", "DotOperand", "Blocked", "SwizzledShared",
                   "DistributedLinear"):  # fmt: skip
        setattr(gl, f"{layout}Layout", lambda *arguments, **options: None)
    gl.static_range, gl.cdiv = range, lambda a, b: (a + b - 1) // b
    gl.barrier = lambda: None
    gl.program_id = lambda axis: Tensor(program.id)
    gl.num_programs = lambda axis: Tensor(program.count)
    gl.to_tensor = lambda x: x if isinstance(x, Tensor) else Tensor(x)
    gl.arange = lambda begin, end, layout=None: Tensor(torch.arange(begin, end))
    gl.full = full
    gl.reshape = lambda x, shape: x.reshape(shape)
    gl.permute = lambda x, order: x.permute(order)
    gl.convert_layout = lambda x, layout: x
    gl.expand_dims = lambda x, dim: Tensor(x.x.unsqueeze(dim))
    gl.broadcast = lambda a, b: tuple(map(Tensor, torch.broadcast_tensors(a.x, b.x)))
    gl.split = lambda x: tuple(map(Tensor, x.x.unbind(-1)))
    gl.join = lambda a, b: Tensor(torch.stack((a.x, b.x), -1))
    gl.sum = lambda x, axis: Tensor(x.x.sum(axis))
    gl.max = lambda x, axis: Tensor(x.x.amax(axis))
    gl.where = where
    gl.maximum, gl.minimum = broadcast_pair(torch.maximum, max), broadcast_pair(torch.minimum, min)
    gl.exp2, gl.log2, gl.floor = map(elementwise, (torch.exp2, torch.log2, torch.floor))
    gl.umulhi = high_product
    gl.load, gl.store, gl.atomic_add = load, store, add_atomically
    gl.inline_asm_elementwise = assembly
    gl.allocate_shared_memory = allocate
    gl.warp_specialize = lambda parts, n_warps, n_registers: program.partitions.run(parts)

    def static_assert(condition):
        assert condition

    gl.static_assert = static_assert
    return gl


def modules() -> dict[str, ModuleType]:
    """What kernels/hopper imports of Gluon."""
    gl, gluon, core = language(), ModuleType(GLUON), ModuleType(f"{GLUON}.language._core")
    nvidia, hopper = ModuleType(f"{GLUON}.language.nvidia"), ModuleType(f"{GLUON}.language.nvidia.hopper")
    gluon.language, nvidia.hopper = gl, hopper
    gluon.jit = lambda function=None, **options: function or (lambda function: function)
    gluon.constexpr_function = lambda function: function
    core.builtin = lambda function: {"reduce_add_to_global": partial(copy_out, adds=True)}[function.__name__]
    hopper.fence_async_shared = lambda: None
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=init_barrier,
        wait=wait_barrier,
        arrive=lambda barrier, count=1: barrier.arrive(count),
        expect=lambda barrier, n_bytes: barrier.arrive(1, n_bytes),
    )
    hopper.tma = SimpleNamespace(
        async_copy_global_to_shared=copy_in,
        async_copy_shared_to_global=copy_out,
        store_wait=lambda n_left: complete(program.partitions.own.copies, n_left),
    )
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = product, wait_for_products
    return {module.__name__: module for module in (gl, gluon, core, nvidia, hopper)}


def argument(x):
    if isinstance(x, launches.Descriptor):
        return Block(x)
    return Pointer(x.detach()) if isinstance(x, torch.Tensor) else Tensor(x)


def launch_on_cpu(seed: int) -> Callable:
    def launch(kernel, grid, *arguments, **constants):
        if not isinstance(kernel, type(launch)):
            # plain Triton, which the interpreter runs
            launches.launch(kernel, grid, *arguments, **constants)
            return
        for option in ("num_warps", "maxnreg"):
            constants.pop(option)
        arguments = [argument(x) for x in arguments]
        program.count = grid[0]
        for program.id in range(grid[0]):
            program.named.clear()
            program.partitions = Partitions(seed + program.id)
            kernel(*arguments, **constants)

    return launch


@cache
def second_launch() -> ModuleType:
    """kernels.hopper.launch of a second import, whose kernels are plain Python."""
    ours = [name for name in sys.modules if name == "kernels.hopper" or name.startswith("kernels.hopper.")]
    replaced = modules()
    kept = {name: sys.modules.pop(name) for name in [*ours, *replaced] if name in sys.modules}
    package, aggregate, gluon = kernels.hopper, triton.language.core._aggregate, triton.experimental.gluon
    try:
        sys.modules.update(replaced)
        triton.language.core._aggregate, triton.experimental.gluon = lambda cls: cls, replaced[GLUON]
        launch = importlib.import_module("kernels.hopper.launch")
    finally:
        triton.language.core._aggregate, triton.experimental.gluon = aggregate, gluon
        for name in [name for name in sys.modules if name.startswith("kernels.hopper") or name in replaced]:
            del sys.modules[name]
        sys.modules.update(kept)
        kernels.hopper = package
    return launch


def hopper_on_cpu(n_multiprocessors: int = 3, seed: int = 0) -> ModuleType:
    """kernels.hopper.launch, whose kernels run on a CPU that passes for so many multiprocessors.

    It is the same module each time, of the last call's numbers.
    """
    launch = second_launch()
    launch.launch = launch_on_cpu(seed)
    launch.multiprocessors = lambda device: n_multiprocessors
    launch.memory_bandwidth = lambda device: 4917.0
    return launch
