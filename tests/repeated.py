"""Compares what a repeated call gives the driver with what the call itself gives it.

Run by test_repeats.py in a separate process, because Triton's interpreter cannot run Gluon:
    python -m tests.repeated call=forward
prints one JSON line per call. It needs no GPU: Triton compiles as usual, but the driver only records.
"""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import block_masks, launches, operators, packed, repeats
from kernels.intervals import document_bounds
from kernels.launches import Launch
from kernels.operators import use_implementation
from kernels.registration import FUNCTIONS
from tests import launched

# sizes of q and of lse, and the options behind packed q, k and v
SHAPE, ROWS = (2, 1000, 4, 64), (2, 4, 1000)
PACKED_OPTIONS = None, None, 0.1, True, False, None
# more tiles than are dealt out to blocks, which take the others from a counter
MANY = 2, 9000, 4, 128


def some(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def options(
    *, bounds=(None, None), seed=None, blocks=(), causal=True, window=None, deterministic=False
) -> tuple:
    """What the attention operators take behind q, k and v, or behind lse."""
    dropout_p = 0.0 if seed is None else 0.1
    return *bounds, seed, list(blocks), 0.1, causal, window, dropout_p, deterministic, None


def qkv(n_kv_head=4) -> list[Tensor]:
    return [some(2, 1000, n, 64) for n in (4, n_kv_head, n_kv_head)]


def backward(*tensors: Tensor, dlse=None, **given) -> tuple:
    """Arguments of attention_backward for q, k and v."""
    return some(*SHAPE), dlse, *tensors, some(*SHAPE), torch.zeros(ROWS), *options(**given)


def some_packed() -> Tensor:
    return some(2, 1000, 3, 4, 64)


def seed() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


def documents(causal=True) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(1000, dtype=torch.int32) // 300).expand(2, -1).contiguous()
    return document_bounds(ids, 1000, causal=causal, window=None)


FORWARD, BACKWARD = operators.attention_forward, operators.attention_backward
LISTS = block_masks.strided(1000, 2, block_size=128).tensors()
# operators, and what makes new arguments for them
CALLS = {
    "forward": (FORWARD, lambda: (*qkv(), *options())),
    "forward_of_parts": (FORWARD, lambda: (*some_packed().unbind(2), *options())),
    "forward_with_counter": (FORWARD, lambda: (*(some(*MANY) for _ in range(3)), *options())),
    "documents": (FORWARD, lambda: (*qkv(), *options(bounds=documents(), causal=False))),
    # both bounds are one tensor
    "full_documents": (FORWARD, lambda: (*qkv(), *options(bounds=documents(causal=False), causal=False))),
    "full_documents_backward": (
        BACKWARD,
        lambda: backward(*qkv(), bounds=documents(causal=False), causal=False),
    ),
    "one_tensor": (FORWARD, lambda: (*[some(2, 1000, 4, 64)] * 3, *options())),
    "one_tensor_backward": (BACKWARD, lambda: backward(*[some(2, 1000, 4, 64)] * 3)),
    "dropout": (FORWARD, lambda: (*qkv(), *options(seed=seed()))),
    "backward": (BACKWARD, lambda: backward(*qkv())),
    "backward_with_dlse": (BACKWARD, lambda: backward(*qkv(), dlse=torch.zeros(ROWS))),
    "deterministic": (BACKWARD, lambda: backward(*qkv(), deterministic=True)),
    "packed_forward": (packed.packed_attention_forward, lambda: (some_packed(), *PACKED_OPTIONS)),
    "packed_backward": (
        packed.packed_attention_backward,
        lambda: (some(*SHAPE), some_packed(), some(*SHAPE), torch.zeros(ROWS), *PACKED_OPTIONS),
    ),
    "lists": (FORWARD, lambda: (*qkv(), *options(blocks=LISTS, causal=False))),
    "cut_lists": (FORWARD, lambda: (*qkv(), *options(blocks=LISTS, window=300))),
    # rows of 65 numbers, which no bulk copy reads
    "copied": (FORWARD, lambda: (some(2, 1000, 4, 65)[..., :64], *qkv()[1:], *options())),
    "portable_forward": (FORWARD, lambda: (*qkv(), *options())),
    "portable_backward": (BACKWARD, lambda: backward(*qkv())),
    "portable_groups": (BACKWARD, lambda: backward(*qkv(n_kv_head=2))),
}


class Memory(TorchDispatchMode):
    """A context that keeps what PyTorch allocates: the tensor, and whether it is cleared."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[Tensor, bool]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        name = function.overloadpacket.__name__
        if name.startswith(("empty", "new_empty", "zeros", "clone", "contiguous")):
            self.made.append((result, name == "zeros"))
        return result


def heard(call: Callable, arguments: tuple) -> tuple[list, list, list]:
    """What call(*arguments) allocates, launches and returns; a tensor by its number, the arguments first."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    tensors += [x for xs in arguments if isinstance(xs, list) for x in xs]
    memory, told = Memory(), []
    try_launch = Launch.try_launch

    def place(address: int) -> tuple[int, int]:
        known = tensors + [x for x, _ in memory.made]
        begins = [number for number, x in enumerate(known) if x.data_ptr() == address]
        if begins:
            return begins[0], 0
        for number, x in enumerate(known):
            if 0 < address - x.data_ptr() < x.untyped_storage().nbytes():
                return number, address - x.data_ptr()
        return -1, 0

    def listening(launch, device, addresses):
        told.append((id(launch), list(map(place, addresses))))
        return try_launch(launch, device, addresses)

    with patch.object(Launch, "try_launch", listening), memory:
        results = call(*arguments)
    results = [results] if isinstance(results, Tensor) else results
    made = [(x.numel() * x.element_size(), is_cleared) for x, is_cleared in memory.made]
    return made, told, [(place(x.data_ptr()), x.shape, x.stride(), x.dtype) for x in results]


def compare(name: str) -> dict:
    operator, arguments = CALLS[name]
    function = FUNCTIONS[operator]
    repeats.recipes.clear()
    with use_implementation("portable" if name.startswith("portable") else "hopper"):
        with patch.object(repeats, "may_repeat", lambda x: False):
            # compiled, prepared
            for _ in range(2):
                function(*arguments())
            expected = heard(function, arguments())
        for _ in range(3):
            function(*arguments())
        [known] = repeats.recipes.values()
        n_repeated = len(known.launches) if isinstance(known, repeats.Recipe) else 0
        result = heard(function, arguments())
    return {"call": name, "repeated": n_repeated, "same": result == expected, "what_is_kept": str(known)}


def main(arguments: list[str]) -> None:
    launches.launches.clear()
    may_repeat = patch.object(repeats, "may_repeat", lambda x: True)
    # the assembler may print something
    with launched.recording_gpu(launched.Cuda()), may_repeat, redirect_stdout(sys.stderr):
        rows = [compare(a.removeprefix("call=")) for a in arguments]
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
