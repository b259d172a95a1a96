"""What tests of attention on a GPU share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.flash_attention import flash_attention

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs sm_90")


def some(shape=(2, 300, 4, 64), dtype=torch.bfloat16, n=4) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(n)]


def assert_same(results, expected) -> None:
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def assert_same_in_threads(call: Callable, sets: list, expected: list) -> None:
    """call(*tensors) gives what is expected for each of the sets, in threads with streams of their own."""

    def work(tensors, those):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results = call(*tensors)
                torch.cuda.current_stream().synchronize()
                assert_same(results, those)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(sets)) as pool:
        for done in [pool.submit(work, *each) for each in zip(sets, expected, strict=True)]:
            done.result()


def assert_graph_replays_with_other_numbers(q: Tensor, k: Tensor, v: Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v)
    other = some(q.shape, n=3)
    for mine, theirs in zip((q, k, v), other, strict=True):
        mine.copy_(theirs)
    # which changes the parameters that lie ready
    expected = flash_attention(*other)
    graph.replay()
    assert torch.equal(out, expected)
