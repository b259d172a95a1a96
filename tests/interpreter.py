"""Triton's interpreter without the half of its work that has no effect.

It computes of each sum and product of integers whether it overflows, and reports that under an option which
no launch can set. And it patches the language anew in each call of a device function, although the kernel's
launch has done so.
"""

import triton.language as tl
from triton.runtime import interpreter


def call(function: interpreter.InterpretedFunction, *arguments, **named):
    """A kernel calls a device function."""
    # triton's own functions know the language by another name: under that one it stays patched
    if tl.core.is_builtin(tl.core.load):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*arguments, **named)


def waste_nothing() -> None:
    """Changes the interpreter of this process."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call
