"""Makes PyTorch operators of functions, with a gradient, and with little Python around a call.

torch.library.custom_op serves more kinds of operators, but a forward and a backward pass of attention took
three times as long through it, in Python, without the work itself.
"""

from collections.abc import Callable
from functools import wraps

import torch

LIBRARY = torch.library.Library("nanoflash", "FRAGMENT")
# kernels read what they are given by its strides; Inductor must not have other ones for it
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def on_its_gpu(function: Callable) -> Callable:
    """A decorator: runs a function of tensors while the GPU of the first is the current one.

    Triton launches on the current GPU, where PyTorch's own operators go to that of their arguments.
    """

    @wraps(function)
    def run(tensor, *arguments):
        with torch.cuda.device_of(tensor):
            return function(tensor, *arguments)

    return run


def operator(fake: Callable) -> Callable[[Callable], torch._ops.OpOverload]:
    """A decorator: the function becomes nanoflash::<its name>, its annotations the schema.

    It may not change its arguments, nor return one of them, and has no defaults. fake(*arguments) makes
    empty results of the same shapes and dtypes, for torch.compile.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        name = function.__name__
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=TAGS)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, on_its_gpu(function), device)
        torch.library.register_fake(f"nanoflash::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.nanoflash, name).default

    return register


def differentiate(operator: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> None:
    """Gives an operator its gradient.

    As in torch.autograd.Function: setup_context(ctx, inputs, output) saves what backward(ctx, *gradients of
    the outputs) needs, which returns a gradient or None for each input.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            # the operator itself, not this
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*inputs)
            setup_context(ctx, inputs, output)
            return output

    Gradient.backward = staticmethod(backward)
    # named in the graphs that debuggers print
    Gradient.__name__ = Gradient.__qualname__ = f"GradientOf_{operator._opname}"

    def with_gradient(*inputs):
        return Gradient.apply(*inputs)

    LIBRARY.impl(operator._opname, with_gradient, "Autograd")
