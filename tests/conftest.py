"""What every test shares: seeds, the device, and Triton's interpreter where there is no GPU."""

import os
import sys
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch

from tests import garbage

# before any kernel is imported: triton reads it at decoration time
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# no test reaches a network, and none writes to an account
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
# beside pytest-xdist's processes, a pool of compiling processes lost a kernel, and its test waited in vain
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# GPU memory that PyTorch may keep from test to test
KEPT_BYTES = 2**30


def pytest_configure(config):
    # pytest-xdist runs one process per core
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        from tests.interpreter import waste_nothing

        waste_nothing()


# runs before pytest selects by marks
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # these take minutes each: a worker that began one of them last would end long after the others
    longest = ["train", "faults", "hopper_on_cpu", "attention_block_sparse", "restarts", "hopper"]
    places = {f"test_{name}.py": place for place, name in enumerate(longest)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    sees_gpu = torch.cuda.is_available()
    # a process that sees a GPU does not interpret kernels, as tests without one expect
    reason = "runs without a GPU: CUDA_VISIBLE_DEVICES= python -m pytest" if sees_gpu else "needs a CUDA GPU"
    for item in items:
        # tests that take whichever device there is run on the GPU here: -m gpu selects them too
        if sees_gpu and "device" in item.fixturenames:
            item.add_marker("gpu")
        if ("gpu" in item.keywords) != sees_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def same_beginning():
    garbage.leave_out()
    torch.manual_seed(0)
    # training chooses TF32 for its process, which other tests share here
    torch.set_float32_matmul_precision("highest")
    # what a test replaces in the kernels' host code would not be asked by a call that is repeated
    if "kernels.repeats" in sys.modules:
        sys.modules["kernels.repeats"].recipes.clear()
    yield
    # other processes lack the memory that PyTorch keeps after a large test: 13 of them filled 80 GB
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def other_default_dtype(request):
    """A context in which PyTorch's default dtype is not float32, as code around ours may have set it."""

    @contextmanager
    def entered():
        before = torch.get_default_dtype()
        torch.set_default_dtype(request.param)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return entered


@pytest.fixture
def figures(monkeypatch) -> list:
    """The Matplotlib figures that are saved; no file is written."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **options: saved.append(figure))
    return saved


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    """Memory that is read before it is written is nan or, for integers, the largest."""
    # building a run, as other tests do, turns it off
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_weights_are_drawn(monkeypatch):
    """Random numbers for weights come only to tensors without memory."""

    def draw(tensor, *arguments, **options):
        assert tensor.is_meta, f"{tuple(tensor.shape)} would be drawn, and then loaded"
        return tensor

    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, draw)


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs that torch.compile makes. The compiler behind it changes none of them."""
    # a slow import, for a few tests
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr("model.compiled.compiled_once", cache(torch.compile))
    return counter
