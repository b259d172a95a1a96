import random
import warnings
from functools import partial
from itertools import accumulate, product
from types import SimpleNamespace

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime import JITFunction

from kernels import block_masks, hopper, portable
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.hopper.arguments import keys_per_query
from kernels.hopper.order import division
from kernels.hopper.prepare_and_round import prepare_kernel, round_kernel
from kernels.hopper.sums import SLOTS
from kernels.hopper.tiles import forward_tile, sum_pays, turn_heads
from kernels.intervals import mean_keys
from kernels.operators import use_implementation
from kernels.problem import CannotBuildError, Problem
from kernels.reference import visible_keys
from tests.accuracy import (
    assert_as_accurate_as_torch,
    assert_close_to_truth,
    peaked_qkv,
    random_qkv,
    rising_qkv,
    run,
)
from tests.compile_apart import compile_apart, each_triton
from tests.on_a_gpu import on_hopper
from tests.sanitize_hopper import run_random_problem

# what one block may use of a multiprocessor
SHARED_MEMORY = 232448
# all of it, and what of it each block takes for the system
MULTIPROCESSOR, RESERVED = 233472, 1024


def problem(**changes) -> Problem:
    return Problem(**{"softmax_scale": 0.125, "causal": True} | changes)


either_order = pytest.mark.parametrize("deterministic", [False, True])


@pytest.fixture(autouse=True)
def dq_is_summed_unless_deterministic(monkeypatch):
    """At any length: short rows are otherwise left to dq.py, which `either_order` asks for itself."""
    monkeypatch.setattr("kernels.hopper.launch.sum_pays", lambda *_: True)


def hopper_attention(*arguments, **options):
    with use_implementation("hopper"):
        return flash_attention(*arguments, **options)


def lists(**options) -> tuple[torch.Tensor, ...]:
    """A block mask of 8 tokens, as a problem has it."""
    return tuple(block_masks.window(8, 3, **options).tensors())


@each_triton
@pytest.mark.parametrize("mask", ["full", "causal", "window", "intervals", "blocks"])
def test_every_configuration_compiles_ahead_of_time_without_waste(mask, version):
    configurations = compile_apart("tests.ahead_of_time_hopper", version, f"mask={mask}")
    if version == "pinned":
        # fp16 has other instructions where P is read back, and forward other tiles, under every mask
        kernels = "forward,backward" if mask == "causal" else "forward"
        fp16 = [f"mask={mask}", "dtype=fp16", f"kernel={kernels}"]
        configurations += compile_apart("tests.ahead_of_time_hopper", version, *fp16)
    assert_nothing_is_wasted(configurations)


@each_triton
@pytest.mark.parametrize("mask", ["full", "causal", "window", "intervals", "blocks"])
def test_every_kernel_compiles_with_dropout_without_waste(mask, version):
    given = [f"mask={mask}", "dropout=true"]
    configurations = compile_apart("tests.ahead_of_time_hopper", version, *given)
    if version == "pinned":
        given += ["dtype=fp16", "kernel=forward"]
        configurations += compile_apart("tests.ahead_of_time_hopper", version, *given)
    assert_nothing_is_wasted(configurations)


def assert_nothing_is_wasted(configurations: list[dict]) -> None:
    assert {(c["kernel"], c["head_dim"]) for c in configurations} == {
        *((kernel, head_dim) for kernel in ("forward", "dkdv", "dq") for head_dim in (64, 128, 192, 256)),
        *(("backward", head_dim) for head_dim in (64, 128)),
    }
    for c in configurations:
        assert c["shared"] <= SHARED_MEMORY, c
        # blocks that do not fit beside each other run one after the other, and nothing says so
        assert c["blocks"] * (c["shared"] + RESERVED) <= MULTIPROCESSOR, c
        # serialized products: a silent loss of half the speed
        assert c["warnings"] == [], c
        assert c["hgmma"] > 0, c
        assert c["spilled"] == 0, c
        # the forward kernel of narrower heads carries P from step to step; no other has such an operand
        carries_p = c["kernel"] == "forward" and c["head_dim"] <= 128
        assert carries_p or c["overwritten"] == [], c


