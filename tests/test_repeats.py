"""A repeated call gives what the call itself would, for whatever tensors, or it is not repeated."""

import ctypes
import weakref
from types import SimpleNamespace

import pytest
import torch

from kernels import block_masks, launches, repeats
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.launches import Launch
from kernels.operators import use_implementation
from kernels.packed import flash_attention_packed
from kernels.repeats import Place, place_of
from tests.compile_apart import compile_apart
from tests.on_a_gpu import (
    IS_HOPPER,
    assert_graph_replays_with_other_numbers,
    assert_same,
    assert_same_in_threads,
    on_hopper,
    some,
)

LENGTH = 6
# calls of a kind that run themselves; the last of them is noted
OWN = 3


class Kernel(Launch):
    """Stands in for a prepared launch, on a CPU: out = a + b, rows of LENGTH numbers at these addresses."""

    def __init__(self):
        self.refuses = False

    def try_launch(self, device, addresses):
        if self.refuses:
            return False
        a, b, out = ((ctypes.c_float * LENGTH).from_address(address) for address in addresses)
        out[:] = [x + y for x, y in zip(a, b, strict=True)]
        return True


class Function:
    """x + y[0] + y[1], in two launches with a buffer between; counts how often it runs."""

    def __init__(self, known=None):
        self.kernel, self.n_runs = Kernel(), 0
        self.known = self.kernel if known is None else known

    def launch(self, *tensors):
        addresses = [x.data_ptr() for x in tensors]
        if launches.listeners.of_launches is not None:
            launches.listeners.of_launches(self.known, addresses)
        Kernel().try_launch(0, addresses)

    def __call__(self, x, ys, scale=1.0):
        self.n_runs += 1
        # the second half is used
        half = torch.empty(2, LENGTH, dtype=x.dtype).unbind()[1]
        out = torch.empty_like(x)
        self.launch(x, ys[0], half)
        self.launch(half, ys[1], out)
        return out


class Computing(Function):
    def __call__(self, x, ys):
        return super().__call__(x, ys) * 1.0


class Copying(Function):
    def __call__(self, x, ys):
        return super().__call__(x.clone(), ys)


class CopyingByAView(Function):
    """By an operator that gives a view where it can; nothing reads the copy."""

    def __call__(self, x, ys):
        # as inside of an operator
        with torch._C._AutoDispatchBelowAutograd():
            x.expand(2, LENGTH).contiguous()
        return super().__call__(x, ys)


class Elsewhere(Function):
    """Writes into memory that it keeps."""

    kept = torch.zeros(LENGTH)

    def __call__(self, x, ys):
        self.n_runs += 1
        out = torch.empty_like(x)
        self.launch(x, ys[0], self.kept)
        self.launch(self.kept, ys[1], out)
        return out


class ReturningItsArgument(Function):
    def __call__(self, x, ys):
        super().__call__(x, ys)
        return x


