"""Block-sparse attention against its definition with the expanded mask: forward, backward, all combined."""

import time
from importlib import import_module

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kernels import block_masks
from kernels.block_mask import BlockMask
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.operators import attention_backward, attention_forward, use_implementation
from kernels.portable.dkdv import dkdv_kernel
from kernels.portable.dq import dq_kernel
from kernels.portable.forward import forward_kernel
from kernels.reference import attention_reference, visible_keys
from kernels.tiles import INTERPRETER, Tile
from scripts import benchmark_block_sparse as benchmark
from tests.accuracy import assert_as_accurate_as_torch, holes, random_qkv, run
from tests.on_a_gpu import IS_HOPPER, on_hopper

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
T = 200


def pattern(name: str, device, block_size: int = 64, seq_len: int = T) -> BlockMask:
    return block_masks.parse(name, seq_len, block_size=block_size, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["causal()", "window(70)", "strided(2) | window(30)", "sinks(5) | window(64)"]
)
def test_patterns_are_as_accurate_as_torch(name, dtype, device):
    q, k, v = random_qkv(1, T, T, 1, 1, 16, dtype, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=pattern(name, device))


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("block_size", [64, 128])
def test_lengths_need_not_be_whole_blocks(seq_len, block_size, device):
    q, k, v = random_qkv(1, seq_len, seq_len, 1, 1, 16, torch.float32, device)
    mask = pattern("butterfly() & sinks(100) | window(9)", device, block_size, seq_len)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, causal=False)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask)


@pytest.mark.parametrize(("mask_batch", "mask_head"), [(2, 1), (1, 2), (2, 2)])
def test_masks_differ_by_batch_and_head_and_heads_share_keys(mask_batch, mask_head, device):
    q, k, v = random_qkv(2, 130, 130, 2, 1, 16, torch.float32, device)
    mask = holes(mask_batch, mask_head, 130, 130, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, causal=False)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": 75},
        {"document_ids": True},
        {"document_ids": True, "window": 50},
        {"document_ids": True, "causal": False},
        {"dropout_p": 0.2, "dropout_seed": 5},
        {"dropout_p": 0.2, "dropout_seed": 5, "document_ids": True},
        {"deterministic": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["holes", "strided(2) | window(30)"])
def test_everything_of_dense_attention_works_with_a_block_mask(kind, options, device):
    q, k, v = random_qkv(1, T, T, 2, 1, 16, torch.float32, device)
    options = dict(options)
    if "document_ids" in options:
        ids = torch.tensor([0] * 40 + [1] * 90 + [2] * 5 + [3] * 65)
        options["document_ids"] = ids[None].int().to(device)
    mask = holes(1, 2, T, T, device) if kind == "holes" else pattern(kind, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


TILE_FORMS = {
    "keys first": {"dkdv": Tile(32, 64, 4, 1, keys_first=True)},
    "queries first": {"dkdv": Tile(64, 32, 4, 1)},
    "float32's smallest": {name: Tile(16, 32, 4, 1) for name in ("forward", "dq", "dkdv")},
    "float32's of sixteen keys": {name: Tile(32, 16, 4, 1) for name in ("forward", "dq", "dkdv")},
    "held": {name: Tile(32, 32, 4, 1, held=True) for name in ("forward", "dq")},
    "not held": {name: Tile(32, 32, 4, 1) for name in ("forward", "dq")},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has tiles of its own")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2, "dropout_seed": 5}, {"window": 75}], ids=str)
@pytest.mark.parametrize("tiles", TILE_FORMS.values(), ids=TILE_FORMS)
def test_every_form_of_a_tile_computes_the_same(tiles, options, device, monkeypatch):
    for name, tile in tiles.items():
        monkeypatch.setitem(INTERPRETER, name, tile)
    q, k, v = random_qkv(1, 130, 130, 1, 1, 24, torch.float32, device)
    for mask in (pattern("window(70) | strided(2)", device, 64, 130), None):
        assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has tiles of its own")
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 75},
        {"document_ids": True},
        {"dropout_p": 0.2, "dropout_seed": 5},
        {"dropout_p": 0.2, "dropout_seed": 5, "document_ids": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [24, 72, 136])
@pytest.mark.parametrize("form", ["keys first", "queries first"])
def test_every_order_of_dk_and_dv_computes_the_same(form, head_dim, options, device, monkeypatch):
    # the order depends on the mask, dropout, and whether head_dim is above 64 and above 128
    monkeypatch.setitem(INTERPRETER, "dkdv", TILE_FORMS[form]["dkdv"])
    q, k, v = random_qkv(1, 130, 130, 1, 1, head_dim, torch.float32, device)
    options = dict(options)
    if "document_ids" in options:
        options["document_ids"] = torch.tensor([[0] * 40 + [1] * 35 + [2] * 55], dtype=torch.int32)
    for mask in (holes(1, 1, 130, 130, device), None):
        assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(70, 200), (200, 70)])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_may_differ_in_number(seq_q, seq_k, causal, device):
    q, k, v = random_qkv(1, seq_q, seq_k, 2, 2, 16, torch.float32, device)
    mask = holes(1, 1, seq_q, seq_k, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, causal=causal)


