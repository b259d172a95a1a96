"""What the driver is given by a launch that lies ready, beside what Triton is given for the same.

Run by test_launches.py in a process of its own, because Triton's interpreter cannot run Gluon:
    python -m tests.launched pass=forward
prints one JSON line a kernel. Without a GPU: Triton compiles as ever, but the driver only listens.
"""

import ctypes
import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels import hopper, launches, operators
from kernels.hopper import launch
from kernels.launches import Descriptor
from kernels.operators import use_implementation
from kernels.problem import Problem


class Cuda:
    """CUDA's driver: keeps the last launch, and of a tensor map the address alone."""

    launched = None

    def cuTensorMapEncodeTiled(self, *_):  # noqa: N802, CUDA's name
        return 0

    def cuTensorMapReplaceAddress(self, place, address):  # noqa: N802
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def cuLaunchKernel(self, function, *others):  # noqa: N802
        *grid, threads, _, _, shared, _, _, _ = others
        self.launched = function, grid, threads, shared
        return 0


class Launcher:
    """Triton's: keeps the last launch and its parameters."""

    launched = parameters = None

    def __init__(self, source, metadata):
        self.types = source.signature

    def __call__(self, *given):
        grid, (function, packed), bound = given[:3], given[4:6], given[9:]
        Launcher.launched = function, list(grid), 32 * packed[0], packed[2]
        Launcher.parameters = [*flat(bound, self.types.values()), 0, 0]


def triton_driver():
    """An H100 for Triton, which gives each kernel a number of its own."""
    numbers = iter(range(1, 1000))
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, next(numbers), 100, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )


def flat(bound: tuple, types) -> list:
    """A kernel's parameters, by Triton's signature."""
    parameters = []
    for value, kind in zip(bound, types, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(value, Tensor):
            parameters.append(value.data_ptr())
        elif kind.startswith("tensordesc"):
            parameters += (value.base.data_ptr(), *value.shape, *value.strides)
        else:
            parameters.append(ctypes.c_float(value).value if kind == "fp32" else value)
    return parameters


def read(parameters: list) -> list:
    """The same, of a launch that lies ready."""
    return [
        ctypes.c_uint64.from_buffer(place).value if isinstance(place, launches.TensorMap) else place.value
        for place in parameters
    ]


def elsewhere(argument):
    """The argument, at another address."""
    if isinstance(argument, Descriptor):
        return argument._replace(tensor=argument.tensor.clone())
    return argument.clone() if isinstance(argument, Tensor) else argument


def compared(cuda: Cuda, rows: list[dict]):
    """A stand-in for `launch`: with the tensors it gets until a launch lies ready, then with others."""

    def compare(kernel, grid, *arguments, **constants) -> None:
        for _ in range(2):
            launches.launch(kernel, grid, *arguments, **constants)
        [ready] = launches.launches.values()
        launches.launches.clear()
        assert isinstance(ready, launches.Launch), ready
        others = tuple(map(elsewhere, arguments))
        _, addresses = launches.kind_of(kernel, grid, others, constants, 0)
        assert ready.begins(0, addresses)
        kernel[grid](*map(launches.for_triton, others), **constants)
        row = {"kernel": kernel.__name__, "n_parameters": len(ready.parameters)}
        row["same_launch"] = cuda.launched == Launcher.launched
        row["same_parameters"] = read(ready.parameters) == Launcher.parameters
        rows.append(row)

    return compare


def main(arguments: list[str]) -> None:
    passes = [a.removeprefix("pass=") for a in arguments]
    cuda, rows = Cuda(), []
    q, k, dout, out = (torch.zeros(2, 1000, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.zeros(2, 4, 1000)
    problem = Problem(softmax_scale=0.1, causal=True)
    launches.launches.clear()
    with (
        patch.object(driver, "_active", triton_driver()),
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch._C._cuda_getCurrentRawStream", lambda device: 0, create=True),
        patch.object(launches, "driver", lambda: cuda),
        patch.object(launch, "multiprocessors", lambda device: 132),
        patch.object(launch, "memory_bandwidth", lambda device: 4917),
        patch.object(launch, "launch", compared(cuda, rows)),
    ):
        # k is v: one tensor in two places, and in others two
        if "forward" in passes:
            launch.attention_forward(problem, q, k, k)
        if "backward" in passes:
            launch.attention_backward(problem, dout, None, q, k, k, out, lse)
        if "scale_of_one" in passes:
            # past the dispatcher, which would make a float of it
            with patch.object(hopper, "is_hopper", lambda device: True), use_implementation("hopper"):
                options = None, None, None, [], 1, True, None, 0.0, True, None
                operators.backward(dout, None, q, k, k, out, lse, *options)
    for row in rows:
        print(json.dumps({"triton": triton.__version__} | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
