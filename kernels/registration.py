"""Turns functions into PyTorch operators, with a gradient, and with little Python around a call.

torch.library.custom_op serves more kinds of operators, but took three times as much Python time for a forward
and a backward pass of attention, not counting the work itself. Operators exist to be seen by torch.compile,
modes, fake tensors and subclasses. Where none of these is looking, an operator's function is called directly,
which takes another third less; a profiler shows it under the name of its gradient.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import NoneType

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("nanoflash", "FRAGMENT")
# kernels read their arguments by the strides they have; Inductor must not change these
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# dispatch keys of autocast, which casts the operands of products
AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)

DEVICES = {"CPU": DispatchKey.CPU, "CUDA": DispatchKey.CUDA}
# types, besides tensors, that a function takes as they are
PYTHON = frozenset((bool, int, float, list, NoneType))
# the function of each operator, on every device
FUNCTIONS: dict[torch._ops.OpOverload, Callable] = {}


def on_its_gpu(function: Callable) -> Callable:
    """A decorator: runs a function of tensors while the GPU of the first is the current one.

    Triton launches on the current GPU, where PyTorch's own operators go to that of their arguments.
    """

    @wraps(function)
    def run(tensor, *arguments):
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return function(tensor, *arguments)
        with torch.cuda.device_of(tensor):
            return function(tensor, *arguments)

    return run


def below_autocast(function: Callable) -> Callable:
    """A decorator: turns autocast off inside a function, as it is inside PyTorch's own operators."""

    @wraps(function)
    def run(*arguments):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return function(*arguments)

    return run


def operator(fake: Callable) -> Callable[[Callable], torch._ops.OpOverload]:
    """A decorator: the function becomes nanoflash::<its name>, its annotations the schema.

    It may not change its arguments, nor return one of them, and has no defaults. fake(*arguments) makes
    empty results of the same shapes and dtypes, for torch.compile.
    """

    def register(function: Callable) -> torch._ops.OpOverload:
        name = function.__name__
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=TAGS)
        on_device = on_its_gpu(function)
        for device in DEVICES:
            LIBRARY.impl(name, on_device, device)
        torch.library.register_fake(f"nanoflash::{name}", fake, lib=LIBRARY)
        overload = getattr(torch.ops.nanoflash, name).default
        FUNCTIONS[overload] = on_device
        return overload

    return register


def differentiate(operator: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> Callable:
    """Gives an operator its gradient; returns a function that calls it, past the dispatcher if unwatched.

    As in torch.autograd.Function: setup_context(ctx, inputs, output) saves what backward(ctx, *gradients of
    the outputs) needs, which returns a gradient or None for each input.
    """

    def refuse(*_):
        raise NotImplementedError(
            f"nanoflash::{operator._opname} has no forward derivative, and no transform of torch.func (grad, "
            "vjp, jvp, vmap) reaches through it: use torch.autograd.grad for gradients, and for the others "
            "plain PyTorch (attention_reference, or fused_gelu=false)"
        )

    def with_gradient_of(run: Callable) -> Callable:
        def below_autograd(*inputs):
            with torch._C._AutoDispatchBelowAutograd():
                return run(*inputs)

        # one level deep: transforms of torch.func have levels of their own
        class Gradient(torch.autograd.function._SingleLevelFunction):
            @staticmethod
            def forward(ctx, *inputs):
                output = below_autograd(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx, *gradients):
                return backward(ctx, *gradients)

            jvp = staticmethod(refuse)

        # named in profiles, and in the graphs that debuggers print, whose nodes are of a class of their own
        Gradient.__name__ = Gradient.__qualname__ = f"GradientOf_{operator._opname}"
        Gradient._backward_cls.__name__ = f"{Gradient.__name__}Backward"

        def with_gradient(*inputs):
            # as in backward passes; forward derivatives, which no_grad leaves on, are refused by Gradient
            if not torch.is_grad_enabled() and forward_ad._current_level < 0:
                return below_autograd(*inputs)
            # otherwise PyTorch asks its user to report a bug
            if torch._C._are_functorch_transforms_active():
                refuse()
            return Gradient.apply(*inputs)

        return with_gradient

    takes_tensors = ["Tensor" in str(argument.type) for argument in operator._schema.arguments]
    plain, seen = with_gradient_of(FUNCTIONS[operator]), with_gradient_of(operator)

    def dispatched(keys, *inputs):
        return (plain if are_plain(keys.raw_repr()) else seen)(*inputs)

    def call(*inputs):
        if torch.compiler.is_compiling() or is_watched():
            return operator(*inputs)
        for x, takes_tensor in zip(inputs, takes_tensors, strict=True):
            if type(x) in PYTHON:
                continue
            # the dispatcher would turn NumPy's numbers, and tensors in place of numbers, into Python's
            if not (takes_tensor and isinstance(x, Tensor)):
                return operator(*inputs)
            if torch._C._has_torch_function_unary(x) or not are_plain(torch._C._dispatch_keys(x).raw_repr()):
                return operator(*inputs)
        return plain(*inputs)

    LIBRARY.impl(operator._opname, dispatched, "Autograd", with_keyset=True)
    LIBRARY.impl(operator._opname, refuse, "FuncTorchBatched")
    return call


def refuse_forward_derivatives(name: str, way_out: str, *tensors: Tensor) -> None:
    """Raises NotImplementedError for a tensor with a tangent, which torch.library's operators would lose."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{name} has no forward derivative: {way_out} where you need one (jvp, forward_ad.make_dual)"
        )


@cache
def are_plain(keys: int) -> bool:
    """Whether these dispatch keys lead, below autograd, straight to a kernel."""
    below = DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return below.highestPriorityTypeId() in DEVICES.values()


def is_watched() -> bool:
    """Whether a mode or a transform wants to see every operator."""
    n_modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return n_modes > 0 or torch._C._are_functorch_transforms_active()
