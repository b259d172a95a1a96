"""Which layouts the kernels read in place, and which are copied first."""

import pytest
import torch

from kernels.flash_attention import flash_attention
from kernels.layouts import bulk_readable, bulk_strides, is_bulk_readable, with_tokens_in_memory
from kernels.operators import use_implementation
from kernels.packed import flash_attention_packed


class Launches:
    """Stands in for a kernel, and keeps where its tensors lie, in place of running."""

    def __init__(self):
        self.tensors = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            # of a descriptor the tensor that it describes
            tensors = (getattr(x, "base", x) for x in arguments)
            self.tensors += [placed(x) for x in tensors if isinstance(x, torch.Tensor)]

        return launch


def placed(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


@pytest.fixture
def launches(monkeypatch) -> dict[str, Launches]:
    """Of each portable kernel; none of them runs."""
    kernels = {"forward": "forward", "preprocess": "backward", "dkdv": "backward", "dq": "backward"}
    found = {name: Launches() for name in kernels}
    for name, module in kernels.items():
        monkeypatch.setattr(f"kernels.portable.{module}.{name}_kernel", found[name])
    with use_implementation("portable"):
        yield found


@pytest.mark.parametrize("layout", ["contiguous", "packed", "heads first"])
@pytest.mark.parametrize("dout_layout", ["contiguous", "heads first", "heads expanded", "batches expanded"])
def test_views_are_read_in_place_by_every_kernel(layout, dout_layout, launches, device):
    shape = (2, 40, 3, 64)
    q, k, v = (laid_out(layout, shape, device).requires_grad_() for _ in range(3))
    dout = laid_out(dout_layout, shape, device)
    torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout)
    read = [placed(x) for x in (q, k, v, dout)]
    assert launches["forward"].tensors[:3] == read[:3]
    assert placed(dout) in launches["preprocess"].tensors
    assert launches["dkdv"].tensors[:4] == read
    assert launches["dq"].tensors[:4] == read


def test_packed_tensors_are_read_and_their_gradients_written_in_place(launches, device):
    qkv = torch.randn(2, 40, 3, 3, 64, device=device).half().requires_grad_()
    dout = torch.randn(2, 40, 3, 64, device=device).half()
    (gradient,) = torch.autograd.grad(flash_attention_packed(qkv), qkv, dout)
    parts = [placed(x) for x in qkv.unbind(2)]
    dq, dk, dv = (placed(x) for x in gradient.unbind(2))
    assert launches["forward"].tensors[:3] == parts
    assert launches["dkdv"].tensors[:4] == launches["dq"].tensors[:4] == [*parts, placed(dout)]
    assert dq in launches["dq"].tensors
    assert dk in launches["dkdv"].tensors
    assert dv in launches["dkdv"].tensors


def laid_out(layout: str, shape: tuple[int, ...], device) -> torch.Tensor:
    """(B, T, H, D) fp16, all of which bulk copies can read."""
    batch, seq_len, n_head, head_dim = shape
    if layout == "packed":
        return torch.randn(batch, seq_len, 3, n_head, head_dim, device=device).half().unbind(2)[1]
    if layout == "heads first":
        return torch.randn(batch, n_head, seq_len, head_dim, device=device).half().transpose(1, 2)
    if layout == "heads expanded":
        return torch.randn(batch, seq_len, 1, head_dim, device=device).half().expand(shape)
    if layout == "batches expanded":
        return torch.randn(1, seq_len, n_head, head_dim, device=device).half().expand(shape)
    return torch.randn(shape, device=device).half()


def test_bulk_copies_read_the_gradient_of_a_sum():
    dout = torch.full((), 0.5, dtype=torch.bfloat16).expand(2, 100, 4, 64)
    assert not is_bulk_readable(dout)
    tokens = with_tokens_in_memory(dout)
    assert is_bulk_readable(tokens)
    assert torch.equal(tokens, dout)
    # one head of one batch
    assert tokens.untyped_storage().nbytes() == 100 * 64 * 2
    over_heads = torch.zeros(2, 100, 1, 64).expand(2, 100, 4, 64)
    assert with_tokens_in_memory(over_heads) is over_heads
    dense = torch.zeros(2, 100, 4, 64)
    assert with_tokens_in_memory(dense) is dense


def test_views_that_bulk_copies_read_are_not_copied():
    packed = torch.randn(2, 10, 3, 4, 8).half()
    heads_first = torch.randn(2, 4, 10, 8).half().transpose(1, 2)
    one_token = torch.randn(2, 1, 4, 8).half().as_strided((2, 1, 4, 8), (32, 5, 8, 1))
    for x in (*packed.unbind(2), heads_first, heads_first[:, :, :1].expand(2, 10, 4, 8), one_token):
        assert bulk_readable(x) is x


def test_views_that_bulk_copies_cannot_read_are_copied_whole():
    aligned = torch.randn(2, 10, 8, 16).half()
    for x in (aligned[..., 1:9], aligned[..., ::2], aligned.transpose(2, 3)):
        assert not is_bulk_readable(x)
        assert is_bulk_readable(bulk_readable(x))
        assert torch.equal(bulk_readable(x), x)


def test_the_stride_of_a_dimension_of_one_element_does_not_matter():
    x = torch.randn(100).half().as_strided((1, 3, 1, 8), (7, 16, 5, 1))
    assert is_bulk_readable(x)
    assert bulk_strides(x) == (8, 16, 8)


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batches", "tokens", "heads"])
def test_views_whose_rows_begin_between_aligned_addresses_are_copied(dimension):
    strides = [1024, 64, 16, 1]
    strides[dimension] += 4
    x = torch.randn(4096).half().as_strided((2, 3, 4, 8), strides)
    assert not is_bulk_readable(x)
    assert is_bulk_readable(bulk_readable(x))
    assert torch.equal(bulk_readable(x), x)
    # four bytes: aligned
    assert is_bulk_readable(torch.randn(4096).as_strided((2, 3, 4, 8), strides))
