"""Repeats whole calls of an operator with little Python, if calls of the same kind came before.

Which kernels run, on how many blocks, through which descriptors and beside which buffers follows from shapes,
layouts and options, but to find it out takes Python longer than a short sequence takes the GPU. So what a
call allocates and launches is noted once, and a later call of its kind allocates the same and launches the
same kernels with its own addresses. CUDA graphs do so for whole models, but at fixed addresses.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.launches import ONCE, Launch, is_watched, listeners, telling_launches

# kinds that are kept, with some 20 KB for each; when there are more, all are forgotten
MOST_KINDS = 1024
# why a kind has no recipe yet. Noting takes longer than a call: not worth it for what comes twice
CAME_ONCE = "came once"
# tried in every call: what is in the way now, such as an address inside two tensors, may not be in the next
NOT_YET = "not noted yet"
aten = torch.ops.aten
# PyTorch's operators that only allocate, and functions that repeat them
EMPTY = aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default
ALLOCATIONS = dict.fromkeys(EMPTY, torch.empty) | {aten.zeros.default: torch.zeros}


class Place(NamedTuple):
    """An address that a kernel is given: so many bytes behind the beginning of one of a call's tensors."""

    tensor: int
    offset: int


class Recipe:
    """What a call of one kind allocates, launches and returns."""

    def __init__(self, note: "Note", given: list[Tensor], results: tuple[Tensor, ...] | Tensor):
        """note: of a call on the tensors `given`. Raises ValueError if the call cannot be repeated."""
        if note.obstacle:
            raise ValueError(note.obstacle)
        # such a kernel may mean a part of one tensor or the whole of another
        if any(x.data_ptr() in note.parts for x in given):
            raise ValueError(NOT_YET)
        made = [tensor for _, tensor in note.allocated]
        if not all(tensor.is_contiguous() for tensor in made):
            raise ValueError("it allocates what is not contiguous")
        self.allocations = [
            partial(allocate, x.shape, dtype=x.dtype, device=x.device) for allocate, x in note.allocated
        ]
        # a call's tensors have numbers: first those it is given, then those it allocates
        tensors = given + made
        self.launches = [
            (launch, [place_of(address, tensors) for address in addresses])
            for launch, addresses in note.launched
        ]
        self.returns_one = isinstance(results, Tensor)
        self.results = [len(given) + number_of(x, made) for x in listed(results)]
        handed = {place.tensor for _, places in self.launches for place in places}
        if not handed.issuperset(self.results):
            raise ValueError("it returns what no noted kernel is given")

    def repeat(self, device: int, given: list[Tensor]) -> tuple[Tensor, ...] | Tensor | None:
        """The results for these tensors, on the current stream; None if the driver refuses."""
        tensors = given + [allocate() for allocate in self.allocations]
        starts = [x.data_ptr() for x in tensors]
        for launch, places in self.launches:
            if not launch.try_launch(device, [starts[number] + offset for number, offset in places]):
                return None
        results = [tensors[number] for number in self.results]
        return results[0] if self.returns_one else tuple(results)


class Note(TorchDispatchMode):
    """A context that notes what a call allocates and launches, and why it cannot be repeated, if so."""

    def __init__(self):
        super().__init__()
        self.allocated: list[tuple[Callable, Tensor]] = []
        self.launched: list[tuple[Launch, list[int]]] = []
        # addresses at which views begin, but not what they are views of
        self.parts: set[int] = set()
        self.obstacle = ""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        if function in ALLOCATIONS:
            self.allocated.append((ALLOCATIONS[function], result))
        elif function.is_view and all(share_memory(x, arguments[0]) for x in listed(result)):
            self.parts |= {x.data_ptr() for x in listed(result)} - {arguments[0].data_ptr()}
        else:
            self.obstacle = f"it runs {function}"
        return result

    def add_launch(self, launch: Launch | str | None, addresses: list[int]) -> None:
        if isinstance(launch, Launch):
            self.launched.append((launch, addresses))
        elif launch is None or launch is ONCE:
            self.obstacle = self.obstacle or NOT_YET
        else:
            self.obstacle = launch


