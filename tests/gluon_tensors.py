"""What a kernel computes with on a CPU, for gluon_on_cpu.py: tensors, shared memory, pointers, copies."""

import operator
from collections.abc import Callable
from copy import copy
from types import SimpleNamespace

import torch

from kernels import launches
from tests.gluon_partitions import complete, program


class Constant(int):
    value = property(int)


class RealConstant(float):
    value = property(float)


def as_tensor(x) -> torch.Tensor:
    """torch.as_tensor, which takes long for what is a tensor already."""
    x = unwrapped(x)
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


class Tensor:
    """A tensor of a kernel; or a scalar, which is a number of Python, since PyTorch takes long for one."""

    def __init__(self, x):
        self.x = x.item() if isinstance(x, torch.Tensor) and x.dim() == 0 else x

    shape = property(lambda self: list(as_tensor(self).shape))
    dtype = property(lambda self: as_tensor(self).dtype)
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype, bitcast=False):
        if isinstance(self.x, int) and dtype == torch.int32 and not bitcast and is_int32(self.x):
            return Tensor(int(self.x))
        return Tensor(as_tensor(self).view(dtype) if bitcast else as_tensor(self).to(dtype))

    def reshape(self, shape):
        return Tensor(self.x.reshape(shape))

    def permute(self, order):
        return Tensor(self.x.permute(order))

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)

    def __hash__(self):
        return id(self)


def unwrapped(x):
    return x.x if isinstance(x, Tensor) else x


def is_int32(x: int) -> bool:
    return -(2**31) <= x < 2**31


def binary(function: Callable, reflected: bool = False):
    def operate(self, other):
        a, b = self.x, unwrapped(other)
        return Tensor(function(b, a) if reflected else function(a, b))

    return operate


