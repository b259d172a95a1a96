"""Passes that CUDA graphs replay give what the same passes give without."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from scripts.plan import composed
from tests.together import run_together
from train.build import build_passes, build_step_model, build_weights, set_arithmetic
from train.config import Config
from train.context_parallel import ContextGroups
from train.distributed import Processes
from train.loop import seed_of
from train.optim import build_optimizer
from train.out_of_memory import is_out_of_memory
from train.passes import EAGER_STEPS, GraphedPasses, Passes
from train.step import autocast_context, forward_backward, update

SMALL = [
    "data.tokenizer=bytes", "model.vocab_size=257", "model.n_layer=2", "model.n_head=2", "model.n_embd=128",
    "seq_len=256", "tokens_per_microbatch=1024", "tokens_per_step=2048", "deterministic=true",
]  # fmt: skip
# two that capture, and two that replay alone
STEPS = EAGER_STEPS + 4


def processes_of(device: str, world_size: int = 1) -> Processes:
    return Processes(0, world_size, torch.device(device), None, None)


class Training:
    """Steps of the model of a configuration, as the loop takes them, on random tokens."""

    def __init__(self, kind: type[Passes], config: Config, rank: int = 0, world_size: int = 1):
        torch.compiler.reset()
        set_arithmetic(config)
        self.config = config
        self.processes = Processes(rank, world_size, torch.device("cuda", rank), None, None)
        self.weights = build_weights(config, self.processes.device)
        context = ContextGroups(rank, world_size, None)
        self.model = build_step_model(self.weights, config, self.processes, context)
        self.optimizer = build_optimizer(self.weights, config.optim)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.precision == "fp16")
        self.autocast = partial(autocast_context, "cuda", config.precision)
        self.passes = kind(self.model, config.accumulation(world_size), self.autocast, self.scaler)
        self.done = 0

    def text(self) -> tuple[torch.Tensor, torch.Tensor]:
        config, generator = self.config, torch.Generator().manual_seed(self.done)
        shape = config.tokens_per_step // config.seq_len, config.seq_len + 1
        # the last of which ends documents
        text = torch.randint(257, shape, generator=generator).to(self.processes.device)
        # this process' part
        text = text.chunk(self.processes.world_size)[self.processes.rank]
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self) -> tuple[float, torch.Tensor]:
        torch.manual_seed(seed_of(1, self.done, self.processes.rank))
        loss, _ = forward_backward(self.passes, *self.text(), self.processes)
        self.done += 1
        return loss, update(self.optimizer, self.scaler, 1e-2, 1.0, float("inf"))

    def result(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.weights.parameters()]


@pytest.fixture(autouse=True)
def other_arithmetic():
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        [],
        ["tokens_per_step=1024"],
        ["tokens_per_step=4096", "compile=false"],
        ["model.dropout=0.1"],
        ["model.dropout=0.1", "compile=false"],
        ["precision=fp16"],
        ["precision=fp32", "compile=false"],
        ["separate_documents=true"],
        ["separate_documents=true", "compile=false"],
        ["+model.rotary.base=10000", "model.max_seq_len=1024", "pose_seq_len=1024"],
        ["attention=strided", "seq_len=1024"],
        ["attention.implementation=sdpa", "fused_loss=false"],
        ["recompute=full"],
        ["recompute=selective"],
        ["optim=muon"],
    ],
    ids=lambda given: " ".join(given) or "defaults",
)
def test_graphs_train_the_weights_that_training_without_them_does_bit_by_bit(given):
    found = []
    for kind in (Passes, GraphedPasses):
        training = Training(kind, composed([*SMALL, *given]))
        numbers = [training.step() for _ in range(STEPS)]
        assert training.passes.is_graphed is (kind is GraphedPasses)
        found.append((*(torch.tensor(column) for column in zip(*numbers, strict=True)), training.result()))
    (losses, norms, weights), (graphed_losses, graphed_norms, graphed) = found
    assert torch.equal(losses, graphed_losses)
    assert torch.equal(norms, graphed_norms)
    assert losses.unique().numel() == norms.unique().numel() == STEPS
    for one, other in zip(weights, graphed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_steps_by_graphs_take_no_new_memory_and_leave_no_gradients():
    training = Training(GraphedPasses, composed(SMALL))
    for _ in range(EAGER_STEPS + 1):
        training.step()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(4):
        training.step()
        assert all(p.grad is None for p in training.weights.parameters())
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
def test_an_evaluation_between_steps_by_graphs_changes_none_of_them():
    losses = []
    for evaluates in (False, True):
        training = Training(GraphedPasses, composed(SMALL))
        losses.append([])
        for _ in range(STEPS):
            losses[-1].append(training.step()[0])
            if evaluates:
                training.model.eval()
                with torch.no_grad(), training.autocast():
                    training.model(*training.text())
                training.model.train()
    assert losses[0] == losses[1]


@pytest.fixture
def captured(monkeypatch):
    """Passes about to be captured, on a machine where the end of a capture raises what `broken` gives.

    Behind it the stream of before is current again.
    """
    current = ["the run's"]

    def capture(broken) -> None:
        @contextmanager
        def graph(*given, **options):
            current.append("of captures")
            try:
                yield
            finally:
                broken()
                current.pop()

        for name in ("CUDAGraph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, object)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr("train.passes.capture_stream", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
        monkeypatch.setattr(torch.cuda, "set_stream", current.append)
        monkeypatch.setattr(GraphedPasses, "_has_room", lambda self: True)
        model, inputs = WithLoss(), (torch.ones(2, 3), torch.ones(2, 1))
        passes = GraphedPasses(model, 1, nullcontext, torch.amp.GradScaler("cpu", enabled=False))
        for _ in range(EAGER_STEPS):
            passes.forward(*inputs)
            passes.backward()
            assert model.weight.grad.abs().sum() > 0
            model.zero_grad()
        passes.forward(*inputs)

    yield capture
    assert current[-1] == "the run's"


def test_passes_that_cannot_be_captured_are_refused_with_the_way_out(captured):
    def broken():
        # as a model does that waits for the GPU
        raise RuntimeError("operation not permitted when stream is capturing")

    message = r"cuda_graphs=true: .* when stream is capturing\): use cuda_graphs=false$"
    with pytest.raises(ValueError, match=message):
        captured(broken)


def test_out_of_memory_in_a_capture_is_reported_whatever_error_ends_it(captured, monkeypatch):
    def broken():
        raise RuntimeError("operation failed due to a previous error during capture")

    steps = []

    def forward(self, x, y):
        steps.append(0)
        if len(steps) > EAGER_STEPS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, x, y)

    plain = WithLoss.forward
    monkeypatch.setattr(WithLoss, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError, match="while graphs were captured") as caught:
        captured(broken)
    assert is_out_of_memory(caught.value)


class WithLoss(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x, y):
        return (super().forward(x) - y).square().mean()


@pytest.mark.gpu
def test_where_memory_has_no_room_for_graphs_steps_go_on_without_and_say_so(monkeypatch, capsys):
    training = Training(GraphedPasses, composed(SMALL))
    torch.cuda.empty_cache()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**40))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * torch.cuda.memory_reserved())
    for _ in range(STEPS):
        training.step()
    assert training.passes.is_graphed is False
    assert capsys.readouterr().out.count("cuda_graphs on rank 0: with graphs, which keep their") == 1


def two_train_the_same(rank: int, given: list[str]) -> None:
    found = []
    for kind in (Passes, GraphedPasses):
        words = [*SMALL, "tokens_per_step=6144", f"cuda_graphs={kind is GraphedPasses}", *given]
        training = Training(kind, composed(words), rank, 2)
        numbers = [training.step() for _ in range(STEPS)]
        assert training.passes.is_graphed is (kind is GraphedPasses)
        found.append((numbers, training.result()))
    (numbers, weights), (graphed_numbers, graphed) = found
    assert numbers == graphed_numbers
    for one, other in zip(weights, graphed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("given", [[], ["compile=false", "model.dropout=0.1"]], ids=["compiled", "eager"])
def test_gpus_that_average_gradients_train_the_same_with_graphs_before_the_last_micro_batch(given, tmp_path):
    run_together(two_train_the_same, 2, tmp_path / "meeting", given, on_gpus=True)


@pytest.mark.parametrize(
    ("device", "world_size", "given", "kind"),
    [
        ("cuda", 1, [], GraphedPasses),
        ("cuda", 1, ["cuda_graphs=false"], Passes),
        # a profile names operators, and what they allocate
        ("cuda", 1, ["profile=true"], Passes),
        # gradients travel in the backward pass of the last micro-batch, before which there is another or not
        ("cuda", 2, ["tokens_per_step=131072"], GraphedPasses),
        ("cuda", 2, [], Passes),
        ("cuda", 2, ["tokens_per_step=131072", "distributed=fsdp"], Passes),
        ("cuda", 2, ["tokens_per_step=131072", "context_parallel=2"], Passes),
        ("cpu", 1, [], Passes),
        # layers that are made again draw again, and the reference reads its seed
        ("cuda", 1, ["model.dropout=0.1"], GraphedPasses),
        ("cuda", 1, ["recompute=full"], GraphedPasses),
        ("cuda", 1, ["model.dropout=0.1", "recompute=full"], Passes),
        ("cuda", 1, ["model.dropout=0.1", "attention.implementation=reference"], Passes),
    ],
)
def test_graphs_are_used_if_wanted_and_gpus_exchange_nothing(device, world_size, given, kind):
    config = composed(["tokens_per_step=65536", *given])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    passes = build_passes(torch.nn.Linear(1, 1), config, processes_of(device, world_size), None, scaler)
    assert type(passes) is kind
    assert passes.accumulation == config.tokens_per_step // 32768 // world_size
