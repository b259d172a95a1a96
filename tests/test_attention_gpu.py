"""What only a GPU can show: every feature in bf16, CUDA graphs, repeated runs, huge tensors, compilation."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.operators import use_implementation
from kernels.portable.backward import dkdv_kernel, dq_kernel, preprocess_kernel
from kernels.portable.forward import forward_kernel
from kernels.reference import attention_reference
from tests.accuracy import NAMES, assert_as_accurate_as_torch, assert_within_rule, random_qkv, run
from tests.test_hopper import on_hopper

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[None, "portable"], ids=["chosen", "portable"], autouse=True)
def implementation(request):
    with use_implementation(request.param):
        yield


HALF = [torch.bfloat16, torch.float16]


def documents(n_documents: int, batch: int, seq_len: int) -> torch.Tensor:
    return torch.randint(n_documents, (batch, seq_len), device="cuda").sort(dim=1).values.int()


def with_documents(options: dict, seq_q: int, seq_k: int) -> dict:
    """The options of a test of two sequences, so many documents drawn as document_ids names."""
    if "document_ids" not in options:
        return options
    if seq_q > seq_k:
        pytest.skip("documents need as many keys as queries")
    return options | {"document_ids": documents(options["document_ids"], 2, seq_k)}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim, dtype, device):
    q, k, v = random_qkv(1, 129, 129, 2, 1, head_dim, dtype, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_need_not_be_on_the_current_gpu():
    q, k, v = random_qkv(1, 129, 129, 2, 1, 64, torch.bfloat16, "cuda:1")
    assert_as_accurate_as_torch(flash_attention, q, k, v)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(33, 33), (127, 127), (129, 129), (200, 513), (513, 200), (1, 1000)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 100},
        {"document_ids": 5},
        {"document_ids": 5, "window": 70},
        {"document_ids": 5, "causal": False},
        {"dropout_p": 0.1, "dropout_seed": 3},
        {"dropout_p": 0.1, "dropout_seed": 3, "document_ids": 5, "window": 70},
    ],
    ids=str,
)
def test_every_mask_with_dropout_and_grouped_heads(options, seq_q, seq_k, head_dim, dtype, device):
    options = with_documents(options, seq_q, seq_k)
    q, k, v = random_qkv(2, seq_q, seq_k, 6, 2, head_dim, dtype, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, **options)


@pytest.mark.parametrize("implementation", ["portable"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("head_dim", [32, 96, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_of_narrow_and_wide_heads(causal, head_dim, dtype, device):
    # no query sees fewer than four keys: of fewer, what cancels under dropout leaves its rounding
    q, k, v = random_qkv(2, 200, 203, 4, 2, head_dim, dtype, device)
    options = {"causal": causal, "dropout_p": 0.1, "dropout_seed": 2**40 + 3}
    assert_as_accurate_as_torch(flash_attention, q, k, v, **options)


@on_hopper
@pytest.mark.parametrize("implementation", ["hopper"], indirect=True)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 1), (129, 129), (1000, 1000), (200, 777), (777, 200)], ids=str
)
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 100}, {"document_ids": 5}, {"deterministic": True}], ids=str
)
def test_hopper_agrees_with_portable(options, seq_q, seq_k, head_dim, dtype, device):
    """Apart by no more than one of them may be from the truth, and in lse by float32's roundings."""
    options = with_documents(options, seq_q, seq_k)
    q, k, v = random_qkv(2, seq_q, seq_k, 6, 2, head_dim, dtype, device)
    dout, dlse = torch.randn_like(q), torch.randn(2, 6, seq_q, device=device)
    hopper = run(flash_attention, q, k, v, dout, dlse, **options)
    with use_implementation("portable"):
        portable = run(flash_attention, q, k, v, dout, dlse, **options)
    torchs = run(attention_reference, q, k, v, dout, dlse, **options)
    for name, x, pt, ref in zip(NAMES, hopper, torchs, portable, strict=True):
        if name == "lse":
            torch.testing.assert_close(x, ref, rtol=1e-5, atol=1e-5)
        else:
            assert_within_rule(name, x, pt, ref.double())


