import torch

from kernels.layouts import bulk_readable, bulk_strides, is_bulk_readable, with_tokens_in_memory


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
