"""Attention is called past PyTorch's dispatcher only where nothing looks for its operators there."""

from typing import ClassVar

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.packed import flash_attention_packed
from tests.accuracy import random_qkv


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


class Marked(torch.Tensor):
    """A subclass that sees every operator below autograd."""

    seen: list[str]

    @staticmethod
    def __new__(cls, inner, names):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner, made.seen = inner.detach(), names
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        [names] = {id(x.seen): x.seen for x in arguments if isinstance(x, Marked)}.values()
        names.append(function.name())
        return function(*(x.inner if isinstance(x, Marked) else x for x in arguments), **(options or {}))


class Overriding(torch.Tensor):
    """A subclass that sees functions of PyTorch alone, above autograd."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.names.append(str(function))
        return super().__torch_function__(function, types, arguments, options or {})


@pytest.fixture
def qkv(device):
    return random_qkv(1, 20, 20, 1, 1, 16, torch.float32, device)


def test_a_mode_sees_the_operators_of_both_passes(qkv):
    with Seen() as seen:
        flash_attention(*qkv).sum().backward()
    assert "nanoflash::attention_forward" in seen.names
    assert "nanoflash::attention_backward" in seen.names


def test_a_mode_of_functions_sees_the_operator(qkv):
    with Called() as called:
        flash_attention(*qkv)
    assert "nanoflash.attention_forward.default" in called.names


def test_a_mode_sees_packed_attention_too(qkv):
    packed = torch.stack([x.detach() for x in qkv], dim=2).requires_grad_()
    with Seen() as seen:
        flash_attention_packed(packed).sum().backward()
    assert {"nanoflash::packed_attention_forward", "nanoflash::packed_attention_backward"} <= set(seen.names)


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_one_tensor_of_a_subclass_is_enough_for_it_to_see_the_operator(which, qkv):
    names = []
    tensors = [Marked(x, names) if place == which else x for place, x in enumerate(qkv)]
    out = flash_attention(*tensors)
    assert "nanoflash::attention_forward" in names
    torch.testing.assert_close(out.detach(), flash_attention(*qkv).detach())


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_a_subclass_that_overrides_functions_sees_the_operator_and_marks_its_results(which, qkv):
    tensors = [x.as_subclass(Overriding) if place == which else x for place, x in enumerate(qkv)]
    Overriding.names.clear()
    out = flash_attention(*tensors)
    assert "nanoflash.attention_forward.default" in Overriding.names
    assert type(out) is Overriding
    torch.testing.assert_close(out.as_subclass(torch.Tensor), flash_attention(*qkv))


@pytest.mark.parametrize("packed", [False, True])
def test_fake_tensors_of_documents_and_lengths_give_fake_results_and_gradients(packed):
    # as tools make them that plan memory
    with FakeTensorMode():
        q, k, v = random_qkv(2, 40, 40, 2, 1, 16, torch.float32, "cpu")
        if packed:
            starts = torch.zeros(3, dtype=torch.int32)
            out = flash_attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), starts)
        else:
            out = flash_attention(q, k, v, document_ids=torch.zeros(2, 40, dtype=torch.int32), window=9)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert isinstance(out, FakeTensor)
    assert out.shape == ((80, 2, 16) if packed else (2, 40, 2, 16))
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_a_view_that_is_negated_when_it_is_read_is_negated(qkv):
    q, k, v = (x.detach() for x in qkv)
    negated = torch._neg_view(v)
    assert negated.is_neg()
    torch.testing.assert_close(flash_attention(q, k, negated), -flash_attention(q, k, v))


def test_without_gradients_nothing_is_kept_and_the_results_are_the_same(qkv):
    expected = flash_attention(*qkv)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = flash_attention(*qkv)
        assert not out.requires_grad
        assert torch.equal(out, expected)


def test_a_forward_derivative_is_refused_with_and_without_grad_mode(qkv):
    q, k, v = (x.detach() for x in qkv)
    for mode in (torch.enable_grad, torch.no_grad):
        with torch.autograd.forward_ad.dual_level(), mode():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(NotImplementedError, match="forward derivative.*use.*attention_reference"):
                flash_attention(dual, k, v)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_a_transform_of_functions_is_refused_with_a_way_out(transform, qkv):
    q, k, v = (x.detach() for x in qkv)
    refusals = pytest.raises(NotImplementedError, match="torch.func .*use.*attention_reference")
    with refusals:
        transform(lambda q: flash_attention(q, k, v).sum())(q)
    with refusals:
        torch.func.jvp(lambda q: flash_attention(q, k, v), (q,), (q,))
    packed = torch.stack((q, k, v), 2)
    with refusals:
        transform(lambda qkv: flash_attention_packed(qkv).sum())(packed)


@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_vmap_is_refused_with_the_way_out(is_grad_enabled, qkv):
    q, k, v = (x.detach() for x in qkv)
    refused = pytest.raises(NotImplementedError, match="torch.func .*vmap.*use.*attention_reference")
    with torch.set_grad_enabled(is_grad_enabled), refused:
        torch.func.vmap(lambda q: flash_attention(q, k, v))(q[None])


def test_flops_are_counted_where_a_formula_is_registered(qkv):
    flops = {torch.ops.nanoflash.attention_forward: lambda *shapes, **options: 7}
    with FlopCounterMode(display=False, custom_mapping=flops) as counter:
        flash_attention(*qkv)
    assert counter.get_total_flops() == 7


def test_profilers_and_graphs_name_a_gradient_by_its_operator(qkv):
    out = flash_attention(*qkv)
    assert out.grad_fn.name() == "GradientOf_attention_forwardBackward"
    with torch.profiler.profile() as profile:
        out.sum().backward()
    assert "GradientOf_attention_forwardBackward" in {event.name for event in profile.events()}