@pytest.mark.parametrize("strided", ["packed", "heads first", "odd stride"])
def test_every_layout(strided, device):
    if strided == "packed":
        q, k, v = torch.randn(2, 200, 3, 4, 64, device=device, dtype=torch.bfloat16).unbind(2)
    elif strided == "heads first":
        q, k, v = torch.randn(3, 2, 4, 200, 64, device=device, dtype=torch.bfloat16).transpose(2, 3)
    else:
        # 2-byte alignment only: TMA cannot read it
        q, k, v = torch.randn(3, 2, 200, 4, 65, device=device, dtype=torch.bfloat16)[..., 1:]
    assert_as_accurate_as_torch(flash_attention, q, k, v)


def test_varlen_in_bf16(device):
    lengths = torch.tensor([300, 1, 77, 0, 650])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    ids = torch.repeat_interleave(torch.arange(5), lengths).int()[None].to(device)
    q, k, v = random_qkv(1, 1028, 1028, 4, 2, 64, torch.bfloat16, device)

    def packed(q, k, v, return_lse, document_ids):
        out, lse = flash_attention_varlen(q[0], k[0], v[0], starts, return_lse=return_lse)
        return out[None], lse[None]

    assert_as_accurate_as_torch(packed, q, k, v, document_ids=ids)


