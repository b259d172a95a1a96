import pytest
import torch

from train.page_locked import lock_pages, unlock_pages

pytestmark = pytest.mark.gpu


def test_tensors_of_any_size_lie_in_locked_memory_until_they_are_unlocked():
    torch.manual_seed(0)
    sources = [torch.randn(shape, device="cuda") for shape in ((3,), (), (0, 5), (700, 1001))]
    sources.append(torch.randn(33, 65, device="cuda").to(torch.bfloat16))
    copies = [torch.empty_like(source, device="cpu") for source in sources]
    locked = lock_pages(copies)
    assert [copy.is_pinned() for copy in copies] == [True, True, False, True, True]
    for copy, source in zip(copies, sources, strict=True):
        copy.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(copy, source.cpu()) for copy, source in zip(copies, sources, strict=True))
    unlock_pages(locked)
    assert not any(copy.is_pinned() for copy in copies)


def test_the_same_memory_can_be_locked_again():
    for _ in range(20):
        copies = [torch.empty(1000) for _ in range(10)]
        unlock_pages(lock_pages(copies))