def test_a_causal_block_mask_leaves_packed_sequences_causal(device):
    # one sequence of more queries than keys, one of more keys: causal in all is not causal in each
    cu_seqlens, cu_seqlens_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 60, 80], [0, 20, 80])
    )
    q, k, v = (x[0].detach() for x in random_qkv(1, 80, 80, 1, 1, 16, torch.float32, device))
    mask = block_masks.window(80, 50, block_size=64, device=device)
    out = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens_k, block_mask=mask)
    visible = torch.zeros(80, 80, dtype=torch.bool, device=device)
    visible[:60, :20] = visible_keys(60, 20, causal=True, device=device)[0, 0]
    visible[60:, 20:] = visible_keys(20, 60, causal=True, device=device)[0, 0]
    expected = attention_reference(
        q[None],
        k[None],
        v[None],
        causal=False,
        block_mask=mask & block_masks.from_dense(visible, block_size=64),
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)


def test_packed_sequences_take_a_block_mask_of_all_their_tokens(device):
    starts = torch.tensor([0, 90, 91, 200], dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([90, 1, 109]))[None].int().to(device)
    q, k, v = random_qkv(1, T, T, 2, 1, 16, torch.float32, device)
    mask = holes(1, 2, T, T, device)

    def packed(q, k, v, return_lse, document_ids, block_mask):
        out, lse = flash_attention_varlen(
            q[0], k[0], v[0], starts, return_lse=return_lse, block_mask=block_mask
        )
        return out[None], lse[None]

    assert_as_accurate_as_torch(packed, q, k, v, document_ids=ids, block_mask=mask)