def test_gradients_are_the_same_bits_in_a_hundred_runs(device):
    q, k, v = random_qkv(2, 1000, 1000, 8, 2, 64, torch.bfloat16, device)
    out = flash_attention(q, k, v, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_tensors_of_more_than_two_to_the_31_elements(device):
    # the last head of the last tokens lies beyond 2**31
    shape = (1, 2**20 + 64, 32, 64)
    storage = torch.empty(shape[1] * shape[2] * shape[3] * 3, device=device, dtype=torch.bfloat16)
    packed = storage.view(1, shape[1], 3, 32, 64)
    packed[:, :, :, -1] = torch.randn(1, shape[1], 3, 64, device=device).bfloat16()
    q, k, v = (x[:, :, -1:] for x in packed.unbind(2))
    assert q.storage_offset() + q.stride(1) * (shape[1] - 1) > 2**31
    out = flash_attention(q.requires_grad_(), k, v, window=128)
    out.sum().backward()
    tail = [x.detach()[:, -1024:].clone() for x in (q, k, v)]
    expected = attention_reference(*tail, window=128)
    torch.testing.assert_close(out[:, -512:], expected[:, -512:], rtol=2e-2, atol=2e-2)
    assert q.grad.isfinite().all()


def test_a_cuda_graph_replays_with_new_seeds_inputs_and_documents(device):
    q, k, v = random_qkv(2, 200, 200, 4, 2, 64, torch.bfloat16, device)
    ids, seed = documents(3, 2, 200), torch.tensor([1], device=device)

    def step():
        out = flash_attention(q, k, v, document_ids=ids, dropout_p=0.2, dropout_seed=seed)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    graph, captured = capture(step)
    for new in (7, 8):
        seed.fill_(new)
        ids.copy_(documents(5, 2, 200))
        with torch.no_grad():
            q.normal_()
        graph.replay()
        replayed = [x.clone() for x in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


@pytest.mark.parametrize("implementation", ["portable"], indirect=True)
def test_a_cuda_graph_draws_another_dropout_mask_in_every_replay(device):
    q, k, v = random_qkv(2, 200, 200, 4, 2, 64, torch.bfloat16, device)
    dout = torch.randn_like(q)

    def step():
        out = flash_attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    replays = []
    for _ in range(2):
        graph.replay()
        out, dq, _, dv = replayed = [x.detach().double() for x in captured]
        assert all(x.isfinite().all() for x in replayed)
        # out is linear in v: both sums are the same number where both passes drop the same
        products = out * dout
        assert (products.sum() - (dv * v).sum()).abs() < 0.05 * products.norm()
        replays.append((out, dq))
    assert not any(torch.equal(a, b) for a, b in zip(*replays, strict=True))


@on_hopper
@pytest.mark.parametrize("implementation", ["hopper"], indirect=True)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_cuda_graph_replays_both_passes_of_hopper(head_dim, deterministic, device):
    # more tiles than thread blocks: what counts them must begin anew in each replay
    q, k, v = random_qkv(4, 1111, 1111, 24, 12, head_dim, torch.bfloat16, device)
    dout = torch.randn_like(q)

    def step():
        out, lse = flash_attention(q, k, v, deterministic=deterministic, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.normal_()
        graph.replay()
        replayed = dict(zip(NAMES, (x.clone() for x in captured), strict=True))
        expected = dict(zip(NAMES, step(), strict=True))
        if not deterministic:
            # summed in any order
            torch.testing.assert_close(replayed.pop("dq"), expected.pop("dq"), rtol=2e-2, atol=1e-2)
        for name, x in replayed.items():
            assert torch.equal(x, expected[name]), name


def capture(step):
    """A CUDA graph of step(), which ran once before, and the tensors that each replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def test_inductor_compiles_it_into_a_model_once(device):
    layer = torch.nn.Linear(64, 192, device=device)

    def block(x, ids):
        q, k, v = layer(x).unflatten(-1, (3, 2, 32)).unbind(-3)
        return flash_attention(q, k, v, document_ids=ids).flatten(-2)

    compiles = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=compiles)
    counts = []
    for batch, seq_len in ((3, 200), (2, 133), (5, 64)):
        x, ids = torch.randn(batch, seq_len, 64, device=device), documents(4, batch, seq_len)
        with torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(compiled(x, ids), block(x, ids), rtol=2e-2, atol=2e-2)
            compiled(x, ids).sum().backward()
        counts.append(compiles.frame_count)
    assert counts == [counts[0]] * 3


def test_new_batches_lengths_windows_and_documents_compile_no_kernel(device):
    def n_compiled() -> int:
        kernels = (forward_kernel, preprocess_kernel, dkdv_kernel, dq_kernel)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def step(batch, seq_len, **options):
        q, k, v = random_qkv(batch, seq_len, seq_len, 2, 2, 64, torch.bfloat16, device)
        flash_attention(q, k, v, dropout_p=0.1, **options).sum().backward()

    counts = []
    # dropout runs on the portable kernels; the first round compiles
    rounds = ((3, 200, 16, 2), (2, 177, 33, 5), (5, 999, 1, 1), (1, 1, 7, 1))
    for batch, seq_len, window, n_documents in rounds:
        step(batch, seq_len)
        step(batch, seq_len, window=window)
        step(batch, seq_len, document_ids=documents(n_documents, batch, seq_len))
        counts.append(n_compiled())
    assert counts[0] > 0
    assert counts == [counts[0]] * 4


def test_checkpointing_in_bf16_repeats_the_same_dropout(device):
    q, k, v = random_qkv(1, 300, 300, 2, 2, 64, torch.bfloat16, device)
    results = []
    for recompute in (True, False):
        torch.manual_seed(1)
        attention = partial(flash_attention, dropout_p=0.5)
        out = checkpoint(attention, q, k, v, use_reentrant=False) if recompute else attention(q, k, v)
        results.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tf32_is_used_only_when_asked_for(device):
    q, k, v = random_qkv(1, 300, 300, 2, 2, 64, torch.float32, device)
    exact = flash_attention(q, k, v)
    truth = attention_reference(q.double(), k.double(), v.double())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rounded = flash_attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (exact - truth).abs().max() < 5e-6 < (rounded - truth).abs().max() < 5e-3


def test_memory_does_not_grow_with_the_square_of_the_length(device):
    peaks = []
    for seq_len in (4096, 8192):
        q, k, v = random_qkv(1, seq_len, seq_len, 4, 4, 64, torch.bfloat16, device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0]
