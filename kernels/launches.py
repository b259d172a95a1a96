"""Launches Triton kernels with little Python, if a launch of the same kind came before.

In every launch Triton inspects the type and the divisibility of each argument, and encodes each tensor
descriptor again. For an attention kernel this takes some 100 us of a CPU core, several times as long as
PyTorch's own operators, and with short sequences or small batches the GPU waits for it. But two launches of
one kind differ only in the addresses of their tensors. So the parameters of a known kind are kept: a launch
writes addresses into them and calls the driver.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.tools.tensor_descriptor import TensorDescriptor

# kinds that are kept, with some 10 KB for each prepared launch; when there are more, all are forgotten
MOST_KINDS = 1024
ONCE = "came once: the next one of its kind is prepared"
# addresses after a kernel's named parameters: scratch memory, which a plain launch does without
N_SCRATCH = 2
# names of number types in Triton's signatures
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
# bytes of a CUtensorMap, and the alignment of its address
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# types with one number in kernels (PTX) and another in the driver: float32 without subnormals, float64,
# bfloat16
MAP_TYPES = {8: 10, 9: 8, 10: 9}
PROMOTION_128_BYTES = 2
# a parameter in a kernel's PTX: the bits of a number, or the bytes of an array
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,)]*?(?:\[(\d+)\])?\s*[,)]")


class Descriptor(NamedTuple):
    """Blocks of a tensor for bulk copies: what Triton's TensorDescriptor, or Gluon's, checks and holds."""

    tensor: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    # Gluon's, the same object in every launch: kinds are told apart by its id. None: plain Triton chooses
    layout: Any = None

    def for_triton(self):
        enter_context(self.tensor)
        shape, strides, block = map(list, self[1:4])
        if self.layout is None:
            return TensorDescriptor(self.tensor, shape, strides, block)
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor(self.tensor, shape, strides, block, self.layout)


class Launch:
    """A prepared launch of one kind: everything but the addresses of its tensors."""

    def __init__(self, compiled, grid: tuple[int, ...], arguments: tuple):
        """compiled: what Triton has launched with these arguments.

        Raises ValueError if it is not plain, and OSError without CUDA's driver.
        """
        driver()
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
            raise ValueError("blocks that are launched together")
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise ValueError("scratch memory")
        types = list(compiled.src.signature.values())
        parameters = packed(arguments, types, iter(metadata.tensordesc_meta or ()))
        sizes = [ctypes.sizeof(parameter) for parameter in parameters]
        expected = parameter_sizes(compiled.asm["ptx"])
        if sizes != expected:
            raise ValueError(f"parameters of {expected} bytes, where Triton's signature has {sizes}")
        self.parameters = parameters
        self.addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        # for each tensor in order: the parameter its address is written to, or the address of its tensor map
        self.places = [
            ctypes.addressof(place) if isinstance(place, TensorMap) else place
            for place in parameters[:-N_SCRATCH]
            if isinstance(place, ctypes.c_uint64 | TensorMap)
        ]
        # a reference that keeps the kernel loaded
        self.compiled, self.function = compiled, compiled.function
        self.grid = (*grid, 1, 1)[:3]
        self.threads = 32 * metadata.num_warps
        self.shared_bytes = metadata.shared
        # autograd has its own threads, and the driver is called without the GIL
        self.lock = threading.Lock()

    def try_launch(self, device: int, addresses: list[int]) -> bool:
        """Launches with tensors at these addresses, on the current stream; False if the driver refuses."""
        cuda = driver()
        stream = torch._C._cuda_getCurrentRawStream(device)
        with self.lock:
            for place, address in zip(self.places, addresses, strict=True):
                if type(place) is not int:
                    place.value = address
                elif cuda.cuTensorMapReplaceAddress(place, address):
                    # an address that no tensor map can have
                    return False
            error = cuda.cuLaunchKernel(
                self.function, *self.grid, self.threads, 1, 1, self.shared_bytes, stream, self.addresses, None
            )
        return error == 0


# prepared launches by kind, or the reason why there is none
launches: dict[tuple, Launch | str] = {}


# called with what is kept of a launch's kind, or None, and with its tensors' addresses
Listener = Callable[[Launch | str | None, list[int]], None]


class Listeners(threading.local):
    of_launches: Listener | None = None


listeners = Listeners()


@contextmanager
def telling_launches(listener: Listener) -> Iterator[None]:
    """A context in which the listener is told of every launch of this thread."""
    before, listeners.of_launches = listeners.of_launches, listener
    try:
        yield
    finally:
        listeners.of_launches = before


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """kernel[grid](*arguments, **constants) on the current GPU and stream.

    arguments: tensors, Descriptors, ints and floats, each of the same type in every launch of a kernel, or
    None; constants: its constexprs, which are its last arguments, and options of the compiler. Raises what
    Triton raises. In Triton's interpreter, and on GPUs that are not NVIDIA's, a kernel runs as usual.
    """
    if not isinstance(kernel, JITFunction) or torch.version.hip is not None:
        if listeners.of_launches is not None:
            listeners.of_launches("in Triton's interpreter, or on AMD's GPU", [])
        kernel[grid](*map(for_triton, arguments), **constants)
        return
    device = torch.cuda.current_device()
    kind, addresses = kind_of(kernel, grid, arguments, constants, device)
    known = launches.get(kind)
    if listeners.of_launches is not None:
        listeners.of_launches(known, addresses)
    if isinstance(known, Launch) and not is_watched() and known.try_launch(device, addresses):
        return
    # Triton also reports what is wrong
    compiled = kernel[grid](*map(for_triton, arguments), **constants)
    if known is None:
        if len(launches) >= MOST_KINDS:
            launches.clear()
        launches[kind] = ONCE
    elif known is ONCE:
        launches[kind] = prepared(compiled, grid, arguments)


def kind_of(
    kernel, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any], device: int
) -> tuple[tuple, list[int]]:
    """Everything about a launch except its tensors' addresses, as a key to look up; and the addresses."""
    kind = [id(kernel), device, grid, *constants.values()]
    addresses = []
    for argument in arguments:
        what = type(argument)
        if what is int or what is float or argument is None:
            kind.append(argument)
        elif what is Descriptor:
            tensor, shape, strides, block, layout = argument
            addresses.append(tensor.data_ptr())
            kind += (tensor.dtype, shape, strides, block, id(layout))
        else:
            address = argument.data_ptr()
            addresses.append(address)
            # Triton compiles one kernel for addresses that 16 divides and another for all others
            kind += (argument.dtype, address % 16 == 0)
    return tuple(kind), addresses


