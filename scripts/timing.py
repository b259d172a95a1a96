"""Timing of GPU work: the medians that the benchmarks and the reproduction of the paper report.

Short work is timed as the replay of a CUDA graph with a cold L2 cache: the GPU's own time, as in a captured
or deeply queued training step, without the time Python takes to issue it. The GPU's clock follows the power
that is drawn, some 50 ms late (docs/hopper.md, "Power"). So a pause before each turn lets it recover: without
one, FlexAttention took from 1.17 to 1.43 ms, depending on what had run just before it. And a turn is shorter
than that: the same call has 709 TFLOP/s in its ninth repetition, and 670 from the eleventh on.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from model.graphs import recording
from train.passes import capture_stream

# pause before a turn, in seconds
PAUSE = 0.05
# target lengths of a turn's warm-up and of its timed part, in milliseconds
WARMUP_MS, TURN_MS = 5, 20
# a CUDA graph holds memory of its own, too much of it for longer sequences
LONGEST_CAPTURED = 2048
LONG_CALLS = 5
# the fewest calls that make a median, however long each takes
LEAST_CALLS = 5
# larger than any L2 cache
CACHE_BYTES = 256 * 2**20
# clearing the cache so many times keeps the GPU busy for two milliseconds, while Python issues a long pass
CLEARINGS = 32


def capture(attention: Callable, qkv: tuple[Tensor, ...], dout: Tensor):
    """out, and the CUDA graphs of one forward and one backward pass.

    The backward graph reads tensors that out keeps alive: keep out for as long as that graph is replayed.
    Both passes are captured, because SDPA's memory-efficient backward pass expects its dropout seed where a
    captured forward pass leaves it, on the GPU, and would otherwise read an invalid address.
    """
    # a backward pass runs on the stream of its forward pass
    stream = warmed_up(lambda: torch.autograd.grad(attention(*qkv), qkv, dout))
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with recording(forward, stream):
        out = attention(*qkv)
    with recording(backward, stream):
        torch.autograd.grad(out, qkv, dout, retain_graph=True)
    # a capture computes nothing: only the first replay fills out and the tensors saved for the backward pass
    forward.replay()
    return out, forward, backward


def warmed_up(function: Callable) -> torch.cuda.Stream:
    """The stream of all captures, after three calls: PyTorch warns if gradients were computed on another."""
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    return stream


def capture_forward(function: Callable) -> torch.cuda.CUDAGraph:
    """The graph of one call."""
    stream = warmed_up(function)
    graph = torch.cuda.CUDAGraph()
    with recording(graph, stream):
        function()
    return graph


def median_ms(function: Callable) -> float:
    """The median of calls with a cold L2 cache, in turns that end before the clock follows their power."""
    torch.cuda.synchronize()
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    milliseconds = []
    while len(milliseconds) < LEAST_CALLS:
        time.sleep(PAUSE)
        _, with_clearing = timed_ms(function, cache, 1)
        timed_ms(function, cache, int(WARMUP_MS / with_clearing))
        milliseconds += timed_ms(function, cache, max(1, int(TURN_MS / with_clearing)))[0]
    return median(milliseconds)


def medians_in_turns(graphs: dict, repeats: int) -> dict:
    """By key, the median milliseconds of each of its graphs; in each of `repeats` turns all are measured."""
    times = {key: [[] for _ in given] for key, given in graphs.items()}
    for _ in range(repeats):
        for key, given in graphs.items():
            for graph, milliseconds in zip(given, times[key], strict=True):
                milliseconds.append(median_ms(graph.replay))
    return {key: list(map(median, given)) for key, given in times.items()}


def timed_ms(function: Callable, cache: Tensor, n_calls: int) -> tuple[list[float], float]:
    """The times of calls, before each of which the L2 cache is cleared, and their sum with clearing."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(n_calls)]
    for begin, cleared, end in marks:
        begin.record()
        cache.zero_()
        cleared.record()
        function()
        end.record()
    torch.cuda.synchronize()
    milliseconds = [cleared.elapsed_time(end) for _, cleared, end in marks]
    return milliseconds, sum(begin.elapsed_time(end) for begin, _, end in marks)


def forward_backward_ms(attention: Callable, qkv: tuple[Tensor, ...], dout: Tensor) -> tuple[float, float]:
    """Medians of the forward and the backward pass of attention(*qkv), q (B, T, H, D), on a GPU."""
    if qkv[0].shape[1] <= LONGEST_CAPTURED:
        _, forward, backward = capture(attention, qkv, dout)
        return median_ms(forward.replay), median_ms(backward.replay)
    torch.autograd.grad(attention(*qkv), qkv, dout)
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=dout.device)
    forward_ms, backward_ms = [], []
    for _ in range(LONG_CALLS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for _ in range(CLEARINGS):
            cache.zero_()
        marks[0].record()
        out = attention(*qkv)
        marks[1].record()
        for _ in range(CLEARINGS):
            cache.zero_()
        marks[2].record()
        torch.autograd.grad(out, qkv, dout)
        marks[3].record()
        torch.cuda.synchronize()
        del out
        forward_ms.append(marks[0].elapsed_time(marks[1]))
        backward_ms.append(marks[2].elapsed_time(marks[3]))
    return median(forward_ms), median(backward_ms)