def test_rows_without_a_block_give_zero_and_no_gradient(device):
    q, k, v = random_qkv(1, T, T, 1, 1, 16, torch.float32, device)
    row, column = torch.tensor([0, 2], device=device), torch.tensor([0, 1], device=device)
    mask = block_masks.from_blocks(row, column, T, block_size=64)
    out, lse = flash_attention(q, k, v, block_mask=mask, causal=False, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.sum() + lse.clamp(min=-9).sum(), (q, k, v))
    for dropped in (slice(64, 128), slice(192, 200)):
        assert not out[:, dropped].any()
        assert (lse[..., dropped] == -torch.inf).all()
        assert not dq[:, dropped].any()
    assert not dk[:, 128:].any()
    assert not dv[:, 128:].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_an_empty_mask_gives_zeros(device):
    q, k, v = random_qkv(1, 70, 70, 1, 1, 16, torch.float32, device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    mask = block_masks.from_blocks(nothing, nothing, 70, block_size=64)
    gradients = run(
        flash_attention, q, k, v, torch.ones_like(q), torch.ones(1, 1, 70, device=device), block_mask=mask
    )
    assert not any(x.nan_to_num(neginf=0.0).any() for x in gradients)


def test_a_mask_of_everything_gives_the_bits_of_dense_attention_in_the_same_tiles(device):
    q, k, v = random_qkv(1, 192, 192, 1, 1, 16, torch.float32, device)
    dense, sparse = (
        flash_attention(q, k, v, block_mask=mask) for mask in (None, pattern("causal()", device, seq_len=192))
    )
    torch.testing.assert_close(dense, sparse, rtol=1e-6, atol=1e-6)


def test_gradients_are_the_same_bits_in_every_run(device):
    q, k, v = random_qkv(1, 100, 100, 2, 1, 16, torch.float32, device)
    mask = holes(1, 2, 100, 100, device)
    runs = [
        torch.autograd.grad(flash_attention(q, k, v, block_mask=mask, deterministic=True).sum(), (q, k, v))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_keep_the_contract_of_torch_library(device):
    q, k, v = random_qkv(1, 33, 33, 1, 1, 16, torch.float32, device)
    lists = pattern("window(9)", device, seq_len=33).tensors()
    options = (None, None, None, lists, 0.25, False, None, 0.0, False, None)
    torch.library.opcheck(attention_forward, (q, k, v, *options))
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = attention_forward(q, k, v, *options)
    torch.library.opcheck(attention_backward, (torch.randn_like(out), None, q, k, v, out, lse, *options))


def test_one_compiled_graph_serves_other_masks_of_other_lengths(device):
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=True, backend=backend)
    counts = []
    # torch traces sizes that are equal by chance as one: none of these are
    for name, seq_len in (("window(9) | strided(2)", 150), ("window(40) | sinks(3)", 65), ("fixed(2)", 140)):
        q, k, v = random_qkv(2, seq_len, seq_len, 1, 1, 16, torch.float32, device)
        mask = pattern(name, device, seq_len=seq_len)
        torch.testing.assert_close(
            compiled(q, k, v, block_mask=mask), attention_reference(q, k, v, block_mask=mask)
        )
        counts.append(len(frames))
    assert counts == [counts[0]] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 200},
        {"document_ids": True},
        {"dropout_p": 0.1, "dropout_seed": 3},
        {"dropout_p": 0.1, "dropout_seed": 3, "document_ids": True, "window": 70},
    ],
    ids=str,
)
def test_a_gpu_computes_everything_as_accurately_as_torch(options, block_size, head_dim, dtype, device):
    options = dict(options)
    if "document_ids" in options:
        options["document_ids"] = torch.randint(5, (2, 1000), device=device).sort(dim=1).values.int()
    q, k, v = random_qkv(2, 1000, 1000, 4, 2, head_dim, dtype, device)
    for mask in (
        pattern("window(150) | strided(3) | sinks(7)", device, block_size, 1000),
        block_masks.top_k(q, k, 3, causal=options.get("causal", True), block_size=block_size),
        block_masks.from_dense(holes(2, 4, 1000, 1000, device).to_dense(), block_size=block_size),
    ):
        assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sums_dq", [True, False])
