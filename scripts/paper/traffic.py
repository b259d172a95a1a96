"""The counting model: bytes that operations read and write, each input and output of an operation once.

It is what a GPU must move if nothing stays in its caches from one operation to the next; for a fused
kernel, such as ours, it is the least that any kernel moves. Tensors are fake: they have shapes, no memory
and no values.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.paper import baselines

# operations that give memory or a shape, and touch no values
FREE = ("empty", "empty_like", "new_empty", "detach", "device", "_unsafe_view")


class ByteCounter(TorchDispatchMode):
    """Counts bytes and operations while it is active."""

    def __init__(self):
        super().__init__()
        self.bytes, self.operations = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            # beta=0 adds a matrix zero times, without reading it
            read = args[1:] if kwargs.get("beta") == 0 else args
            moved = n_bytes(tree_leaves((read, kwargs))) + n_bytes(tree_leaves(result))
            self.bytes += moved
            self.operations.append((name, moved))
        return result


def n_bytes(values: Iterable) -> int:
    """Bytes of the distinct tensors; a broadcast dimension counts once."""
    tensors = {id(x): x for x in values if isinstance(x, Tensor)}
    total = 0
    for x in tensors.values():
        elements = 1
        for size, stride in zip(x.shape, x.stride(), strict=True):
            elements *= size if stride else 1
        total += elements * x.element_size()
    return total


def pass_bytes(
    attention: Callable, batch: int, seq_len: int, heads: int, head_dim: int, device: torch.device
) -> int:
    """Bytes of one forward and backward pass of attention(q, k, v) on a device, fp16."""
    # a mask that the attention holds may be a real tensor
    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = baselines.inputs(batch, seq_len, heads, head_dim, device, requires_grad=True)
        dout = torch.empty_like(qkv[0])
        with ByteCounter() as counter:
            torch.autograd.grad(attention(*qkv), qkv, dout)
    return counter.bytes


def algorithm1_bytes(batch: int, seq_len: int, heads: int, head_dim: int, block_n: int) -> int:
    """Bytes of Algorithm 1 forward in fp16: k and v once; q, out, l and m again for each block of keys.

    l and m are float32; like out, they are written in every round and read in all but the first.
    """
    rounds = -(-seq_len // block_n)
    row, statistics = 2 * head_dim, 8
    once = 2 * row
    per_token = once + rounds * (row + row + statistics) + (rounds - 1) * (row + statistics)
    return batch * heads * seq_len * per_token
