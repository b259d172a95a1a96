"""Triton's interpreter without its needless work, which is half of its time.

It checks each sum and product of integers for overflow, and reports that only under an option that no launch
can set. It patches the language again in each call of a device function, although the kernel's launch has
done so. And for each value it makes the value's type again, with all that follows from it, and checks it.
"""

import math
from functools import cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

make_block_type = tl.block_type.__init__
numpy_type_of = interpreter._get_np_dtype
# by the name of an element's type and the sizes
block_types: dict[tuple, dict] = {}
# by the name of an element's type
numpy_types: dict[str, np.dtype] = {}


def call(function: interpreter.InterpretedFunction, *arguments, **named):
    """A kernel's call of a device function."""
    # triton's own functions know the language by another name, under which it stays patched
    if tl.core.is_builtin(tl.core.load):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*arguments, **named)


def patch(place, name: str, member, builder, scope) -> None:
    """Patches a function of the language, without its check that a compiler calls it."""
    function = getattr(member, "__wrapped__", member)

    def in_interpreter(*arguments, **named):
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **named)

    scope.set_attr(place, name, in_interpreter)


def begin_block_type(self: tl.block_type, element: tl.dtype, shape) -> None:
    key = element.name, *(getattr(size, "value", size) for size in shape)
    if key not in block_types:
        make_block_type(self, element, shape)
        block_types[key] = self.__dict__
    # types do not change, so equal ones can share their attributes
    self.__dict__ = block_types[key]


def begin_tensor(self: tl.tensor, handle: interpreter.TensorHandle, kind: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = sizes(tuple(kind.shape) if kind.is_block() else ())


@cache
def sizes(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def numpy_type(kind: tl.dtype) -> np.dtype:
    name = kind.scalar.name
    if name not in numpy_types:
        numpy_types[name] = numpy_type_of(kind)
    return numpy_types[name]


def waste_nothing() -> None:
    """Makes the interpreter of this process use the functions above."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_attr = patch
    interpreter._get_np_dtype = numpy_type
    tl.block_type.__init__ = begin_block_type
    tl.tensor.__init__ = begin_tensor