def test_the_hopper_kernels_walk_the_lists_as_accurately_as_torch(
    sums_dq, head_dim, dtype, device, monkeypatch
):
    # long lists and short ones are otherwise computed by different kernels
    monkeypatch.setattr(import_module("kernels.hopper.launch"), "sum_pays", lambda *_: sums_dq)

    def attention(*arguments, **options):
        with use_implementation("hopper"):
            return flash_attention(*arguments, **options)

    for seq_len in (1, 64, 127, 128, 129, 193, 1000):
        q, k, v = random_qkv(2, seq_len, seq_len, 4, 2, head_dim, dtype, device)
        for name in ("window(100)", "strided(3) | sinks(7)", "butterfly() & sinks(300)"):
            mask = pattern(name, device, 128, seq_len)
            assert_as_accurate_as_torch(attention, q, k, v, block_mask=mask, causal=mask.causal)
    # more tiles than blocks are dealt, of uneven lengths; the reference takes 4 GiB
    q, k, v = random_qkv(1, 1500, 1500, 48, 16, head_dim, dtype, device)
    assert_as_accurate_as_torch(
        attention, q, k, v, block_mask=pattern("strided(3) | window(500)", device, 128, 1500)
    )
    # of each batch and head its own, lines without a block, other numbers of queries and keys
    q, k, v = random_qkv(2, 300, 700, 4, 4, head_dim, dtype, device)
    mask = block_masks.from_dense(holes(2, 4, 300, 700, device).to_dense())
    assert_as_accurate_as_torch(attention, q, k, v, block_mask=mask, causal=False)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "padding", "documents of a causal mask"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("sums_dq", [True, False])
def test_the_hopper_kernels_take_what_intervals_leave_of_the_lists(
    sums_dq, head_dim, kind, dropout_p, device, monkeypatch
):
    monkeypatch.setattr(import_module("kernels.hopper.launch"), "sum_pays", lambda *_: sums_dq)
    for seq_q, seq_k in ((1000, 1000), (300, 700)):
        options = {"causal": kind not in ("padding", "documents"), "dropout_p": dropout_p, "dropout_seed": 3}
        if kind == "window":
            options["window"] = 170
        ids = (torch.rand(2, seq_k, device=device) < 0.01).cumsum(1).int()
        if kind == "padding":
            ids = -(torch.arange(seq_k, device=device) < torch.tensor([[70], [256]], device=device)).int()
        if kind not in ("causal", "window"):
            options["document_ids"] = ids
        q, k, v = random_qkv(2, seq_q, seq_k, 4, 2, head_dim, torch.bfloat16, device)
        masks = [
            block_masks.from_dense(holes(*shape, seq_q, seq_k, device).to_dense())
            for shape in ((1, 1), (2, 1), (2, 4))
        ]
        if seq_q == seq_k:
            masks.append(pattern("strided(3) | window(200)", device, 128, seq_q))
        for mask in masks:
            with use_implementation("hopper"):
                assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sums_dq", [True, False])
def test_heads_that_share_keys_may_have_masks_of_their_own_on_hopper(
    sums_dq, head_dim, dtype, device, monkeypatch
):
    monkeypatch.setattr(import_module("kernels.hopper.launch"), "sum_pays", lambda *_: sums_dq)
    q, k, v = random_qkv(2, 1000, 1000, 6, 2, head_dim, dtype, device)
    for mask in (
        block_masks.top_k(q, k, 3),
        block_masks.from_dense(holes(1, 6, 1000, 1000, device).to_dense()),
    ):
        for options in ({"causal": mask.causal}, {"causal": True, "dropout_p": 0.1, "dropout_seed": 3}):
            with use_implementation("hopper"):
                assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_documents_beside_a_block_mask(device):
    q, k, v = random_qkv(2, 1024, 1024, 2, 2, 64, torch.bfloat16, device)
    mask = block_masks.window(1024, 300, device=device)
    ids, others = ((torch.rand(2, 1024, device=device) < 0.01).cumsum(1).int() for _ in range(2))

    def attend():
        out = flash_attention(q, k, v, block_mask=mask, document_ids=ids, deterministic=True)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = attend()
    ids.copy_(others)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, attend(), strict=True))


