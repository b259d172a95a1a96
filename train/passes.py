"""The forward and backward pass of one micro-batch; on a GPU replayed as CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.graphs import recording

# eager steps before a graph is captured: whatever compiles, loads or tunes on its first call has then done so
EAGER_STEPS = 2
# margin on the memory that graphs are expected to need, for cuBLAS and the graphs themselves
SPARE = 1.05


class Passes:
    """The forward and the backward pass of a micro-batch, one after the other.

    model: tokens, targets (B, T) int64 -> their mean loss, (). accumulation: micro-batches in a step.
    """

    def __init__(self, model: nn.Module, accumulation: int, autocast: Callable, scaler):
        self.model = model
        self.accumulation = accumulation
        self._autocast = autocast
        self._scaler = scaler
        self._loss = None
        # None: not decided yet
        self.is_graphed: bool | None = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The micro-batch's part of the step's loss, (); the next call may overwrite it."""
        with self._autocast():
            self._loss = self.model(tokens, targets) / self.accumulation
        return self._loss.detach()

    def backward(self) -> None:
        """Accumulates the gradients of that part of the loss."""
        loss, self._loss = self._loss, None
        self._scaler.scale(loss).backward()


class GraphedPasses(Passes):
    """Passes that replay CUDA graphs from the third step on: one launch in place of some thousand.

    In steps of few tokens the GPU would otherwise wait for Python most of the time (docs/training_speed.md).
    Every micro-batch must have the same shape, and its work must not depend on values that Python reads.
    PyTorch's random numbers on the GPU are the same as without graphs. Under DDP the last micro-batch of a
    step runs eagerly, because its gradients are exchanged while others are still being computed; the model
    must be wrapped inside on_capture_stream.

    A graph's activations keep their memory between steps, so evaluation, which could otherwise use it, needs
    memory of its own. If the GPU has too little for both, all steps run eagerly, and a message says so.
    A graph reads tensors at the addresses they had at capture: block masks and buffers must not be replaced.
    """

    def __init__(self, model: nn.Module, accumulation: int, autocast: Callable, scaler, *, rank: int = 0):
        super().__init__(model, accumulation, autocast, scaler)
        self._rank = rank
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # the tensors that graphs read
        self._inputs: tuple[Tensor, Tensor] | None = None
        # by whether there are gradients to add to: forward, backward, and the loss that forward writes
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, Tensor]] = {}
        self._backward: torch.cuda.CUDAGraph | None = None
        # the gradients that the first micro-batch of a step writes
        self._gradients: list[Tensor | None] = []
        self._pool = None
        self._steps = 0
        self.is_graphed = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        adds = any(p.grad is not None for p in self._parameters)
        self._steps += not adds
        if self._inputs is None:
            self._inputs = tokens.clone(), targets.clone()
        for mine, given in zip(self._inputs, (tokens, targets), strict=True):
            mine.copy_(given)
        if self.is_graphed is None and self._steps > EAGER_STEPS:
            self.is_graphed = self._has_room()
        if not self.is_graphed or exchanges(self.model):
            return super().forward(*self._inputs)
        if adds not in self._graphs:
            self._capture(adds)
        forward, self._backward, loss = self._graphs[adds]
        forward.replay()
        return loss

    def backward(self) -> None:
        if self._backward is None:
            super().backward()
            return
        self._backward.replay()
        self._backward = None
        # the last update has set these to None
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _has_room(self) -> bool:
        free, _ = torch.cuda.mem_get_info()
        most, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        needed, there = SPARE * (2 * most - kept), free + torch.cuda.memory_reserved()
        if needed > there:
            gib, there_gib = (n_bytes / 2**30 for n_bytes in (needed, there))
            print(
                f"cuda_graphs on rank {self._rank}: with graphs, which keep their activations, up to "
                f"{gib:.1f} GiB of memory would be in use, of {there_gib:.1f} available: steps go on without",
                flush=True,
            )
        return needed <= there

    def _capture(self, adds: bool) -> None:
        """Records both passes without running them.

        Raises ValueError if they cannot be captured, and OutOfMemoryError if memory runs out.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # unreachable reference cycles may hold autograd nodes that belong to the stream of eager passes
        gc.collect()
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # meanwhile other threads write checkpoints and watch NCCL
        try:
            with recording(graphs[0], capture_stream(), self._pool):
                loss = super().forward(*self._inputs)
            with recording(graphs[1], capture_stream(), self._pool):
                super().backward()
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise torch.OutOfMemoryError("while graphs were captured") from error
            raise ValueError(
                f"cuda_graphs=true: the passes of a micro-batch cannot be captured here ({error}): use "
                "cuda_graphs=false"
            ) from error
        self._graphs[adds] = *graphs, loss
        if not adds:
            self._gradients = [p.grad for p in self._parameters]
            # recorded, not computed: they hold no values yet
            for parameter in self._parameters:
                parameter.grad = None


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one behind it, is out-of-memory: ending a failed capture hides what broke it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def supports_graphs(device: torch.device) -> bool:
    """Whether CUDA graphs may be used: on AMD GPUs, which PyTorch also calls cuda, none has run yet."""
    return device.type == "cuda" and torch.version.hip is None


def exchanges(model: nn.Module) -> bool:
    """Whether DDP averages gradients in the next backward pass (train/parallel.py, set_gradient_sync)."""
    return isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream of this process's GPU on which graphs are captured."""
    return torch.cuda.Stream()


@contextmanager
def on_capture_stream() -> Iterator[None]:
    """Runs the body on the capture stream, after the work queued before it and ahead of the work after it.

    DDP keeps the autograd nodes that accumulate gradients, and each such node works on the stream on which it
    was created; one created on the default stream could not be captured. Eager passes and these nodes wait
    for each other, about which PyTorch would warn.
    """
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