class ReturningWhatNothingWrites(Function):
    def __call__(self, x, ys):
        super().__call__(x, ys)
        return torch.zeros(LENGTH)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Lets calls on a CPU be repeated; returns what decorates a function."""
    monkeypatch.setattr(repeats, "may_repeat", lambda x: True)
    also = SimpleNamespace(value=None)

    def decorate(function):
        return repeats.repeated(also_depends_on=lambda: also.value)(function)

    decorate.also = also
    return decorate


def numbers(n=3):
    return [torch.randn(LENGTH) for _ in range(n)]


def check(call, times=1):
    for _ in range(times):
        x, y, z = numbers()
        torch.testing.assert_close(call(x, [y, z]), x + y + z)


def wrapped(decorate, function):
    def plain(*arguments):
        return function(*arguments)

    return decorate(plain)


def test_the_fourth_call_of_a_kind_and_all_behind_it_are_repeated_on_their_own_tensors(on_a_cpu):
    function = Function()
    call = wrapped(on_a_cpu, function)
    check(call, times=6)
    assert function.n_runs == OWN
    [noted] = repeats.recipes.values()
    assert len(noted.launches) == 2
    # a buffer of two rows, of which kernels are given the second
    assert [place.offset for _, places in noted.launches for place in places] == [0, 0, 24, 24, 0, 0]


def test_results_are_new_memory_in_every_call(on_a_cpu):
    call = wrapped(on_a_cpu, Function())
    x, y, z = numbers()
    results = [call(x, [y, z]) for _ in range(6)]
    assert len({result.data_ptr() for result in results}) == 6


def test_views_of_one_tensor_are_told_apart_by_their_addresses(on_a_cpu):
    function = Function()
    call = wrapped(on_a_cpu, function)
    for _ in range(5):
        x, y, z = torch.randn(3, LENGTH)
        torch.testing.assert_close(call(x, [y, z]), x + y + z)
    assert function.n_runs == OWN


def test_a_part_of_one_tensor_is_not_taken_for_another_that_begins_there(on_a_cpu):
    """As when the gradient of packed attention is a view of q, k and v."""

    class Packed(Function):
        def __call__(self, dout, qkv):
            self.n_runs += 1
            out = torch.empty_like(dout)
            # v is an address inside of qkv
            self.launch(dout, qkv.unbind()[2], out)
            return out

    function = Packed()
    call = wrapped(on_a_cpu, function)
    for _ in range(5):
        qkv = torch.randn(3, LENGTH)
        torch.testing.assert_close(call(qkv[2], qkv), qkv[2] + qkv[2])
    for _ in range(3):
        qkv, dout = torch.randn(3, LENGTH), torch.randn(LENGTH)
        torch.testing.assert_close(call(dout, qkv), dout + qkv[2])
    # noted when the two lay apart
    assert function.n_runs == 6
    qkv = torch.randn(3, LENGTH)
    torch.testing.assert_close(call(qkv[2], qkv), qkv[2] + qkv[2])
    assert function.n_runs == 6


def test_a_call_inside_a_call_is_noted_with_it(on_a_cpu):
    inner = Function()
    inner_call = wrapped(on_a_cpu, inner)

    def outer(x, ys):
        half, out = inner_call(x, ys), torch.empty_like(x)
        inner.launch(half, x, out)
        return out

    call = on_a_cpu(outer)
    check(inner_call, times=5)
    for _ in range(6):
        x, y, z = numbers()
        torch.testing.assert_close(call(x, [y, z]), 2 * x + y + z)
    assert [len(recipe.launches) for recipe in repeats.recipes.values()] == [2, 3]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Computing, "aten.mul"),
        (Copying, "aten.clone"),
        (CopyingByAView, "aten."),
        (Elsewhere, "neither given nor allocated"),
        (ReturningItsArgument, "returns what it has not allocated"),
        (ReturningWhatNothingWrites, "no noted kernel is given"),
    ],
)
def test_a_call_that_does_more_than_launch_kernels_is_never_repeated(on_a_cpu, kind, reason):
    function = kind()
    call = wrapped(on_a_cpu, function)
    for _ in range(5):
        x, *ys = numbers()
        call(x, ys)
    assert function.n_runs == 5
    [why] = repeats.recipes.values()
    assert reason in why


def test_a_kernel_whose_launch_is_not_prepared_yet_is_noted_when_it_is(on_a_cpu):
    function = Function(known=launches.ONCE)
    call = wrapped(on_a_cpu, function)
    check(call, times=5)
    assert function.n_runs == 5
    function.known = function.kernel
    check(call, times=3)
    assert function.n_runs == 6


def test_a_kernel_that_always_goes_through_triton_is_never_repeated(on_a_cpu):
    function = Function(known="goes through Triton: scratch memory")
    check(wrapped(on_a_cpu, function), times=4)
    assert function.n_runs == 4
    assert list(repeats.recipes.values()) == ["goes through Triton: scratch memory"]


def test_which_tensors_begin_at_one_address_makes_another_kind(on_a_cpu):
    function = Function()
    call = wrapped(on_a_cpu, function)
    # the three are told apart only where they lie apart
    for chosen in (lambda x, y, z: (x, x, x), lambda x, y, z: (x, y, y), lambda x, y, z: (x, y, z)):
        n_before = function.n_runs
        for _ in range(OWN + 2):
            x, y, z = chosen(*numbers())
            torch.testing.assert_close(call(x, [y, z]), x + y + z)
        assert function.n_runs == n_before + OWN
    x, y, z = numbers()
    for ys in ([x, x], [y, y], [y, z]):
        torch.testing.assert_close(call(x, ys), x + sum(ys))
    assert function.n_runs == n_before + OWN


def test_a_part_of_a_tensor_given_twice_is_found_in_it(on_a_cpu):
    class SecondRow(Function):
        def __call__(self, x, ys):
            # the same row, whichever of the two it is thought to be a part of
            return super().__call__(x[0], [ys[0][1], ys[1][1]])

    function = SecondRow()
    call = wrapped(on_a_cpu, function)
    for _ in range(OWN + 2):
        x, y = torch.randn(2, LENGTH), torch.randn(2, LENGTH)
        torch.testing.assert_close(call(x, [y, y]), x[0] + 2 * y[1])
    assert function.n_runs == OWN


@pytest.mark.parametrize("change", ["option", "layout", "dtype", "address", "list", "also"])
def test_what_a_call_may_depend_on_makes_another_kind(on_a_cpu, change):
    function = Function()
    call = wrapped(on_a_cpu, function)
    check(call, times=OWN + 1)
    assert function.n_runs == OWN
    x, y, z = numbers()
    ys, option = [y, z], ()
    if change == "option":
        option = (2.0,)
    if change == "layout":
        x = torch.randn(LENGTH, 2)[:, 0]
    if change == "dtype":
        x = x.view(torch.int32)
    if change == "address":
        x = torch.randn(LENGTH + 1)[1:]
    if change == "list":
        ys.append(z.clone())
    if change == "also":
        on_a_cpu.also.value = "portable"
    call(x, ys, *option)
    assert function.n_runs == OWN + 1


def test_which_optional_tensor_is_given_makes_another_kind(on_a_cpu):
    function = Function()

    def either(x, y, z):
        return function(x, [x if y is None else y, x if z is None else z])

    call = on_a_cpu(either)
    for _ in range(OWN + 1):
        x, y = numbers(2)
        torch.testing.assert_close(call(x, y, None), 2 * x + y)
    assert function.n_runs == OWN
    call(x, None, y)
    assert function.n_runs == OWN + 1


def test_what_changes_while_a_call_is_noted_is_not_kept(on_a_cpu):
    function = Function()

    def plain(x, ys):
        # as another thread does
        if function.n_runs == OWN - 1:
            on_a_cpu.also.value = "portable"
        return function(x, ys)

    call = on_a_cpu(plain)
    check(call, times=OWN)
    on_a_cpu.also.value = None
    check(call, times=2)
    # noted by the first of these
    assert function.n_runs == OWN + 1


def test_what_the_driver_refuses_is_done_by_the_call_itself(on_a_cpu):
    function = Function()
    call = wrapped(on_a_cpu, function)
    check(call, times=OWN)
    function.kernel.refuses = True
    check(call, times=2)
    assert function.n_runs == OWN + 2


def test_while_a_profiler_of_tritons_listens_calls_are_neither_noted_nor_repeated(on_a_cpu, monkeypatch):
    function = Function()
    call = wrapped(on_a_cpu, function)
    monkeypatch.setattr(repeats, "is_watched", lambda: True)
    check(call, times=OWN + 1)
    assert function.n_runs == OWN + 1
    monkeypatch.setattr(repeats, "is_watched", lambda: False)
    check(call, times=2)
    assert function.n_runs == OWN + 2
    monkeypatch.setattr(repeats, "is_watched", lambda: True)
    check(call)
    assert function.n_runs == OWN + 3


def test_more_kinds_than_are_kept_are_forgotten_and_noted_anew(on_a_cpu, monkeypatch):
    monkeypatch.setattr(repeats, "MOST_KINDS", 2)
    function = Function()
    call = wrapped(on_a_cpu, function)
    for _ in range(3):
        for option in (1.0, 2.0, 3.0):
            x, y, z = numbers()
            for _ in range(OWN + 1):
                torch.testing.assert_close(call(x, [y, z], option), x + y + z)
            assert len(repeats.recipes) <= 2


def test_a_noted_call_keeps_no_tensor(on_a_cpu):
    call = wrapped(on_a_cpu, Function())
    kept = []
    for _ in range(OWN + 2):
        x, y, z = numbers()
        kept += map(weakref.ref, (x, y, z, call(x, [y, z])))
    del x, y, z
    assert not any(reference() is not None for reference in kept)


def test_an_error_leaves_nothing_noted_and_the_next_call_is(on_a_cpu):
    function = Function()
    fails = [False, False, True]

    def plain(x, ys):
        if fails and fails.pop(0):
            raise RuntimeError("as when memory runs out")
        return function(x, ys)

    call = on_a_cpu(plain)
    check(call, times=2)
    with pytest.raises(RuntimeError, match="memory"):
        check(call)
    assert launches.listeners.of_launches is None
    check(call, times=4)
    assert function.n_runs == OWN


def test_calls_in_float32_follow_pytorchs_settings_and_are_not_repeated():
    gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert repeats.may_repeat(gpu) == (torch.version.hip is None)
    assert not repeats.may_repeat(SimpleNamespace(is_cuda=True, dtype=torch.float32))
    assert not repeats.may_repeat(SimpleNamespace(is_cuda=False, dtype=torch.bfloat16))


# by call of tests/repeated.py: how many launches are repeated; none where PyTorch computes something between
CALLS = {
    "forward": 1,
    "forward_of_parts": 1,
    "forward_with_counter": 1,
    "documents": 1,
    "full_documents": 1,
    "full_documents_backward": 3,
    "one_tensor": 1,
    "one_tensor_backward": 3,
    "dropout": 1,
    "backward": 3,
    "backward_with_dlse": 3,
    "deterministic": 2,
    "packed_forward": 1,
    "packed_backward": 3,
    "lists": 1,
    "cut_lists": 0,
    "copied": 0,
    "portable_forward": 1,
    "portable_backward": 3,
    "portable_groups": 0,
}


def test_a_repeated_call_allocates_launches_and_returns_what_the_call_itself_does():
    rows = compile_apart("tests.repeated", "pinned", *(f"call={name}" for name in CALLS))
    assert {row["call"]: row["repeated"] for row in rows} == CALLS
    for row in rows:
        assert row["same"], row


def gradients(q, k, v, g, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = flash_attention(q, k, v, deterministic=True, return_lse=True, **options)
    dlse = g.float().sum(-1).mT.contiguous()
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), (g, dlse))


def by_itself(call, *tensors, **options):
    repeats.recipes.clear()
    return call(*tensors, **options)


def assert_repeated_is_same(call, sets, **options) -> None:
    expected = [by_itself(call, *tensors, **options) for tensors in sets]
    repeats.recipes.clear()
    for _ in range(3):
        for tensors, those in zip(sets, expected, strict=True):
            assert_same(call(*tensors, **options), those)


def n_noted() -> int:
    return sum(isinstance(recipe, repeats.Recipe) for recipe in repeats.recipes.values())


def options_of(name: str) -> dict:
    if name.endswith("documents"):
        ids = (torch.arange(300, device="cuda", dtype=torch.int32) // 70).expand(2, -1).contiguous()
        return {"document_ids": ids, "causal": name == "documents"}
    if name == "block_mask":
        return {"block_mask": block_masks.strided(300, 2, block_size=128, device="cuda")}
    return {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": 70},
        "dropout": {"dropout_p": 0.2, "dropout_seed": torch.tensor([3], device="cuda")},
        "cut_lists": {
            "window": 70,
            "block_mask": block_masks.strided(300, 2, block_size=128, device="cuda"),
        },
    }[name]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["causal", "full", "window", "documents", "full_documents", "dropout", "block_mask", "cut_lists"],
)
# the last is the portable kernels'
@pytest.mark.parametrize("head_dim", [64, 128, 256, 16])
def test_repeated_calls_give_the_bits_of_calls_by_themselves(name, head_dim):
    options = options_of(name)
    assert_repeated_is_same(gradients, [some((2, 300, 4, head_dim)) for _ in range(4)], **options)
    # forward and backward; lists that Hopper's kernels cut begin as copies
    copies = name == "cut_lists" and head_dim > 16 and IS_HOPPER
    assert n_noted() == (0 if copies else 2), list(repeats.recipes.values())


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [1, 9000])
def test_repeated_calls_of_grouped_heads_clear_their_counters(n_kv_head, head_dim, seq_len):
    shape, of_keys = ((2, seq_len, n, head_dim) for n in (4, n_kv_head))
    sets = [(*some(shape, n=1), *some(of_keys, n=2), *some(shape, n=1)) for _ in range(3)]
    assert_repeated_is_same(gradients, sets)
    assert n_noted() == 2, list(repeats.recipes.values())
    cleared = [
        part for recipe in repeats.recipes.values() for part in recipe.allocations if part.func is torch.zeros
    ]
    # more tiles than are dealt out are taken from a counter
    assert bool(cleared) == (seq_len == 9000 and head_dim >= 128)


@pytest.mark.gpu
def test_repeated_calls_on_packed_tensors_and_on_sequences_of_any_length_give_the_same_bits():
    lengths = torch.tensor([0, 100, 300, 301], dtype=torch.int32, device="cuda")

    def packed(qkv, g):
        qkv = qkv.detach().requires_grad_()
        out = flash_attention_packed(qkv, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, qkv, g)

    def varlen(qkv, g):
        qkv = qkv[0, :301].detach().requires_grad_()
        out = flash_attention_varlen(*qkv.unbind(1), lengths, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, qkv, g[0, :301])

    sets = [(*some((2, 400, 3, 4, 64), n=1), *some((2, 400, 4, 64), n=1)) for _ in range(3)]
    for call in packed, varlen:
        assert_repeated_is_same(call, sets)
        assert n_noted() == 2, list(repeats.recipes.values())


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_repeat_the_same_call_at_once():
    sets = [some() for _ in range(4)]
    expected = [by_itself(gradients, *tensors) for tensors in sets]

    assert_same_in_threads(gradients, sets, expected)
    assert n_noted() == 2


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 16], ids=["hopper", "portable"])
def test_a_graph_captures_a_repeated_call(head_dim):
    q, k, v = some((2, 300, 4, head_dim), n=3)
    for _ in range(4):
        flash_attention(q, k, v)
    assert n_noted() == 1
    assert_graph_replays_with_other_numbers(q, k, v)


@on_hopper
@pytest.mark.gpu
def test_another_implementation_is_another_kind():
    q, k, v = some(n=3)
    for _ in range(4):
        flash_attention(q, k, v)
    assert n_noted() == 1
    before = next(iter(repeats.recipes.values())).launches[0][0]
    with use_implementation("portable"):
        for _ in range(4):
            flash_attention(q, k, v)
    assert n_noted() == 2
    assert list(repeats.recipes.values())[1].launches[0][0] is not before


@on_hopper
@pytest.mark.gpu
def test_what_the_driver_refuses_is_done_by_the_call_itself_on_a_gpu(monkeypatch):
    tensors = some()
    expected = by_itself(gradients, *tensors)
    for _ in range(4):
        gradients(*tensors)
    assert n_noted() == 2
    prepared = [launch for recipe in repeats.recipes.values() for launch, _ in recipe.launches]
    for launch in prepared:
        with monkeypatch.context() as patch:
            # more than a block may have
            patch.setattr(launch, "threads", 4096)
            assert_same(gradients(*tensors), expected)
    assert len(prepared) == 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_calls_of_its_own():
    tensors = some()
    there = [x.to("cuda:1") for x in tensors]
    expected = by_itself(gradients, *tensors)
    for _ in range(4):
        assert_same(gradients(*tensors), expected)
        assert_same((x.to("cuda:0") for x in gradients(*there)), expected)
    assert n_noted() == 4


def test_an_address_behind_a_tensor_is_not_in_it():
    memory = torch.zeros(12)
    x = memory[:6]
    assert place_of(memory[5:].data_ptr(), [x]) == Place(0, 20)
    with pytest.raises(ValueError, match="neither given nor allocated"):
        place_of(memory[6:].data_ptr(), [x])
