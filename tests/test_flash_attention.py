"""flash_attention against its definition: out, lse and all gradients, by the one rule of accuracy.py.

On a machine without a GPU the kernels run in Triton's interpreter, in fp32 and fp16.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kernels import problem
from kernels.flash_attention import flash_attention
from kernels.intervals import document_bounds
from kernels.operators import attention_backward, attention_forward
from kernels.problem import dot_precision
from kernels.reference import attention_reference
from kernels.registration import on_its_gpu
from tests.accuracy import assert_as_accurate_as_torch, assert_within_rule, random_qkv

# bf16 dots are wrong in the interpreter
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# around the edges of the tiles that the interpreter and the GPUs use
LENGTHS = [1, 31, 32, 33, 63, 64, 65, 100]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_is_as_accurate_as_torch_at_any_length(seq_len, causal, dtype, device):
    q, k, v = random_qkv(1, seq_len, seq_len, 1, 1, 32, dtype, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 70), (70, 1), (33, 65), (65, 33), (32, 96)])
def test_causal_is_aligned_to_the_last_query_and_key(seq_q, seq_k, causal, device):
    q, k, v = random_qkv(1, seq_q, seq_k, 1, 1, 16, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, causal=causal)


@pytest.mark.parametrize(("n_head", "n_kv_head"), [(3, 3), (4, 2), (3, 1)])
def test_heads_share_keys_and_values_in_groups(n_head, n_kv_head, device):
    q, k, v = random_qkv(2, 40, 40, n_head, n_kv_head, 16, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 128, 136, 192, 256])
def test_head_dim_may_be_any_multiple_of_eight(head_dim, device):
    q, k, v = random_qkv(1, 37, 37, 1, 1, head_dim, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 30.0, 1000.0])
def test_is_accurate_for_tiny_and_huge_logits(scale, device):
    q, k, v = random_qkv(1, 65, 65, 1, 1, 16, torch.float16, device, scale=scale)
    assert_as_accurate_as_torch(flash_attention, q, k, v)


def test_a_loss_of_lse_alone_is_as_accurate_as_torch(device):
    # no gradient of out comes then
    inputs = random_qkv(1, 40, 40, 2, 1, 16, torch.float32, device)
    dlse = torch.randn(1, 2, 40, device=device)

    def gradients(attention, dtype):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
        _, lse = attention(q, k, v, return_lse=True)
        return torch.autograd.grad(lse, (q, k, v), dlse.to(lse.dtype), materialize_grads=True)

    ours = gradients(flash_attention, torch.float32)
    pt, truth = (gradients(attention_reference, dtype) for dtype in (torch.float32, torch.float64))
    for name, *of_each in zip(("dq", "dk", "dv"), ours, pt, truth, strict=True):
        assert_within_rule(name, *of_each)
    assert not ours[2].any()


def test_softmax_scale_replaces_the_default(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, softmax_scale=0.7)


def test_views_of_a_packed_tensor_and_a_gradient_without_strides_are_read(device):
    packed = torch.randn(2, 40, 3, 2, 16, device=device, requires_grad=True)
    reference = packed.detach().double().requires_grad_()
    # the gradient of a sum has stride 0 everywhere
    flash_attention(*packed.unbind(2)).sum().backward()
    attention_reference(*reference.unbind(2)).sum().backward()
    torch.testing.assert_close(packed.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("summed", [(1,), (0, 2), (3,), (0, 1, 2, 3)], ids=str)
def test_gradients_behind_a_sum_are_as_accurate_as_others(summed, head_dim, device):
    # 64: on Hopper its own kernels; which dimensions are written out first depends on those summed
    q, k, v = random_qkv(2, 70, 70, 2, 1, head_dim, torch.float16, device)
    out = flash_attention(q, k, v)
    small = torch.randn([1 if d in summed else n for d, n in enumerate(out.shape)], device=device).half()
    dense = torch.autograd.grad(out, (q, k, v), small.expand(out.shape).contiguous(), retain_graph=True)
    expanded = torch.autograd.grad(out, (q, k, v), small.expand(out.shape))
    for a, b in zip(expanded, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_head_major_tensors_are_read_in_place(device):
    q, k, v = (torch.randn(2, 3, 40, 16, device=device).transpose(1, 2) for _ in range(3))
    assert_as_accurate_as_torch(flash_attention, q, k, v)


@pytest.mark.parametrize(
    ("distance", "strides"),
    [
        (2**25 + 2**20, lambda distance: (16, distance, 16, 1)),
        (2**27 + 2**24, lambda distance: (64, 1, 64, distance)),
    ],
    ids=["tokens", "channels"],
)
def test_tokens_and_channels_may_lie_far_apart_in_memory(distance, strides, device):
    # 64 tokens or 16 channels over more than 2**31 elements, of which hardly any memory is touched
    far = torch.empty(2**31 + 2**28, dtype=torch.float16, device=device)
    far = far.as_strided((1, 64, 1, 16), strides(distance)).copy_(torch.randn(1, 64, 1, 16))
    near = far.contiguous()
    results = []
    for x in (far, near):
        inputs = [x.detach().requires_grad_() for _ in range(3)]
        out = flash_attention(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("shape", "dimension"), [((3, 40, 1, 16), 0), ((1, 40, 3, 16), 2)], ids=["batches", "heads"]
)
def test_batches_and_heads_may_begin_behind_two_billion_elements(shape, dimension, device):
    # q, k, v and dout lie between each other's parts; hardly any of the memory is touched. Offsets of 32 bits
    # would point before it, where no process may read
    distance, part = 2**30 + 64, 40 * 16
    memory = torch.empty(2 * distance + 4 * part, dtype=torch.float16, device=device)
    strides = [part, 16, 16, 1]
    strides[dimension] = distance
    near = [torch.randn(shape, device=device).half() for _ in range(4)]
    far = [memory.as_strided(shape, strides, i * part).copy_(x) for i, x in enumerate(near)]
    results = []
    for *inputs, dout in (near, far):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = flash_attention(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_are_the_same_bits_in_every_run(device):
    q, k, v = random_qkv(1, 100, 100, 2, 1, 16, torch.float32, device)
    runs = [
        torch.autograd.grad(flash_attention(q, k, v, deterministic=True).sum(), (q, k, v)) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_kernels_run_while_the_gpu_of_their_tensors_is_the_current_one(current, entered, monkeypatch):
    now = []

    class DeviceOf(torch.cuda.device_of):
        def __init__(self, tensor):
            super().__init__(torch.empty(0))
            self.its = tensor.get_device()

        def __enter__(self):
            now.append(self.its)

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    of_second_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    assert on_its_gpu(lambda tensor, *others: (list(now), others))(of_second_gpu, 2, 3) == (entered, (2, 3))


@pytest.mark.parametrize("everything", [False, True])
def test_operators_keep_the_contract_of_torch_library(everything, device):
    q, k, v = random_qkv(1, 20, 20, 2, 1, 16, torch.float32, device)
    options = (None, None, None, [], 0.25, True, None, 0.0, False, None)
    dlse = None
    if everything:
        # documents, dropout, a gradient of lse, deterministic
        ids = (torch.arange(20, device=device) // 8).int()[None]
        bounds = document_bounds(ids, 20, causal=True, window=5)
        options = (*bounds, torch.tensor([3], device=device), [], 0.25, False, None, 0.3, True, 4.5)
        dlse = torch.randn(1, 2, 20, device=device)
    torch.library.opcheck(attention_forward, (q, k, v, *options))
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = attention_forward(q, k, v, *options)
    torch.library.opcheck(attention_backward, (torch.randn_like(out), dlse, q, k, v, out, lse, *options))


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("windows", [(None, None), (7, 20)], ids=str)
def test_compiles_into_one_graph_that_serves_every_batch_length_and_mask(windows, with_documents, device):
    compiles = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=True, backend=compiles)
    counts = []
    for batch, lengths, window in zip((3, 2), ((30, 10), (1, 2, 30)), windows, strict=True):
        options = {"window": window} if window else {}
        seq_len = sum(lengths)
        if with_documents:
            ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            options["document_ids"] = ids.int().expand(batch, -1).contiguous().to(device)
        q, k, v = random_qkv(batch, seq_len, seq_len, 1, 1, 16, torch.float32, device)
        assert_as_accurate_as_torch(compiled, q, k, v, **options)
        counts.append(compiles.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_passes_drop_the_same_and_each_call_anew(recompute, device):
    def attend(q, k, v):
        return flash_attention(q * 1.0, k, v, dropout_p=0.5)

    def block(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False) if recompute else attend(q, k, v)

    # its partitioner is the one that recomputes what was checkpointed
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    for batch, seq_len in ((3, 40), (2, 33)):
        q, k, v = random_qkv(batch, seq_len, seq_len, 2, 1, 16, torch.float32, device)
        out = compiled(q, k, v)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
        # out is linear in v, by one mask
        torch.testing.assert_close((out * dout).sum(), (dv * v).sum(), rtol=1e-4, atol=1e-3)
        assert not torch.equal(compiled(q, k, v), out)


def test_autocast_casts_to_its_dtype(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)
    with torch.autocast(device.type, dtype=torch.float16):
        out = flash_attention(q, k, v)
    assert out.dtype == torch.float16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_activation_checkpointing_repeats_the_same_dropout(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)

    def gradients(recompute: bool):
        torch.manual_seed(1)
        if recompute:
            out = checkpoint(flash_attention, q, k, v, dropout_p=0.5, use_reentrant=False)
        else:
            out = flash_attention(q, k, v, dropout_p=0.5)
        return torch.autograd.grad(out.sum(), (q, k, v))

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_whose_scores_are_minus_infinity_count_for_nothing(causal, device):
    """As a mask that is added to the scores: here a channel of q that is 1, and of k 0 or -inf."""
    q, k, v = (x.detach() for x in random_qkv(1, 200, 200, 1, 1, 16, torch.float32, device))
    q[..., 0], k[..., 0] = 1.0, 0.0
    # whole blocks of keys, and some in a block
    k[:, :130, :, 0] = -torch.inf
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    seen = slice(130, None) if causal else slice(None)
    expected = attention_reference(q[:, seen], k[:, 130:], v[:, 130:], causal=causal, return_lse=True)
    torch.testing.assert_close(out[:, seen], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[..., seen], expected[1], rtol=1e-5, atol=1e-5)
    if causal:
        assert not out[:, :130].any()
        assert (lse[..., :130] == -torch.inf).all()


@pytest.mark.parametrize(
    ("arch", "hip", "precision"),
    [
        ("gfx90a", "6.4", "ieee"),
        ("gfx950", "6.4", "ieee"),
        ("gfx942", "6.4", "tf32"),
        ("sm_80", None, "tf32"),
    ],
)
def test_tf32_is_not_asked_of_gpus_for_which_triton_refuses_it(arch, hip, precision, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(problem, "architecture", lambda device: arch)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    q = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"), is_cuda=True)
    assert dot_precision(q) == precision


@pytest.mark.parametrize("setting", ["matmul precision", "allow_tf32", "of matrix products", "of all"])
def test_tf32_is_used_where_pytorch_uses_it_however_it_is_asked_for(setting, device):
    products, everything = torch.backends.cuda.matmul, torch.backends
    q, k, v = random_qkv(1, 8, 8, 1, 1, 16, torch.float32, device)
    before = products.fp32_precision
    products.fp32_precision = "none"
    assert dot_precision(q) == "ieee"
    try:
        match setting:
            case "matmul precision":
                torch.set_float32_matmul_precision("high")
            case "allow_tf32":
                products.allow_tf32 = True
            case "of matrix products":
                products.fp32_precision = "tf32"
            case "of all":
                everything.fp32_precision = "tf32"
        assert dot_precision(q) == "tf32"
        # a compiler that does not know TF32 would refuse it for 16 bits too
        assert dot_precision(q.half()) == "ieee"
        flash_attention(q, k, v)
    finally:
        everything.fp32_precision = "none"
        # as the older two settings understand it
        torch.set_float32_matmul_precision("highest")
        products.fp32_precision = before


def test_double_backward_is_refused_with_a_way_out(device):
    q, k, v = random_qkv(1, 8, 8, 1, 1, 16, torch.float32, device)
    (dq,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_reference"):
        dq.sum().backward()


def test_the_backward_operator_takes_a_gradient_of_lse_of_any_strides():
    q, k, v = (x.detach() for x in random_qkv(2, 40, 40, 2, 1, 16, torch.float32, "cpu"))
    options = None, None, None, [], 0.25, True, None, 0.0, False, None
    out, lse = attention_forward(q, k, v, *options)
    dlse = torch.randn(2, 40, 2).transpose(1, 2)
    assert not dlse.is_contiguous()
    ours, expected = (
        attention_backward(out, x, q, k, v, out, lse, *options) for x in (dlse, dlse.contiguous())
    )
    assert all(map(torch.equal, ours, expected))
