"""Compares what a prepared launch gives the driver with what Triton gives it for the same launch.

Run by test_launches.py in a separate process, because Triton's interpreter cannot run Gluon:
    python -m tests.launched pass=forward
prints one JSON line per kernel. It needs no GPU: Triton compiles as usual, but the driver only records.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime import driver

from kernels import block_masks, hopper, launches, operators, portable
from kernels.hopper import cut_lists, launch
from kernels.launches import Descriptor
from kernels.operators import use_implementation
from kernels.problem import Problem
from kernels.tiles import find_tile


class TensorMap(NamedTuple):
    """What the driver makes a tensor map from, innermost dimension first."""

    address: int
    dtype: int
    sizes: list[int]
    # in bytes, for all dimensions but the innermost
    strides: list[int]
    box: list[int]
    steps: list[int]
    interleave: int
    swizzle: int
    promotion: int
    fill: int


class Cuda:
    """Stands in for CUDA's driver: keeps the last launch and, by place, what made each tensor map."""

    launched = None

    def __init__(self):
        self.maps: dict[int, TensorMap] = {}

    def cuTensorMapEncodeTiled(  # noqa: N802, CUDA's name
        self, place, dtype, rank, address, sizes, strides, box, steps, *others
    ):
        ranks = rank, rank - 1, rank, rank
        given = zip((sizes, strides, box, steps), ranks, strict=True)
        lists = (list(numbers)[:length] for numbers, length in given)
        self.maps[place] = TensorMap(address, dtype, *lists, *others)
        return 0

    def cuTensorMapReplaceAddress(self, place, address):  # noqa: N802
        self.maps[place] = self.maps[place]._replace(address=address)
        return 0

    def cuLaunchKernel(self, function, *others):  # noqa: N802
        *grid, threads, _, _, shared, _, _, _ = others
        self.launched = function, grid, threads, shared
        return 0


class Launcher:
    """Stands in for Triton's launcher: keeps the last launch and its parameters."""

    launched = parameters = None

    def __init__(self, source, metadata):
        self.types, self.maps = source.signature, metadata.tensordesc_meta

    def __call__(self, *given):
        grid, (function, packed), bound = given[:3], given[4:6], given[9:]
        Launcher.launched = function, list(grid), 32 * packed[0], packed[2]
        Launcher.parameters = [*flat(bound, self.types.values(), iter(self.maps or ())), 0, 0]


def triton_driver():
    """A driver that shows Triton an H100, and gives each kernel a different number."""
    numbers = iter(range(1, 1000))
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, next(numbers), 100, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
        fill_tma_descriptor_tiled=filled,
        # its name in Triton 3.6
        fill_tma_descriptor=filled,
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )


def filled(address, swizzle, element_bytes, dtype, box, sizes, strides, fill) -> TensorMap:
    """What Triton's driver.c gives CUDA's driver for these arguments."""
    in_bytes = [element_bytes * stride for stride in strides[-2::-1]]
    # 0: not interleaved; 2: cached by 128 bytes
    return TensorMap(
        address, dtype, sizes[::-1], in_bytes, box[::-1], [1] * len(sizes), 0, swizzle, 2, fill
    )  # fmt: skip