def for_triton(argument):
    return argument.for_triton() if isinstance(argument, Descriptor) else argument


def enter_context(x: Tensor) -> None:
    """Gives this thread the context of x's GPU if it has none: a new thread has none.

    Encoding a descriptor needs a context, and Triton enters one only later, when it launches.
    """
    if not x.is_cuda:
        return
    cuda, context, device = driver(), ctypes.c_void_p(), ctypes.c_int()
    if cuda.cuCtxGetCurrent(ctypes.byref(context)) or context:
        return
    cuda.cuDeviceGet(ctypes.byref(device), x.get_device())
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)


def is_watched() -> bool:
    """Whether one of Triton's own profilers wants to be told of launches, or kernels are to be debugged."""
    if knobs.runtime.debug:
        return True
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def prepared(compiled, grid: tuple[int, ...], arguments: tuple) -> Launch | str:
    try:
        return Launch(compiled, grid, arguments)
    except (ValueError, TypeError, AttributeError, KeyError, StopIteration, OSError) as error:
        # a machine without CUDA's driver, or a Triton whose version is not among those tested
        return f"goes through Triton: {error}"


class TensorMap(ctypes.Structure):
    """The driver's form of a descriptor."""

    _fields_ = (("content", ctypes.c_char * MAP_BYTES),)


def packed(arguments: tuple, types: list, maps) -> list:
    """A kernel's parameters, scratch memory included: numbers, addresses and tensor maps.

    types: from Triton's signature, constexprs included. maps: how each descriptor copies.
    """
    parameters = []
    for argument, kind in zip(arguments, types, strict=False):
        # such as None, or an int of 1
        if kind == "constexpr":
            continue
        if isinstance(argument, Tensor):
            parameters.append(ctypes.c_uint64(argument.data_ptr()))
        elif isinstance(argument, Descriptor):
            parameters.append(encoded(argument, next(maps)))
            parameters += map(ctypes.c_int32, argument.shape)
            parameters += map(ctypes.c_int64, argument.strides)
        else:
            parameters.append(NUMBERS[kind](argument))
    return parameters + [ctypes.c_uint64(0) for _ in range(N_SCRATCH)]


def encoded(descriptor: Descriptor, how: dict[str, Any]) -> TensorMap:
    """The descriptor's tensor map. how: swizzle, elem_size, elem_type and block_size of the kernel."""
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    place = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
    # the driver has the innermost dimension first
    shape, strides, block = (
        values[::-1] for values in (descriptor.shape, descriptor.strides, how["block_size"])
    )
    rank = len(shape)
    in_bytes = [stride * how["elem_size"] for stride in strides[1:]]
    error = driver().cuTensorMapEncodeTiled(
        ctypes.addressof(place),
        MAP_TYPES.get(how["elem_type"], how["elem_type"]),
        rank,
        descriptor.tensor.data_ptr(),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * rank)(*in_bytes),
        (ctypes.c_uint32 * rank)(*block),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        how["swizzle"],
        PROMOTION_128_BYTES,
        0,
    )
    if error:
        raise ValueError(f"no tensor map, error {error} of the driver")
    return place


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    entry = ptx[ptx.index(".entry") :]
    head = entry[: entry.index(")") + 1]
    return [int(n_bytes or int(bits) // 8) for bits, n_bytes in PARAMETER.findall(head)]


@cache
def driver() -> ctypes.CDLL:
    """CUDA's driver. Each function is given its argument types: otherwise ctypes would truncate addresses."""
    cuda = ctypes.CDLL("libcuda.so.1")
    number, address = ctypes.c_uint, ctypes.c_void_p
    cuda.cuLaunchKernel.argtypes = address, *[number] * 7, address, address, address
    cuda.cuTensorMapReplaceAddress.argtypes = address, address
    cuda.cuTensorMapEncodeTiled.argtypes = (
        address, number, number, address, address, address, address, address, number, number, number, number,
    )  # fmt: skip
    return cuda
