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

    Raises RuntimeError where the driver refuses, for a limit on locked memory say, and OSError where there
    is no memory: the tensors can be used as before then, and none of their memory is locked.
    """
    sizes = [-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for tensor in tensors]
    if not sum(sizes):
        return []
    # begins at a page, as what torch allocates does not
    pages = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start, locked = 0, []
    try:
        for tensor, size in zip(tensors, sizes, strict=True):
            if size == 0:
                continue
            part = memory[start : start + size]
            # here the pages come into being, without a lock: the longest part by far
            part.zero_()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), size, PORTABLE))
            locked.append(part.data_ptr())
            tensor.data = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += size
    except RuntimeError:
        # nobody else would: their addresses are known here alone
        unlock_pages(locked)
        raise
    return locked


def unlock_pages(locked: list[int]) -> None:
    """Before the memory is freed: the driver would go on locking what comes to lie there next."""
    for address in locked:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