@pytest.mark.gpu
@on_hopper
def test_other_documents_lengths_and_masks_compile_no_kernel_that_cuts_lists(device):
    kernel = import_module("kernels.hopper.cut_lists").cut_kernel
    counts = []
    for batch, seq_len, name in ((3, 300, "window(9)"), (1, 1000, "strided(3)"), (2, 65, "causal()")):
        q, k, v = random_qkv(batch, seq_len, seq_len, 2, 2, 64, torch.bfloat16, device)
        ids = (torch.rand(batch, seq_len, device=device) < 0.02).cumsum(1).int()
        mask = pattern(name, device, 128, seq_len)
        for given in (mask, BlockMask.stack([mask, pattern("sinks(70)", device, 128, seq_len)])):
            flash_attention(q, k, v, block_mask=given, document_ids=ids).sum().backward()
            counts.append(sum(len(c[0]) for c in kernel.device_caches.values()))
    assert counts == [counts[0]] * 6


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_kernels_give_the_same_bits_but_for_dq(head_dim, device, monkeypatch):
    monkeypatch.setattr(import_module("kernels.hopper.launch"), "sum_pays", lambda *_: True)
    q, k, v = random_qkv(2, 1111, 1111, 4, 2, head_dim, torch.bfloat16, device)
    mask = pattern("window(300) | strided(3)", device, 128, 1111)
    dout, runs = torch.randn_like(q), []
    with use_implementation("hopper"):
        for _ in range(20):
            out = flash_attention(q, k, v, block_mask=mask)
            dq, *others = torch.autograd.grad(out, (q, k, v), dout)
            runs.append((dq, [out, *others]))
    for dq, others in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, runs[0][1], strict=True))
        # summed in any order
        assert (dq - runs[0][0]).abs().max() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sums_dq", [True, False])
def test_new_masks_lengths_and_batches_compile_no_kernel(sums_dq, head_dim, device, monkeypatch):
    kernels = [forward_kernel, dkdv_kernel, dq_kernel]
    if IS_HOPPER:
        launch = import_module("kernels.hopper.launch")
        monkeypatch.setattr(launch, "sum_pays", lambda *_: sums_dq)
        kernels = [
            launch.forward_kernel, launch.backward_64_kernel, launch.backward_128_kernel,
            launch.backward_256_kernel, launch.dq_kernel,
        ]  # fmt: skip
    counts = []
    for batch, seq_len, name in ((3, 300, "window(9)"), (1, 1000, "strided(3)"), (2, 65, "causal()")):
        q, k, v = random_qkv(batch, seq_len, seq_len, 2, 2, head_dim, torch.bfloat16, device)
        mask = pattern(name, device, 128, seq_len)
        per_head = BlockMask.stack([mask, pattern("sinks(70)", device, 128, seq_len)])
        # from head to head 12, 32 and 4 numbers: 16 divides one of them
        for given in (mask, per_head, per_head.expand(batch, 2)):
            flash_attention(q, k, v, block_mask=given).sum().backward()
            counts.append(sum(len(c[0]) for kernel in kernels for c in kernel.device_caches.values()))
    assert counts == [counts[0]] * 9


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_a_new_mask_of_the_same_number_of_blocks(device):
    q, k, v = random_qkv(1, 512, 512, 2, 2, 64, torch.bfloat16, device)
    mask, other = (block_masks.bigbird(512, 1, 0, 1, seed=seed, device=device) for seed in (1, 2))
    assert [x.shape for x in mask.tensors()] == [x.shape for x in other.tensors()]
    expected = flash_attention(q, k, v, block_mask=other)
    flash_attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, block_mask=mask)
    for mine, new in zip(mask.tensors(), other.tensors(), strict=True):
        mine.copy_(new)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["power_of_two_strided()", "fixed(64)", "window(1024) | strided(16)"])
def test_the_mask_of_a_million_tokens_takes_a_second_and_100_mb(pattern, device):
    block_masks.parse(pattern, 2**15, device=device)
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    block_masks.parse(pattern, 2**20, device=device)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1.0
    assert torch.cuda.max_memory_allocated() - before < 100e6