# by kind of call, or the reason why there is none
recipes: dict[tuple, Recipe | str] = {}


def repeated(*, also_depends_on: Callable[[], Hashable]) -> Callable[[Callable], Callable]:
    """A decorator for a function of tensors, lists of tensors, and options; the first is a tensor.

    What it does may depend on shapes, layouts and options, and on also_depends_on(), but on nothing else that
    changes. Its kernels must be launched by launches.launch. A call in which PyTorch computes or copies
    anything is noticed and never repeated.
    """

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def run(*arguments):
            # a call inside one that is being noted runs as it is, so that its launches are noted, too
            if listeners.of_launches is not None or not may_repeat(arguments[0]):
                return function(*arguments)
            device, others = arguments[0].get_device(), also_depends_on()
            kind, given = kind_and_tensors(function, device, others, arguments)
            known = recipes.get(kind)
            if type(known) is Recipe and not is_watched():
                results = known.repeat(device, given)
                if results is not None:
                    return results
            elif known is None:
                if len(recipes) >= MOST_KINDS:
                    recipes.clear()
                recipes[kind] = CAME_ONCE
            elif known is CAME_ONCE:
                recipes[kind] = NOT_YET
            elif known is NOT_YET and not is_watched():
                results, found = noted(function, arguments, given)
                # another thread may have changed what it depends on
                recipes[kind] = found if also_depends_on() == others else NOT_YET
                return results
            return function(*arguments)

        return run

    return decorate


def may_repeat(x: Tensor) -> bool:
    # how float32 is multiplied is a setting of PyTorch's, which may change from call to call
    return x.is_cuda and torch.version.hip is None and x.dtype != torch.float32


def kind_and_tensors(
    function: Callable, device: int, others: Hashable, arguments: tuple
) -> tuple[tuple, list[Tensor]]:
    """Everything about a call except its tensors' addresses, as a key to look up; and the tensors.

    Which of the tensors begin at one address belongs to it: what a kernel is given there may be any of them.
    """
    kind, tensors = [function, device, others], []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            # its place: an optional argument may be None in its stead
            kind.append(Tensor)
        elif type(argument) is list:
            tensors += argument
            kind.append(len(argument))
        else:
            kind.append(argument)
    starts = [x.data_ptr() for x in tensors]
    for x, start in zip(tensors, starts, strict=True):
        # Triton compiles one kernel for addresses that 16 divides and another for all others
        kind += (x.shape, x.stride(), x.dtype, start % 16, starts.index(start))
    return tuple(kind), tensors


def noted(function: Callable, arguments: tuple, given: list[Tensor]) -> tuple:
    """function(*arguments), and its recipe, or why there is none."""
    note = Note()
    with note, telling_launches(note.add_launch):
        results = function(*arguments)
    try:
        return results, Recipe(note, given, results)
    except ValueError as error:
        (reason,) = error.args
        return results, reason


def place_of(address: int, tensors: list[Tensor]) -> Place:
    """In the tensor that begins at the address, else in the one around it. Raises ValueError without one."""
    for number, x in enumerate(tensors):
        if x.data_ptr() == address:
            return Place(number, 0)
    offsets = [(number, address - x.data_ptr(), extent(x)) for number, x in enumerate(tensors)]
    # by offset, since tensors that begin at one address are one
    inside = {offset: Place(number, offset) for number, offset, n_bytes in offsets if 0 < offset < n_bytes}
    if not inside:
        raise ValueError("a kernel reads or writes what is neither given nor allocated in the call")
    # of two tensors that begin apart in one piece of memory
    if len(inside) > 1:
        raise ValueError(NOT_YET)
    (place,) = inside.values()
    return place


def extent(x: Tensor) -> int:
    """Bytes from the beginning of x's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def number_of(result: Tensor, tensors: list[Tensor]) -> int:
    for number, x in enumerate(tensors):
        # not by identity: PyTorch may have wrapped the same memory again
        if result.numel() and layout_of(x) == layout_of(result):
            return number
    raise ValueError("it returns what it has not allocated")


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether one is a view of the other: reshape and contiguous, which count as views, may also copy."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def layout_of(x: Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()