def test_division_by_multiplication_is_exact():
    for divisor in (1, 2, 3, 5, 7, 12, 96, 128, 1000, 2**20 - 1, 2**20, 2**20 + 1):
        packed = division(divisor)
        multiplier, shift = packed & (2**32 - 1), packed >> 32 & 31
        assert 2**31 <= packed < 2**63
        for n in (0, 1, divisor - 1, divisor, divisor + 1, 7 * divisor - 1, 7 * divisor, 2**30 - 1):
            assert (n * multiplier >> 32) + n >> shift == n // divisor


def test_refuses_what_it_does_not_cover_and_says_why():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    reason = hopper.refusal(problem(), q, q, q)
    assert "compute capability 9.0" in reason
    with use_implementation("hopper"), pytest.raises(ValueError, match="hopper does not take this problem"):
        flash_attention(q.half(), q.half(), q.half())


def test_an_amd_gpu_of_version_nine_is_no_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper.is_hopper.cache_clear()
    assert hopper.is_hopper(torch.device("cuda", 99))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    hopper.is_hopper.cache_clear()
    assert not hopper.is_hopper(torch.device("cuda", 99))
    hopper.is_hopper.cache_clear()


def test_leaves_more_rows_than_it_numbers_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(2, 2**28, 2, 64)
    expected = f"1 to {2**30} rows over all heads, each head padded by 128, not 4 heads of {2**28} queries"
    assert expected in hopper.refusal(problem(), q, q, q)


def test_leaves_more_heads_than_a_grid_has_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "build_error", lambda: None)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(2**13, 1, 8, 64)
    assert "at most 65535 heads over all batches, not 65536" in hopper.refusal(problem(), q, q, q)


def test_heads_of_a_gradient_may_begin_behind_two_billion_elements():
    """A head-major gradient of a million tokens; most of its memory is never touched."""
    distance, (seq_len, n_head, head_dim) = 2**30, (8, 3, 64)
    dout = torch.empty(2 * distance + seq_len * head_dim, dtype=torch.float16)
    dout = dout.as_strided((1, seq_len, n_head, head_dim), (n_head * distance, head_dim, distance, 1))
    dout.copy_(torch.randn(dout.shape))
    out, lse = torch.randn(dout.shape).half(), torch.randn(1, n_head, seq_len)
    minus_lse, minus_delta = torch.empty(2, n_head, 128)
    dq_sum, counts = torch.empty(n_head * 128, head_dim), torch.empty(n_head, 4, dtype=torch.int32)
    prepare_kernel[(1, n_head)](
        out, dout, lse, lse, minus_lse, minus_delta, dq_sum, counts,
        *out.stride()[:3], *dout.stride()[:3], n_head, seq_len, 128, n_head, n_head, 0.125, 1.0,
        HEAD_DIM=head_dim, WIDTH=64, BLOCK_M=128, COUNTS=4, HAS_DLSE=False,
    )  # fmt: skip
    expected = -(out.float() * dout.float()).sum(-1)[0].T
    torch.testing.assert_close(minus_delta[:, :seq_len], expected)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (32, 64), (96, 128), (200, 256)])
