"""Recordings of CUDA graphs are disturbed by nothing, and those that fail leave nothing behind."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

import pytest
import torch

from model.graphs import recording


class Cycle:
    """Garbage, once nothing else holds it, that only Python's collector finds."""

    def __init__(self, held: object = None):
        self.itself, self.held = self, held


@pytest.fixture
def streams(monkeypatch) -> list[str]:
    """Stands in for a GPU: the streams that were made current, the last of which is."""
    streams = ["the caller's"]

    @contextmanager
    def graph(_, *, pool, stream, capture_error_mode):
        # otherwise a call of another thread that a recording forbids would break it
        assert capture_error_mode == "thread_local"
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    return streams


def test_no_garbage_is_collected_during_a_recording(streams):
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with recording(None, "another"):
            garbage = weakref.ref(Cycle())
            lists = [[] for _ in range(1000)]
            assert garbage() is not None
        lists += [[] for _ in range(1000)]
        assert garbage() is None
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("collects", [True, False])
def test_a_recording_leaves_the_collector_as_it_was(streams, collects):
    if not collects:
        gc.disable()
    try:
        with recording(None, "another"):
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(KeyError), recording(None, "another"):
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_behind_a_recording_that_fails_the_stream_of_before_is_current(streams):
    def work():
        assert streams[-1] == "another"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="when stream is capturing"), recording(None, "another"):
        work()
    assert streams[-1] == "the caller's"


def test_a_recording_waits_for_that_of_another_thread(streams):
    with ThreadPoolExecutor(1) as pool:

        def record() -> list[str]:
            with recording(None, "a third"):
                return list(streams)

        with recording(None, "another"):
            there = pool.submit(record)
            with pytest.raises(TimeoutError):
                there.result(timeout=0.1)
        assert there.result() == ["the caller's", "a third"]
    assert gc.isenabled()


def test_a_recording_inside_another_of_its_thread_does_not_wait_for_itself(streams):
    reached = []

    def record():
        with recording(None, "outer"), recording(None, "inner"):
            reached.append(streams[-1])

    # a daemon: one that waits for itself would keep this process from ending
    thread = Thread(target=record, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert reached == ["inner"]
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_graph_that_is_garbage_is_not_destroyed_during_a_recording():
    x = torch.arange(5, device="cuda")
    threshold = gc.get_threshold()
    old = torch.cuda.CUDAGraph()
    with recording(old, torch.cuda.Stream()):
        x + 1
    gc.collect()
    gc.disable()
    garbage = weakref.ref(Cycle(old))
    del old
    graph = torch.cuda.CUDAGraph()
    gc.enable()
    try:
        with recording(graph, torch.cuda.Stream()):
            gc.set_threshold(1)
            lists = [[] for _ in range(1000)]
            y = x + len(lists)
            gc.set_threshold(*threshold)
            assert garbage() is not None
    finally:
        gc.set_threshold(*threshold)
    graph.replay()
    assert y.tolist() == [1000, 1001, 1002, 1003, 1004]


@pytest.mark.gpu
def test_another_thread_may_allocate_memory_during_a_recording():
    x, graph = torch.arange(5, device="cuda"), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, recording(graph, torch.cuda.Stream()):
        there = pool.submit(lambda: torch.ones(2**28, dtype=torch.uint8, device="cuda").sum().item())
        y = x * 2
        assert there.result() == 2**28
    graph.replay()
    assert y.tolist() == [0, 2, 4, 6, 8]