@pytest.mark.gpu
def test_a_million_tokens_need_memory_for_their_outputs_and_a_mask_of_a_second(device):
    seq_len = 2**20
    block_masks.window(2**15, 1024, device=device)
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    mask = block_masks.window(seq_len, 1024, device=device) | block_masks.sinks(seq_len, 64, device=device)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1.0
    assert torch.cuda.max_memory_allocated() - before < 100e6
    q, k, v = (torch.randn(1, seq_len, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attention(q, k, v, block_mask=mask)
    # out and lse
    assert torch.cuda.max_memory_allocated() - before < 1.01 * (2 * out.numel() + 4 * seq_len)
    tail = attention_reference(q[:, -64:], k[:, -1087:], v[:, -1087:], window=1024, return_lse=True)
    head = attention_reference(q[:, -64:], k[:, :64], v[:, :64], causal=False, return_lse=True)
    share = torch.sigmoid(tail[1] - head[1]).transpose(1, 2)[..., None]
    torch.testing.assert_close(
        out[:, -64:].float(), tail[0] * share + head[0] * (1 - share), rtol=2e-2, atol=2e-3
    )


@pytest.mark.parametrize("seq_len", [1000, 1024])
@pytest.mark.parametrize("name", ["causal()", "window(300) | strided(3)"])
def test_flex_attention_is_measured_with_the_same_blocks(name, seq_len):
    visible = benchmark.flex_mask(name, 128)
    mine = benchmark.flex_block_mask(pattern(name, "cpu", 128, seq_len), visible)
    own = create_block_mask(visible, None, None, seq_len, seq_len, "cpu", BLOCK_SIZE=128)
    assert torch.equal(mine.to_dense(), own.to_dense())
    assert torch.equal(mine.full_kv_num_blocks, own.full_kv_num_blocks)
    # and inside of these, to the token
    i = torch.arange(seq_len)
    expected = pattern(name, "cpu", 128, seq_len).to_dense()[0, 0]
    assert torch.equal(visible(0, 0, i[:, None], i), expected)


X = torch.zeros(2, 100, 4, 16, device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(100, 100, dtype=torch.bool), "block_mask must be a BlockMask, got Tensor"),
        (block_masks.causal(101, device=X.device), "built for seq_q=101, got 100 tokens"),
        (holes(1, 3, 100, 100, X.device), "must have 1 or 4 heads, as q, got 3"),
        (holes(3, 1, 100, 100, X.device), "must have 1 or 2 batches, as q, got 3"),
    ],
)
def test_a_mask_for_something_else_is_refused_with_the_numbers(mask, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(X, X, X, block_mask=mask)


def test_a_mask_of_two_batches_is_refused_for_one_without_naming_it_twice():
    with pytest.raises(ValueError, match="^block_mask must have 1 batch, as q, got 2$"):
        flash_attention(X[:1], X[:1], X[:1], block_mask=holes(2, 1, 100, 100, X.device))


def test_a_stack_is_causal_if_all_of_its_masks_are(device):
    make = {"block_size": 64, "device": device}
    masks = [block_masks.causal(128, **make), block_masks.butterfly(128, **make)]
    assert BlockMask.stack(masks[:1] * 2).causal
    assert not BlockMask.stack(masks).causal
    # the flag stands for the mask: what is not causal is cut by attention itself
    q, k, v = (torch.randn(1, 128, 2, 16, device=device) for _ in range(3))
    out = flash_attention(q, k, v, block_mask=BlockMask.stack(masks))
    expected = attention_reference(q, k, v, block_mask=BlockMask.stack(masks))
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{"window": 5000}, {"document_ids": True}], ids=str)
def test_lists_may_be_longer_than_what_is_counted_together(options, device):
    # 141 blocks of keys, two thirds of them in the list
    q, k, v = random_qkv(1, 70, 9000, 1, 1, 16, torch.float32, device)
    if "document_ids" in options:
        options = {"document_ids": (torch.arange(9000, device=device) // 4000).int()[None]}
    mask = holes(1, 1, 70, 9000, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, block_mask=mask, **options)