def flat(bound: tuple, types, maps) -> list:
    """A kernel's parameters, by Triton's signature; maps: how each descriptor copies."""
    parameters = []
    for value, kind in zip(bound, types, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(value, Tensor):
            parameters.append(value.data_ptr())
        elif kind.startswith("tensordesc"):
            parameters += make_tensordesc_arg(value, next(maps))
        else:
            parameters.append(ctypes.c_float(value).value if kind == "fp32" else value)
    return parameters


def read(cuda: Cuda, parameters: list) -> list:
    """The same for a prepared launch."""
    return [
        cuda.maps[ctypes.addressof(place)] if isinstance(place, launches.TensorMap) else place.value
        for place in parameters
    ]


def hopper_tile(kernel, head_dim, dtype, device, variant="", block_size=0):
    """tiles.choose_tile on an H100."""
    return find_tile("sm_90", kernel, head_dim, dtype.itemsize, variant).within(block_size)


def elsewhere(argument):
    """The argument, at another address."""
    if isinstance(argument, Descriptor):
        return argument._replace(tensor=argument.tensor.clone())
    return argument.clone() if isinstance(argument, Tensor) else argument


def compared(cuda: Cuda, rows: list[dict]):
    """A stand-in for `launch`: launches with its tensors until a launch is prepared, then with others."""

    def compare(kernel, grid, *arguments, **constants) -> None:
        for _ in range(2):
            launches.launch(kernel, grid, *arguments, **constants)
        [ready] = launches.launches.values()
        launches.launches.clear()
        assert isinstance(ready, launches.Launch), ready
        others = tuple(map(elsewhere, arguments))
        _, addresses = launches.kind_of(kernel, grid, others, constants, 0)
        assert ready.try_launch(0, addresses)
        kernel[grid](*map(launches.for_triton, others), **constants)
        n_maps = sum(isinstance(place, launches.TensorMap) for place in ready.parameters)
        row = {"kernel": kernel.__name__, "n_parameters": len(ready.parameters), "n_maps": n_maps}
        row["same_launch"] = cuda.launched == Launcher.launched
        row["same_parameters"] = read(cuda, ready.parameters) == Launcher.parameters
        rows.append(row)

    return compare


def launch_all(passes: list[str]) -> None:
    """Launches all kernels of these passes, on tensors of zeros."""
    q, k, dout, out = (torch.zeros(2, 1000, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.zeros(2, 4, 1000)
    plain = {"softmax_scale": 0.1, "causal": True}
    # k is also v: two arguments are one tensor when the launch is prepared, and two when it is compared
    if "forward" in passes:
        launch.attention_forward(Problem(**plain), q, k, k)
    if "backward" in passes:
        launch.attention_backward(Problem(**plain), dout, None, q, k, k, out, lse)
    if "scale_of_one" in passes:
        # past the dispatcher, which would turn the scale into a float
        options = None, None, None, [], 1, True, None, 0.0, True, None
        operators.backward(dout, None, q, k, k, out, lse, *options)
    if "heads_of_128" in passes:
        # every two heads of queries share keys
        wide_q, wide_k = (torch.zeros(2, 1000, n, 128, dtype=torch.float16) for n in (4, 2))
        problem, dlse = Problem(softmax_scale=0.1, causal=False), torch.zeros_like(lse)
        launch.attention_backward(problem, wide_q.clone(), dlse, wide_q, wide_k, wide_k, wide_q.clone(), lse)
    if "heads_of_256" in passes:
        wide = torch.zeros(2, 1000, 4, 256, dtype=torch.bfloat16)
        launch.attention_backward(Problem(**plain), wide, None, wide, wide, wide, wide, lse)
    blocks = tuple(block_masks.strided(1000, 2, block_size=128).tensors())
    if "cut_lists" in passes:
        problem = Problem(**plain, window=300, blocks=blocks)
        launch.attention_forward(problem, q, k, k)
        launch.attention_backward(problem, dout, None, q, k, k, out, lse)
    seed = torch.zeros(1, dtype=torch.int64)
    if "dropout" in passes:
        launch.attention_forward(Problem(**plain, dropout_p=0.1, dropout_seed=seed), q, k, k)
    if "portable" in passes:
        portable.attention_forward(Problem(**plain), q, k, k)
        portable.attention_backward(Problem(**plain), dout, None, q, k, k, out, lse)
    if "portable_float32" in passes:
        problem = Problem(**plain, window=300, blocks=blocks, dropout_p=0.1, dropout_seed=seed)
        q, k, dout, out = (x.float() for x in (q, k, dout, out))
        portable.attention_forward(problem, q, k[:, :, :2], k[:, :, :2])
        portable.attention_backward(problem, dout, lse, q, k[:, :, :2], k[:, :, :2], out, lse)


@contextmanager
def recording_gpu(cuda: Cuda) -> Iterator[None]:
    """A context in which kernels for an H100 take tensors on the CPU, and `cuda` is the driver."""
    with (
        patch.object(driver, "_active", triton_driver()),
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch._C._cuda_getCurrentRawStream", lambda device: 0, create=True),
        patch.object(launches, "driver", lambda: cuda),
        patch.object(launch, "multiprocessors", lambda device: 132),
        patch.object(launch, "memory_bandwidth", lambda device: 4917),
        patch("kernels.portable.forward.choose_tile", hopper_tile),
        patch("kernels.portable.backward.choose_tile", hopper_tile),
        patch.object(hopper, "is_hopper", lambda device: True),
    ):
        yield


def main(arguments: list[str]) -> None:
    cuda, rows = Cuda(), []
    launches.launches.clear()
    compare = compared(cuda, rows)
    with (
        recording_gpu(cuda),
        patch.object(launch, "launch", compare),
        patch.object(cut_lists, "launch", compare),
        patch("kernels.portable.forward.launch", compare),
        patch("kernels.portable.backward.launch", compare),
        use_implementation("hopper"),
        # the assembler may print something
        redirect_stdout(sys.stderr),
    ):
        launch_all([a.removeprefix("pass=") for a in arguments])
    for row in rows:
        print(json.dumps({"triton": triton.__version__} | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