def quotient(a, b):
    """a / b, rounded towards 0."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(as_tensor(a), b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": quotient, "mod": lambda a, b: a - quotient(a, b) * b,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "rshift": operator.rshift, "lshift": operator.lshift,
}  # fmt: skip
for name, function in OPERATORS.items():
    setattr(Tensor, f"__{name}__", binary(function))
    setattr(Tensor, f"__r{name}__", binary(function, reflected=True))
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{name}__", binary(getattr(operator, name)))
Tensor.__neg__ = lambda self: Tensor(-self.x)
Tensor.__invert__ = lambda self: Tensor(not self.x if isinstance(self.x, bool) else ~self.x)


class Product(Tensor):
    """The result of an asynchronous product: no numbers before it is waited for."""

    def __init__(self, compute: Callable[[], torch.Tensor], shape: list[int]):
        self.compute, self.size, self.result = compute, shape, None

    @property
    def x(self):
        assert self.result is not None, "a product is used before it is waited for"
        return self.result

    shape = property(lambda self: self.size)

    def settle(self) -> None:
        self.result = self.compute()


def product(a, b, acc, use_acc=True, precision=None, is_async=False) -> Product:
    assert is_async

    def compute():
        result = unwrapped(a).float() @ unwrapped(b).float()
        return result + unwrapped(acc) if use_acc else result

    pending = Product(compute, [a.shape[0], b.shape[1]])
    program.partitions.own.products.append(pending.settle)
    return pending


def wait_for_products(n_left=0, deps=()):
    complete(program.partitions.own.products, n_left)
    settled = [Tensor(x.x) for x in deps]
    return settled[0] if len(settled) == 1 else tuple(settled)


class Memory(Tensor):
    """A view of shared memory."""

    # not as a Tensor: what is stored into a view of a single element must reach the memory
    def __init__(self, x: torch.Tensor):
        self.x = x

    def index(self, i):
        return Memory(self.x[int(i)])

    def reshape(self, shape):
        return Memory(self.x.view(list(shape)))

    def slice(self, start, length, dim=0):
        return Memory(self.x.narrow(dim, int(start), length))

    def permute(self, order):
        return Memory(self.x.permute(order))

    def load(self, layout=None):
        return Tensor(self.x.clone())

    def store(self, x):
        assert list(self.x.shape) == list(x.shape)
        self.x.copy_(x.x)

    def _reinterpret(self, dtype, shape, layout):
        return Memory(self.x.view(-1).view(dtype).view(shape))


class Block:
    """The tensor descriptor of a bulk copy."""

    def __init__(self, descriptor: launches.Descriptor):
        self.x = torch.as_strided(
            descriptor.tensor.detach(), descriptor.shape, descriptor.strides,
            descriptor.tensor.storage_offset(),
        )  # fmt: skip
        self.dtype, self.layout = self.x.dtype, descriptor.layout
        shape = list(descriptor.block)
        self.block_type = SimpleNamespace(shape=shape, nbytes=torch.Size(shape).numel() * self.x.itemsize)

    def places(self, coordinates):
        """For each dimension the elements of the tensor, and those of the block, that both have."""
        sizes = zip(map(int, coordinates), self.block_type.shape, self.x.shape, strict=True)
        ranges = [(c, max(c, 0), min(c + size, whole)) for c, size, whole in sizes]
        if any(begin >= end for _, begin, end in ranges):
            return None
        return tuple(slice(b, e) for _, b, e in ranges), tuple(slice(b - c, e - c) for c, b, e in ranges)


def copy_in(desc, coordinates, barrier, memory):
    block = torch.zeros(desc.block_type.shape, dtype=desc.dtype)
    if places := desc.places(coordinates):
        block[places[1]] = desc.x[places[0]]

    def arrive():
        memory.x.copy_(block.view(memory.x.shape))
        barrier.receive(desc.block_type.nbytes)

    program.partitions.arrive(arrive)


def copy_out(desc, coordinates, memory, adds=False):
    """A copy to global memory, or with `adds` reduce_add_to_global of kernels/hopper/primitives.py."""

    def write():
        if places := desc.places(coordinates):
            x = memory.x.view(desc.block_type.shape)[places[1]]
            desc.x[places[0]] = desc.x[places[0]] + x if adds else x

    coordinates = [int(c) for c in coordinates]
    program.partitions.own.copies.append(write)


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, tensor: torch.Tensor):
        # all of the memory that the tensor is a part of
        n_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.memory = torch.as_strided(tensor, (n_elements,), (1,), 0)
        self.offsets = tensor.storage_offset()

    def __add__(self, offsets):
        moved = copy(self)
        moved.offsets = self.offsets + unwrapped(offsets)
        return moved

    def is_one(self, mask) -> bool:
        """Whether this is a single address that is wanted."""
        return isinstance(self.offsets, int) and unwrapped(mask) is True

    def choose(self, mask):
        offsets, mask = torch.broadcast_tensors(as_tensor(self.offsets), as_tensor(mask))
        inside = offsets[mask]
        if inside.numel():
            self.check(inside.min(), inside.max())
        return offsets, mask

    def check(self, first, last) -> None:
        assert 0 <= first <= last < self.memory.numel(), "outside"


def load(pointer, mask=True, other=0):
    if pointer.is_one(mask):
        pointer.check(pointer.offsets, pointer.offsets)
        return Tensor(pointer.memory[pointer.offsets])
    offsets, mask = pointer.choose(mask)
    found = torch.zeros(offsets.shape, dtype=pointer.memory.dtype) + unwrapped(other)
    found[mask] = pointer.memory[offsets[mask]]
    return Tensor(found.to(pointer.memory.dtype))


def store(pointer, x, mask=True):
    offsets, mask = pointer.choose(mask)
    x = as_tensor(x).to(pointer.memory.dtype).expand(offsets.shape)
    pointer.memory[offsets[mask]] = x[mask]


def add_atomically(pointer, x, sem=None):
    before = load(pointer)
    store(pointer, before + x)
    return before
