"""Launches that lie ready give what Triton's own give, whatever tensors come next."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from kernels import launches, repeats
from kernels.flash_attention import flash_attention
from tests.compile_apart import compile_apart, each_triton
from tests.on_a_gpu import (
    assert_graph_replays_with_other_numbers,
    assert_same,
    assert_same_in_threads,
    some,
)

# the kernels of what tests/launched.py calls a pass, and the descriptors by which each copies
FORWARD, CUT, PREPARE, ROUND = ("forward", 4), ("cut", 0), ("prepare", 0), ("round", 0)
KERNELS = {
    "forward": [FORWARD],
    "backward": [PREPARE, ("backward_64", 10), ROUND],
    "heads_of_128": [PREPARE, ("backward_128", 9), ROUND],
    "heads_of_256": [PREPARE, ("dq", 6), ("backward_256", 8)],
    # dk and dv beside a dq of their own
    "cut_lists": [CUT, FORWARD, CUT, CUT, ("dq", 6), ("backward_64", 10)],
    "dropout": [FORWARD],
    "portable": [("forward", 3), ("preprocess", 0), ("dkdv", 4), ("dq", 4)],
    "portable_float32": [("forward", 0), ("preprocess", 0), ("dkdv", 0), ("dq", 0)],
}


@each_triton
def test_a_prepared_launch_gives_the_driver_what_triton_would_for_other_tensors(version):
    # of the older Triton a GPU runs all of them
    passes = KERNELS if version == "pinned" else ["forward", "portable"]
    rows = compile_apart("tests.launched", version, *(f"pass={name}" for name in passes))
    expected = [kernel for name in passes for kernel in KERNELS[name]]
    # of each descriptor: type, sizes, strides, box and swizzle are compared too
    assert [(row["kernel"].removesuffix("_kernel"), row["n_maps"]) for row in rows] == expected
    for row in rows:
        assert row["same_parameters"], row
        assert row["same_launch"], row
        assert row["n_parameters"] > 10


def test_an_int_is_a_scale_of_every_kernel():
    # Triton would compile a kernel for the int 1, where a float is an argument
    rows = compile_apart("tests.launched", "pinned", "pass=scale_of_one")
    assert [row["kernel"] for row in rows] == ["dq_kernel", "backward_64_kernel"]
    assert all(row["same_parameters"] for row in rows), rows


def test_nothing_is_launched_with_an_address_that_a_tensor_map_cannot_have(monkeypatch):
    launched = []
    refusing = SimpleNamespace(cuTensorMapReplaceAddress=lambda *_: 1, cuLaunchKernel=launched.append)
    monkeypatch.setattr(launches, "driver", lambda: refusing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    ready = object.__new__(launches.Launch)
    # where a tensor map lies
    ready.places, ready.lock = [64], threading.Lock()
    assert not ready.try_launch(0, [8])
    assert not launched


def test_without_cudas_driver_every_launch_goes_through_triton(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(launches, "driver", missing)
    assert launches.prepared(None, (1,), ()).startswith("goes through Triton: libcuda.so.1")


@pytest.fixture(autouse=True)
def nothing_ready(monkeypatch):
    launches.launches.clear()
    # every call launches by itself
    monkeypatch.setattr(repeats, "may_repeat", lambda x: False)


def gradients(q, k, v, g, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, deterministic=True, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), g)


def by_triton(*tensors, **options):
    launches.launches.clear()
    return gradients(*tensors, **options)


def n_ready() -> int:
    return sum(isinstance(launch, launches.Launch) for launch in launches.launches.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 70}, {"dropout_p": 0.2, "dropout_seed": 3}], ids=str
)
# the last is the portable kernels'
@pytest.mark.parametrize("head_dim", [64, 128, 256, 16])
def test_the_second_launch_of_a_kind_and_all_behind_it_are_of_their_own_tensors(head_dim, options):
    shape = (2, 300, 4, head_dim)
    sets = [some(shape) for _ in range(4)]
    # the first of its kind has one tensor in three places
    sets[0][1:3] = sets[0][:1] * 2
    expected = [by_triton(*tensors, **options) for tensors in sets]
    launches.launches.clear()
    for _ in range(3):
        for tensors, those in zip(sets, expected, strict=True):
            assert_same(gradients(*tensors, **options), those)
    assert n_ready() >= 2
    assert all(isinstance(launch, launches.Launch) for launch in launches.launches.values())


@pytest.mark.gpu
def test_tensors_in_another_layout_of_memory_are_another_kind():
    packed = torch.randn(2, 300, 4, 4, 64, device="cuda", dtype=torch.bfloat16)
    apart = [x.contiguous() for x in packed.unbind(2)]
    expected = by_triton(*apart)
    launches.launches.clear()
    for _ in range(3):
        assert_same(gradients(*packed.unbind(2)), expected)
        assert_same(gradients(*apart), expected)


@pytest.mark.gpu
def test_a_seed_at_an_address_that_16_does_not_divide_is_another_kind():
    seeds = torch.arange(4, device="cuda")
    tensors = some()
    options = [{"dropout_p": 0.2, "dropout_seed": seeds[index : index + 1]} for index in range(4)]
    expected = [by_triton(*tensors, **given) for given in options]
    assert not torch.equal(expected[0][0], expected[1][0])
    launches.launches.clear()
    for _ in range(3):
        for given, those in zip(options, expected, strict=True):
            assert_same(gradients(*tensors, **given), those)


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_launch_the_same_kind_at_once():
    sets = [some() for _ in range(4)]
    expected = [by_triton(*tensors) for tensors in sets]
    for tensors in sets[:2]:
        gradients(*tensors)

    assert_same_in_threads(gradients, sets, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 16], ids=["hopper", "portable"])
def test_attention_can_be_the_first_gpu_work_of_a_thread(head_dim):
    q, k, v = some((2, 300, 4, head_dim), n=3)
    expected = flash_attention(q, k, v)
    launches.launches.clear()
    torch.cuda.synchronize()
    for _ in range(3):
        # a new thread each time, and memory that is there already
        with ThreadPoolExecutor(1) as pool:
            assert_same([pool.submit(flash_attention, q, k, v).result()], [expected])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 16], ids=["hopper", "portable"])
def test_a_graph_captures_prepared_launches(head_dim):
    q, k, v = some((2, 300, 4, head_dim), n=3)
    for _ in range(3):
        flash_attention(q, k, v)
    assert n_ready() == 1
    assert_graph_replays_with_other_numbers(q, k, v)


@pytest.mark.gpu
def test_a_profiler_of_tritons_hears_of_every_launch():
    tensors = some()
    heard = []
    hook = knobs.runtime.launch_enter_hook

    def listen(metadata):
        heard.append(metadata.get()["name"])

    for _ in range(3):
        gradients(*tensors)
    hook.add(listen)
    try:
        gradients(*tensors)
    finally:
        hook.remove(listen)
    assert "forward_kernel" in heard
    assert len(heard) == n_ready()


@pytest.mark.gpu
def test_more_kinds_than_are_kept_are_forgotten_and_prepared_anew(monkeypatch):
    monkeypatch.setattr(launches, "MOST_KINDS", 3)
    sets = [some((1, length, 2, 64)) for length in (100, 110, 120, 130)]
    expected = [by_triton(*tensors) for tensors in sets]
    for _ in range(3):
        for tensors, those in zip(sets, expected, strict=True):
            for _ in range(3):
                assert_same(gradients(*tensors), those)
            assert len(launches.launches) <= 3


@pytest.mark.gpu
def test_what_the_driver_refuses_is_told_by_triton(monkeypatch):
    tensors = some()
    expected = by_triton(*tensors)
    for _ in range(3):
        gradients(*tensors)
    for launch in launches.launches.values():
        # more threads than a block may have
        launch.threads = 4096
    assert_same(gradients(*tensors), expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_kinds_of_its_own():
    tensors = some()
    there = [x.to("cuda:1") for x in tensors]
    expected = by_triton(*tensors)
    for _ in range(3):
        assert_same(gradients(*tensors), expected)
        assert_same((x.to("cuda:0") for x in gradients(*there)), expected)


A, B = torch.zeros(8), torch.zeros(4, 8)
LAYOUT = object()
DESCRIBED = (B, (4, 8), (8, 1), (4, 8), LAYOUT)


def kind(grid=(2,), x=A, number=3, described=DESCRIBED, device=0, **constants):
    descriptor = launches.Descriptor(*described)
    return launches.kind_of(launches, grid, (x, number, None, descriptor), {"BLOCK": 16} | constants, device)


@pytest.mark.parametrize(
    "change",
    [
        {"device": 1},
        {"grid": (3,)},
        {"BLOCK": 32},
        {"number": 4},
        {"x": A.double()},
        {"x": torch.zeros(9)[1:]},
        {"described": (B, (3, 8), (8, 1), (4, 8), LAYOUT)},
        {"described": (B, (4, 8), (16, 1), (4, 8), LAYOUT)},
        {"described": (B, (4, 8), (8, 1), (2, 8), LAYOUT)},
        {"described": (B.int(), (4, 8), (8, 1), (4, 8), LAYOUT)},
        {"described": (B, (4, 8), (8, 1), (4, 8), None)},
    ],
    ids=[
        "device", "grid", "constant", "number", "dtype", "alignment", "shape", "strides", "block",
        "dtype of a descriptor", "layout",
    ],
)  # fmt: skip
def test_what_a_launch_may_depend_on_makes_another_kind(change):
    (same, addresses), (other, _) = kind(), kind(x=A.clone())
    assert same == other
    assert addresses == [A.data_ptr(), B.data_ptr()]
    assert kind(**change)[0] != same


def test_who_listens_inside_leaves_the_outer_listener():
    outer, inner = (lambda *told: None for _ in range(2))
    with launches.telling_launches(outer):
        with launches.telling_launches(inner):
            assert launches.listeners.of_launches is inner
        assert launches.listeners.of_launches is outer
    assert launches.listeners.of_launches is None