def test_sums_are_zeroed_and_counts_begin_at_zero_for_the_first_sections_alone(head_dim, width):
    (batch, seq_len, n_head), n_sums, n_sections = (2, 70, 3), 4, 3
    # behind the last channel of a head other heads have theirs
    out = torch.randn(batch, seq_len, n_head, head_dim).half()
    minus_lse, minus_delta = torch.empty(2, batch * n_head * 128)
    # what is not asked for stays as it is: there is no memory for it
    sums, counts = torch.full((6, 128, width), 7.0), torch.full((6, 4), 7, dtype=torch.int32)
    prepare_kernel[(1, batch * n_head)](
        out, out, torch.randn(batch, n_head, seq_len), out, minus_lse, minus_delta, sums, counts,
        *out.stride()[:3], *out.stride()[:3], n_head, seq_len, 128, n_sums, n_sections, 0.125, 0.9,
        HEAD_DIM=head_dim, WIDTH=width, BLOCK_M=128, COUNTS=4, HAS_DLSE=False,
    )  # fmt: skip
    expected = -0.9 * out.float().square().sum(-1).transpose(1, 2)
    torch.testing.assert_close(minus_delta.view(batch, n_head, 128)[..., :seq_len], expected)
    assert (sums[:n_sums] == 0).all()
    assert (sums[n_sums:] == 7).all()
    assert (counts[:n_sections] == 0).all()
    assert (counts[n_sections:] == 7).all()


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (128, 128), (56, 64), (72, 128)])
def test_the_heads_of_the_last_section_are_rounded_from_its_slot(head_dim, width):
    batch, seq_len, n_head, padded = 2, 150, 3, 256
    # of six heads the last two, whose sums are the second and third of three
    first_head, first_sum = 4, 1
    expected = torch.randn(6, padded, width)
    # squares of 64 queries x 64 of D, transposed, in the order of primitives.fragments
    squares = expected[first_head:].view(2, padded // 64, 64, width // 64, 64).permute(0, 1, 3, 4, 2)
    squares = squares.reshape(-1, 4, 2, 8, 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    sums = torch.cat([torch.zeros(1, padded, width), squares.reshape(2, padded, width)])
    dq = torch.zeros(batch, seq_len, n_head, head_dim, dtype=torch.float16)
    round_kernel[(padded // 128, 2)](
        sums, dq, *dq.stride()[:3], n_head, first_head, first_sum, seq_len, padded, 0.125,
        HEAD_DIM=head_dim, WIDTH=width, BLOCK_M=128,
    )  # fmt: skip
    dq = dq.transpose(1, 2).flatten(0, 1)
    assert torch.equal(dq[first_head:], (expected[first_head:, :seq_len, :head_dim] * 0.125).half())
    assert (dq[:first_head] == 0).all()


def test_sections_of_sums_have_a_tile_for_about_each_multiprocessor():
    # with fewer, tiles of heads of 64 wait for sums to be rounded
    for n_tiles in range(1, 400):
        heads = turn_heads(n_tiles, 10**6, 132)
        assert heads * n_tiles > 120
        assert (heads - 1) * n_tiles < 132
    assert turn_heads(8, 5, 132) == 5


@pytest.mark.parametrize(("seq_q", "seq_k"), [(300, 300), (1, 300), (200, 300), (300, 200)])
def test_the_host_counts_the_keys_of_a_query(seq_q, seq_k):
    seen = torch.ones(seq_q, seq_k).tril(seq_k - seq_q)
    # tiles are chosen by these
    assert keys_per_query(problem(causal=False), seq_q, seq_k) == seq_k
    assert keys_per_query(problem(), seq_q, seq_k) == pytest.approx(seen.sum().item() / seq_q)
    assert keys_per_query(problem(window=16), seq_q, seq_k) == 16
    bounds = torch.zeros(1, 2, seq_q, dtype=torch.int32)
    documents = {"causal": False, "key_bounds": bounds, "query_bounds": bounds}
    unread = keys_per_query(problem(**documents), seq_q, seq_k)
    assert unread == keys_per_query(problem(), seq_q, seq_k), "unread documents may be as long as all"
    assert keys_per_query(problem(**documents, keys_per_query=20.5), seq_q, seq_k) == 20.5
    listed = problem(causal=False, blocks=tuple(block_masks.window(512, 128).tensors()))
    # seven blocks for four blocks of queries
    assert keys_per_query(listed, 512, 512) == 7 / 4 * 128


def test_documents_of_about_one_length_are_one_kind_of_call():
    lengths = torch.linspace(1, 10000, 5000).tolist()
    keys = [mean_keys(length, causal=False, window=None) for length in lengths]
    assert all(abs(number / length - 1) <= 1 / 32 for number, length in zip(keys, lengths, strict=True))
    # 16 for each doubling
    assert len(set(keys)) <= 14 * 16
    assert mean_keys(1024.0, causal=True, window=None) == 512
    # a window is the same in every batch
    assert mean_keys(1024.0, causal=True, window=300) == 300
    assert mean_keys(None, causal=True, window=100) is None


def test_short_rows_of_heads_of_64_have_tiles_of_two_blocks():
    for mask, dropout in product(("full", "causal"), (False, True)):
        assert forward_tile(64, mask, 1100, dropout).blocks == 2
        assert forward_tile(64, mask, 1101, dropout).consumers == 3
        # as in fp16, where no block keeps the maximum
        most = {"full": 400, "causal": 520}[mask]
        assert forward_tile(64, mask, most, dropout, has_room=False).blocks == 2
        assert forward_tile(64, mask, most + 1, dropout, has_room=False).consumers == 3
    assert all(forward_tile(128, mask, 1).blocks == 1 for mask in ("full", "causal", "window", "intervals"))


def test_windows_over_heads_of_64_have_such_tiles_at_any_length_where_these_keep_the_maximum():
    assert all(forward_tile(64, "window", n).blocks == 2 for n in (1, 1024, 2**20))
    for lacks in ({"dropout": True}, {"has_room": False}):
        assert forward_tile(64, "window", 1024, **lacks).blocks == 2
        assert forward_tile(64, "window", 1025, **lacks).blocks == 1
        assert forward_tile(64, "window", 1025, **lacks).consumers == 2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "intervals", "blocks"])
def test_dq_of_long_rows_is_summed_and_of_short_ones_made_in_order(mask, width):
    for bandwidth in (3352, 4917):
        pays = partial(sum_pays, mask=mask, bandwidth=bandwidth)
        assert not pays(width, keys_per_query=128)
        assert pays(width, keys_per_query=2048)
        # a sum costs twice as much at 128
        assert all(pays(64, keys_per_query=n) or not pays(128, keys_per_query=n) for n in range(2048))
    # and the more, the slower the memory is
    assert sum_pays(width, mask, 1000, bandwidth=4917)
    assert not sum_pays(width, mask, 1000, bandwidth=819)


def test_says_once_that_the_installed_triton_cannot_build_it(monkeypatch):
    def launcher():
        raise ImportError("cannot import name 'warpgroup_mma'")

    monkeypatch.setattr(hopper, "launcher", launcher)
    monkeypatch.setattr(hopper, "failures", [])
    with pytest.warns(UserWarning, match="kernels/portable does"):
        reason = hopper.build_error()
    assert "warpgroup_mma" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper.build_error() == reason


@pytest.mark.parametrize("failing", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize(
    "error", [CompilationError("", None, "no keyword num_ctas"), RuntimeError("PassManager::run failed")]
)
def test_a_kernel_that_does_not_compile_is_said_once_and_left_to_the_portable_ones(
    failing, error, monkeypatch
):
    def does_not_compile(*_, **__):
        raise error

    launch = SimpleNamespace(
        attention_forward=portable.attention_forward, attention_backward=portable.attention_backward
    )
    setattr(launch, failing, does_not_compile)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "launcher", lambda: launch)
    monkeypatch.setattr(hopper, "failures", [])
    q, k, v = random_qkv(1, 8, 8, 1, 1, 64, torch.float16, "cpu")
    with pytest.warns(UserWarning, match="kernels/portable does: the installed Triton does not compile it"):
        assert_as_accurate_as_torch(flash_attention, q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attention(q, k, v).sum().backward()
    monkeypatch.setattr(hopper, "failures", [])
    # asked for by name it is an error
    refused = pytest.raises(CannotBuildError, match="does not compile")
    with use_implementation("hopper"), pytest.warns(match="does not compile"), refused:
        flash_attention(q, k, v).sum().backward()


def test_what_fails_on_a_card_is_no_failure_to_compile(monkeypatch):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "launcher", lambda: SimpleNamespace(attention_forward=runs_out))
    q, k, v = random_qkv(1, 8, 8, 1, 1, 64, torch.float16, "cpu")
    with pytest.raises(torch.OutOfMemoryError):
        flash_attention(q, k, v)
    assert not hopper.failures


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("change", "shape", "dtype", "words"),
    [
        ({}, (1, 8, 2, 24), torch.bfloat16, "heads of 32 to 256"),
        ({}, (1, 8, 2, 64), torch.float32, "dtype"),
        ({"softmax_scale": 0.0}, (1, 8, 2, 64), torch.bfloat16, "softmax_scale"),
        ({"blocks": lists(block_size=64), "causal": False}, (1, 8, 2, 64), torch.bfloat16, "not of 64"),
    ],
)
def test_refuses_each_feature_by_name(change, shape, dtype, words):
    q = torch.zeros(shape, dtype=dtype, device="cuda")
    assert words in hopper.refusal(problem(**change), q, q, q)
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16, device="cuda")
    assert all(hopper.refusal(problem(deterministic=order), q, q, q) is None for order in (False, True))


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 127, 128, 129, 191, 193, 777, 1024])
def test_is_as_accurate_as_torch_at_any_length(seq_len, head_dim, causal, dtype, deterministic):
    q, k, v = random_qkv(2, seq_len, seq_len, 3, 3, head_dim, dtype, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
# short tiles and long ones, uneven ones, queries before the first key
@pytest.mark.parametrize(("seq_q", "seq_k"), [(129, 129), (777, 777), (1500, 1500), (200, 513)])
def test_dropout_keeps_what_the_reference_keeps(seq_q, seq_k, head_dim, mask, dtype, deterministic):
    options = {"dropout_p": 0.1, "dropout_seed": 2**40 + 3, "deterministic": deterministic}
    options["causal"] = mask not in ("full", "blocks")
    if mask == "window":
        options["window"] = 150
    if mask == "documents":
        options["document_ids"] = (torch.arange(seq_k, device="cuda") // 70).int().expand(2, -1).contiguous()
    if mask == "blocks":
        options["block_mask"] = block_masks.from_dense(torch.rand(seq_q, seq_k, device="cuda") < 0.4)
    q, k, v = random_qkv(2, seq_q, seq_k, 6, 3, head_dim, dtype, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
# tiles that blocks are dealt alone, and more than those
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_nothing_is_read_or_left_unwritten(batch, head_dim, mask, deterministic):
    options = {"causal": mask not in ("full", "blocks"), "deterministic": deterministic}
    if mask == "window":
        options["window"] = 90
    if mask == "documents":
        options["document_ids"] = (
            (torch.arange(777, device="cuda") // 50).int().expand(batch, -1).contiguous()
        )
    if mask == "blocks":
        options["block_mask"] = block_masks.window(777, 200, device="cuda")
    q, k, v = random_qkv(batch, 777, 777, 6, 3, head_dim, torch.bfloat16, "cuda")
    dout, dlse = torch.randn_like(q), torch.randn(batch, 6, 777, device="cuda")
    for _ in range(3):
        ours = run(hopper_attention, q, k, v, dout, dlse, **options)
        assert all(x.isfinite().all() for x in ours)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [*range(32, 128, 8), 136, 160, 192, 248])
def test_narrower_heads_are_exact_and_their_neighbours_are_left_alone(head_dim, mask, deterministic):
    options = {"causal": mask not in ("full", "blocks"), "deterministic": deterministic}
    if mask == "window":
        options["window"] = 90
    if mask == "documents":
        options["document_ids"] = (torch.rand(2, 777, device="cuda") < 0.02).cumsum(1).int()
    if mask == "blocks":
        options["block_mask"] = block_masks.from_dense(torch.rand(777, 777, device="cuda") < 0.9)
    # rows of heads that follow each other: what is copied out too wide is a neighbour's
    q, k, v = random_qkv(2, 777, 777, 6, 3, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 513), (64, 300), (300, 100), (513, 1), (200, 1000)])
def test_causal_is_aligned_to_the_last_query_and_key(seq_q, seq_k, causal, head_dim, deterministic):
    q, k, v = random_qkv(2, seq_q, seq_k, 4, 2, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [1, 100, 512])
def test_windows_and_documents_cut_the_same_keys_as_the_reference(window, head_dim, deterministic):
    q, k, v = random_qkv(2, 1000, 1000, 4, 2, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, window=window, deterministic=deterministic)
    ids = (torch.randint(0, 2, (2, 1000), device="cuda").cumsum(1) // 30).int() - 1
    assert_as_accurate_as_torch(hopper_attention, q, k, v, document_ids=ids, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
@pytest.mark.parametrize("form", [("window", 100, False), ("window", 2000, True), ("causal", 5000, False)])
def test_every_form_of_the_forward_kernel_is_exact_under_every_mask(form, mask, monkeypatch):
    form = forward_tile(64, *form)
    monkeypatch.setattr("kernels.hopper.launch.forward_tile", lambda *_: form)
    for seq_len in (1, 65, 129, 300, 500):
        options = {"causal": mask != "full"}
        if mask == "window":
            options["window"] = 90
        if mask == "documents":
            options["document_ids"] = (torch.rand(4, seq_len, device="cuda") < 0.02).cumsum(1).int()
        # more tiles than blocks run at once
        q, k, v = random_qkv(4, seq_len, seq_len, 60, 20, 64, torch.bfloat16, "cuda")
        assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
# short tiles of heads of 64, and long ones
@pytest.mark.parametrize("seq_len", [500, 2500])
def test_scores_that_rise_far_above_those_of_the_first_blocks_are_exact(seq_len, head_dim, mask, dropout_p):
    options = {"causal": mask not in ("full", "blocks")}
    if mask == "window":
        options["window"] = seq_len - 70
    if mask == "documents":
        ids = torch.arange(seq_len, device="cuda") >= 60
        options["document_ids"] = ids.int().expand(2, -1).contiguous()
    if mask == "blocks":
        options["block_mask"] = block_masks.causal(seq_len, device="cuda")
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": 5}
    q, k, v = rising_qkv(2, seq_len, 40, 20, head_dim, "cuda")
    assert_close_to_truth(hopper_attention, q, k, v, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
# short tiles of heads of 64, and long ones
@pytest.mark.parametrize("seq_len", [500, 2500])
def test_a_key_that_outweighs_all_others_weighs_as_much_as_its_rounded_probability(
    seq_len, head_dim, sharpness
):
    assert_as_accurate_as_torch(hopper_attention, *peaked_qkv(seq_len, sharpness, head_dim, "cuda"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_that_a_list_cuts_may_hold_the_largest_scores(head_dim):
    mask = {"causal": False, "block_mask": block_masks.causal(2500, device="cuda")}
    q, k, v = rising_qkv(2, 2500, 40, 20, head_dim, "cuda")
    with torch.no_grad():
        k.copy_(k.flip(1))
    assert_close_to_truth(hopper_attention, q, k, v, **mask)
    q, k, v = random_qkv(2, 2500, 2500, 40, 40, head_dim, torch.bfloat16, "cuda")
    with torch.no_grad():
        q.copy_(2 * k)
    assert_as_accurate_as_torch(hopper_attention, q, k, v, **mask)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nan_in_keys_stays_in_the_rows_that_see_it(head_dim):
    q, k, v = random_qkv(2, 700, 700, 3, 3, head_dim, torch.bfloat16, "cuda")
    with torch.no_grad():
        k[0, 300, 1, 5] = float("nan")
        out, lse = hopper_attention(q, k, v, return_lse=True)
    expected = torch.zeros(2, 3, 700, dtype=torch.bool, device="cuda")
    expected[0, 1, 300:] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected.transpose(1, 2))
    assert torch.equal(out.isnan().any(-1), expected.transpose(1, 2))


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_window_inside_of_the_last_block_of_keys_is_cut(head_dim, deterministic):
    # the queries see the end of the block, but not its beginning
    q, k, v = random_qkv(1, 1, 640, 2, 2, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, window=50, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensors_that_bulk_copies_cannot_read_are_read_too(head_dim):
    # rows that begin between multiples of 16 bytes, and channels that do not follow each other
    broken = torch.randn(2, head_dim, 130, 4, device="cuda").bfloat16().permute(0, 2, 3, 1)
    for x in (torch.randn(2, 130, 4, head_dim + 1, device="cuda").bfloat16()[..., 1:], broken):
        q, k, v = (x.detach().requires_grad_() for _ in range(3))
        assert_as_accurate_as_torch(hopper_attention, q, k, v)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rings_wrap_and_blocks_take_several_tiles(head_dim, deterministic):
    # more tiles than multiprocessors, uneven, and more steps than ring stages
    q, k, v = random_qkv(3, 1300, 1300, 36, 12, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "seq_q", "seq_k", "n_kv_head"), [(40, 300, 300, 12), (40, 1, 300, 12), (100, 200, 100, 6)]
)
def test_sections_take_turns_in_the_slots_of_their_sums(batch, seq_q, seq_k, n_kv_head, causal, monkeypatch):
    monkeypatch.setattr("kernels.hopper.launch.turns_pay", lambda *_: True)
    n_heads, n_tiles = batch * n_kv_head, -(-seq_k // 128)
    n_sm = torch.cuda.get_device_properties(0).multi_processor_count
    assert n_heads > turn_heads(n_tiles, n_heads, n_sm) * (SLOTS.value + 1)
    q, k, v = random_qkv(batch, seq_q, seq_k, 12, n_kv_head, 64, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "blocks"])
@pytest.mark.parametrize("n_kv_head", [6, 2])
def test_turns_of_sections_of_a_single_head_end_and_are_exact(mask, n_kv_head, monkeypatch):
    # the hardest schedule: most thread blocks wait for others most of the time
    monkeypatch.setattr("kernels.hopper.launch.turns_pay", lambda *_: True)
    monkeypatch.setattr("kernels.hopper.launch.turn_heads", lambda *_: 1)
    for seq_len in (100, 128, 500):
        options = {"causal": mask not in ("full", "blocks")}
        if mask == "window":
            options["window"] = 70
        if mask == "documents":
            options["document_ids"] = (torch.rand(9, seq_len, device="cuda") < 0.05).cumsum(1).int()
        if mask == "blocks":
            # partial ones and whole
            seen = torch.rand(seq_len, seq_len, device="cuda") < 0.9
            options["block_mask"] = block_masks.from_dense(seen)
        q, k, v = random_qkv(9, seq_len, seq_len, 6, n_kv_head, 64, torch.bfloat16, "cuda")
        assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([64, 1], [64, 0]), ([64, 192], [64, 64]), ([130, 0, 64, 300], [64, 64, 0, 500])],
)
def test_queries_without_keys_leave_the_rings_in_step(lengths_q, lengths_k, causal, head_dim, deterministic):
    # what a warpgroup that sees nothing hands back must be what its tile was given: more tiles than blocks
    q, _, _ = random_qkv(1, sum(lengths_q), 1, 600, 1, head_dim, torch.bfloat16, "cuda")
    _, k, v = random_qkv(1, 1, sum(lengths_k), 1, 300, head_dim, torch.bfloat16, "cuda")
    starts_q, starts_k = (
        torch.tensor([0, *accumulate(x)], device="cuda").int() for x in (lengths_q, lengths_k)
    )
    pairs = zip(lengths_q, lengths_k, strict=True)
    seen = torch.block_diag(*(visible_keys(*pair, causal=causal)[0, 0] for pair in pairs)).bool().cuda()

    def packed(q, k, v, **_):
        with use_implementation("hopper"):
            out, lse = flash_attention_varlen(
                q[0], k[0], v[0], starts_q, cu_seqlens_k=starts_k, causal=causal, return_lse=True,
                deterministic=deterministic,
            )  # fmt: skip
        return out[None], lse[None]

    assert_as_accurate_as_torch(packed, q, k, v, block_mask=block_masks.from_dense(seen), causal=False)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_that_no_query_sees_add_to_no_other_heads_sums(head_dim):
    # the second sequence has keys but no queries, and begins where the queries end
    q, k, v = random_qkv(1, 128, 256, 2, 2, head_dim, torch.bfloat16, "cuda")
    ends_q, ends_k = (torch.tensor(x, device="cuda").int() for x in ([0, 128, 128], [0, 128, 256]))
    with use_implementation("hopper"):
        out = flash_attention_varlen(q[0], k[0], v[0], ends_q, cu_seqlens_k=ends_k, causal=False)
        dout = torch.randn_like(out)
        # behind the first head's queries lie the second's
        dout[:, 1] = float("nan")
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert all(x[:, :, 0].isfinite().all() for x in gradients)
    assert all(x[:, :128, 1].isnan().all() for x in gradients)


@pytest.mark.gpu
@on_hopper
def test_the_backward_pass_of_heads_of_64_holds_sums_of_a_few_heads_alone():
    q, k, v = (x.detach() for x in random_qkv(64, 1024, 1024, 12, 12, 64, torch.bfloat16, "cuda"))
    now = problem()
    out, lse = hopper.attention_forward(now, q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = hopper.attention_backward(now, q, None, q, k, v, out, lse)
    used = torch.cuda.max_memory_allocated() - before
    # dq in float32 would be twice one of them
    assert used < 1.1 * sum(x.nbytes for x in gradients)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_block_takes_several_tiles_of_one_step(head_dim, causal, deterministic):
    # the first step of each is its last
    q, k, v = random_qkv(8, 40, 300, 48, 48, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@either_order
def test_long_tiles_of_three_warpgroups_are_exact(deterministic):
    q, k, v = random_qkv(1, 9000, 9000, 1, 1, 64, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, deterministic=deterministic)


@pytest.mark.gpu
@on_hopper
@either_order
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_hundred_runs_give_the_same_bits(head_dim, deterministic):
    q, k, v = (x.detach() for x in random_qkv(4, 1111, 1111, 8, 4, head_dim, torch.bfloat16, "cuda"))
    dout = torch.randn_like(q)
    now = problem(softmax_scale=head_dim**-0.5, deterministic=deterministic)
    out, lse = hopper.attention_forward(now, q, k, v)
    dq, dk, dv = hopper.attention_backward(now, dout, None, q, k, v, out, lse)
    for _ in range(200):
        again = hopper.attention_forward(now, q, k, v)
        gradients = hopper.attention_backward(now, dout, None, q, k, v, *again)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        if deterministic:
            assert torch.equal(gradients[0], dq)
        else:
            # summed in any order
            assert (gradients[0] - dq).abs().max() < 0.05
        assert torch.equal(gradients[1], dk)
        assert torch.equal(gradients[2], dv)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_short_rows_are_exact_and_the_same_bits_unasked(head_dim, causal, monkeypatch):
    monkeypatch.setattr("kernels.hopper.launch.sum_pays", sum_pays)
    q, k, v = random_qkv(16, 250, 250, 12, 6, head_dim, torch.bfloat16, "cuda")
    assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal)
    dout = torch.randn_like(q)
    runs = [torch.autograd.grad(hopper_attention(q, k, v, causal=causal), (q, k, v), dout) for _ in range(20)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_short_documents_of_long_sequences_are_exact_and_the_same_bits_unasked(head_dim, monkeypatch):
    monkeypatch.setattr("kernels.hopper.launch.sum_pays", sum_pays)
    q, k, v = random_qkv(2, 2000, 2000, 12, 6, head_dim, torch.bfloat16, "cuda")
    ids = (torch.rand(2, 2000, device="cuda") < 0.01).cumsum(1).int()
    assert_as_accurate_as_torch(hopper_attention, q, k, v, document_ids=ids)
    dout = torch.randn_like(q)
    runs = [
        torch.autograd.grad(hopper_attention(q, k, v, document_ids=ids), (q, k, v), dout) for _ in range(20)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_of_block_masks_are_exact_and_the_same_bits(head_dim):
    # of each batch and head its own, lines without a block, partial and full ones; grouped heads share one
    for n_kv_head, seq_q, seq_k in ((4, 300, 700), (2, 1111, 1111)):
        q, k, v = random_qkv(2, seq_q, seq_k, 4, n_kv_head, head_dim, torch.bfloat16, "cuda")
        blocks = (2, 4 if n_kv_head == 4 else 1, -(-seq_q // 128), -(-seq_k // 128))
        shares = torch.tensor([0.0, 0.3, 1.0], device="cuda")[torch.randint(3, blocks)]
        shares = shares.repeat_interleave(128, 2)[:, :, :seq_q].repeat_interleave(128, 3)[..., :seq_k]
        mask = block_masks.from_dense(torch.rand_like(shares) < shares)
        options = {"block_mask": mask, "causal": False, "deterministic": True}
        assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)
        dout = torch.randn_like(q)
        runs = [torch.autograd.grad(hopper_attention(q, k, v, **options), (q, k, v), dout) for _ in range(20)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_are_written_in_place(head_dim):
    q, k, v = (x.detach() for x in random_qkv(2, 777, 777, 4, 4, head_dim, torch.bfloat16, "cuda"))
    dout, now = torch.randn_like(q), problem(softmax_scale=head_dim**-0.5, deterministic=True)
    out, lse = hopper.attention_forward(now, q, k, v)
    apart = hopper.attention_backward(now, dout, None, q, k, v, out, lse)
    together = torch.zeros(2, 777, 3, 4, head_dim, dtype=q.dtype, device="cuda")
    hopper.attention_backward(now, dout, None, q, k, v, out, lse, gradients=together.unbind(2))
    assert torch.equal(together, torch.stack(apart, 2))


@pytest.mark.gpu
@on_hopper
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_launches_of_random_problems_end_with_finite_numbers(seed, monkeypatch):
    n_problems = n_launches = 0
    launch = JITFunction.run

    def counted(*arguments, **options):
        nonlocal n_launches
        n_launches += 1
        return launch(*arguments, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    # a quarter each, so that several processes share them
    while n_problems < 750 or n_launches < 2500:
        n_problems += 1
        name, numbers = run_random_problem(generator, longest=1500)
        assert all(x.isfinite().all() for x in numbers), name
