"""Host memory that the kernel cannot move, into which a GPU copies at full speed while the CPU goes on.

torch.empty(pin_memory=True) makes its pages while it holds the driver's lock: 14 s for the 19 GB of GPT-2
1558M on one H200, in which training stood still. It also rounds each tensor up to a power of two.
"""

import mmap

import torch
from torch import Tensor

# cudaHostRegisterPortable: for every device of this process
PORTABLE = 1


def lock_pages(tensors: list[Tensor]) -> list[int]:
    """Moves CPU tensors into locked memory, without their values; returns what unlock_pages takes.

    Raises RuntimeError where the driver refuses, for a limit on locked memory say.
    """
    sizes = [-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for tensor in tensors]
    memory = torch.empty(sum(sizes) + mmap.PAGESIZE, dtype=torch.uint8)
    start = -memory.data_ptr() % mmap.PAGESIZE
    locked = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if size == 0:
            continue
        pages = memory[start : start + size]
        # here the pages come into being, without a lock: the longest part by far
        pages.zero_()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size, PORTABLE))
        locked.append(pages.data_ptr())
        tensor.data = pages[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += size
    return locked


def unlock_pages(locked: list[int]) -> None:
    """Before the memory is freed: the driver would go on locking what comes to lie there next."""
    for address in locked:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
