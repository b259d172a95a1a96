"""Recording CUDA graphs."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# each recording begins by waiting for the whole GPU, which breaks another one that is under way. One inside
# another of the same thread would wait for itself: it is left to fail
_alone = threading.RLock()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool=None) -> Iterator[None]:
    """A context whose work on the current GPU is recorded into a graph, on `stream`, and does not run.

    pool: of whose memory the graph takes its own, see torch.cuda.graph_pool_handle; by default a new one.
    Other threads may use the GPU meanwhile; their recordings wait for this one.
    Raises RuntimeError for what cannot be recorded.
    """
    with _alone:
        before, collects = torch.cuda.current_stream(), gc.isenabled()
        # garbage may hold other graphs, and a recording during which a graph is destroyed fails
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            # a recording that fails leaves its stream current, and whatever runs on that stream fails too
            torch.cuda.set_stream(before)
            raise
        finally:
            if collects:
                gc.enable()
