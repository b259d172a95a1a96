"""Dropout inside the kernels: the mask of kernels/dropout.py, bit for bit, in every pass and every tile."""

import random

import pytest
import torch
from torch import Tensor

from kernels import tiles
from kernels.dropout import (
    FEWEST_KEPT,
    MOST_DROPPED,
    MOST_KEPT,
    dropout_keep_mask,
    kept_halves,
    least_line,
    limit_bits,
    line_bits,
    multiply_words,
    pair_word,
)
from kernels.flash_attention import flash_attention
from kernels.reference import attention_reference
from tests.accuracy import assert_as_accurate_as_torch, random_qkv

# bf16 dots are wrong in the interpreter
HALF = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 20}])
def test_forward_and_backward_drop_what_the_mask_says(options, device):
    q, k, v = random_qkv(2, 70, 70, 4, 2, 16, torch.float32, device)
    assert_as_accurate_as_torch(flash_attention, q, k, v, dropout_p=0.25, dropout_seed=2**40 + 3, **options)


@pytest.mark.parametrize(
    ("dropout_p", "seed", "batch", "head_dim"), [(0.3, 7, 2, 64), (0.2, 2**61 + 5, 1, 128)]
)
def test_every_kernel_drops_the_mask_bit_for_bit(dropout_p, seed, batch, head_dim, device):
    keep = dropout_keep_mask(seed, dropout_p, batch, 2, head_dim, head_dim, device)
    for name, mask in masks_of_kernels(dropout_p, seed, batch, 2, head_dim, device).items():
        assert torch.equal(mask, keep), name


@pytest.mark.parametrize("dropout_p", [0.1, 0.9])
def test_a_default_dtype_changes_no_mask(dropout_p, other_default_dtype):
    expected = dropout_keep_mask(7, dropout_p, 2, 3, 70, 90)
    with other_default_dtype():
        assert torch.equal(dropout_keep_mask(7, dropout_p, 2, 3, 70, 90), expected)


@pytest.mark.parametrize(("i", "j"), [(5, 9), (30, 43)])
def test_the_limit_of_every_kernel_is_exact(i, j, device):
    def is_kept(kept: int) -> bool:
        return bool(dropout_keep_mask(11, 1.0 - kept / 2**16, 1, 1, 64, 64)[0, 0, i, j])

    # how many halves keep this position, by halving: it is kept by all that keep more
    low, high = FEWEST_KEPT, MOST_KEPT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_kept(middle) else (middle, high)
    # one of the positions on each side of 0, where the order of the bits changes
    assert (high > 2**15 + 128) == (i == 5)
    for kept in (low, high):
        for name, mask in masks_of_kernels(1.0 - kept / 2**16, 11, 1, 1, 64, device).items():
            assert mask[0, 0, i, j] == (kept == high), name


def masks_of_kernels(
    dropout_p: float, seed: int, batch: int, n_head: int, n: int, device
) -> dict[str, Tensor]:
    """What the forward pass, dv, dk and dq keep, (B, H, n, n) each, of as many tokens as channels.

    Queries or keys of 0 make all probabilities 1 / n. Then values of an identity matrix show in out, column
    by column, what is kept, and such a dout shows it in dv. With v and dout of ones dP is n / (1 - dropout_p)
    or 0, and delta, its mean over a row, lies in between: the sign of dS is the mask.
    """
    ones = torch.ones(batch, n, n_head, n, device=device)
    eye = torch.eye(n, device=device)[None, :, None].expand_as(ones).contiguous()
    zeros = torch.zeros_like(ones)
    options = {"causal": False, "dropout_p": dropout_p, "dropout_seed": seed}
    v = eye.clone().requires_grad_()
    out = flash_attention(zeros, eye, v, **options)
    (dv,) = torch.autograd.grad(out, v, eye)
    q = zeros.clone().requires_grad_()
    (dq,) = torch.autograd.grad(flash_attention(q, eye, ones, **options), q, ones)
    k = zeros.clone().requires_grad_()
    (dk,) = torch.autograd.grad(flash_attention(eye, k, ones, **options), k, ones)
    return {
        "forward": (out != 0).transpose(1, 2),
        "dv": (dv != 0).permute(0, 2, 3, 1),
        "dk": (dk > 0).permute(0, 2, 3, 1),
        "dq": (dq > 0).transpose(1, 2),
    }


@pytest.mark.parametrize("dtype", HALF)
def test_rows_of_two_keys_are_as_accurate_as_torch(dtype, device):
    for seed in range(5):
        q, k, v = random_qkv(2, 2, 2, 3, 1, 64, dtype, device)
        options = {"causal": False, "dropout_p": 0.1, "dropout_seed": seed}
        assert_as_accurate_as_torch(flash_attention, q, k, v, **options)


@pytest.mark.parametrize("dtype", HALF)
def test_the_gradient_of_a_row_of_one_key_is_rounding_alone(dtype, device):
    # it is 0: dout v^T - delta cancels, up to the rounding of out, from which delta is computed
    q, k, v = random_qkv(4, 1, 1, 3, 1, 64, dtype, device)
    out = flash_attention(q, k, v, dropout_p=0.1, dropout_seed=3)
    dout = torch.randn_like(out)
    dq, _, dv = torch.autograd.grad(out, (q, k, v), dout)
    rounding = torch.finfo(dtype).eps * (out * dout).float().abs().sum(-1, keepdim=True)
    assert (dq.float().abs() <= rounding * k.float().abs() * 64**-0.5).all()
    torch.testing.assert_close(dv, (dout * (out != 0)).sum(2, keepdim=True) / 0.9, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "tile", [tiles.Tile(16, 16, 4, 1), tiles.Tile(16, 32, 4, 1), tiles.Tile(64, 64, 4, 1)]
)
def test_the_mask_does_not_depend_on_the_tile(tile, device, monkeypatch):
    q, k, v = random_qkv(1, 70, 70, 1, 1, 16, torch.float32, device)
    monkeypatch.setattr("kernels.portable.forward.choose_tile", lambda *_, **__: tile)
    monkeypatch.setattr("kernels.portable.backward.choose_tile", lambda *_, **__: tile)
    assert_as_accurate_as_torch(flash_attention, q, k, v, dropout_p=0.5, dropout_seed=11)


@pytest.mark.parametrize("dropout_p", [0.1, 0.37, 0.5, 0.9])
def test_the_keep_rate_is_exact(dropout_p):
    keep = dropout_keep_mask(5, dropout_p, 4, 8, 256, 256)
    n = keep.numel()
    deviation = (n * dropout_p * (1 - dropout_p)) ** 0.5
    # words are shared: their decisions add up to a little more than independent ones would
    assert abs(int(keep.sum()) - n * (1 - dropout_p)) < 4 * deviation


def test_the_limit_keeps_exactly_as_many_halves_as_the_scale_says():
    halves = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    generator = random.Random(0)
    for dropout_p in [generator.random() * MOST_DROPPED for _ in range(300)] + [1e-300, 0.5, MOST_DROPPED]:
        limit = torch.tensor(limit_bits(dropout_p), dtype=torch.uint16).view(torch.bfloat16)
        assert int((~(halves >= limit)).sum()) == kept_halves(dropout_p)


def test_the_keep_rate_is_right_to_sixteen_bits():
    generator = random.Random(0)
    for dropout_p in [generator.random() * MOST_DROPPED for _ in range(1000)] + [0.1, 0.5, MOST_DROPPED]:
        assert abs(kept_halves(dropout_p) / 2**16 - (1.0 - dropout_p)) <= 2**-17
    # but around the two zeros, which are equal, and where nothing would be dropped
    assert kept_halves(1.0 - 32895 / 2**16) == 32896
    assert kept_halves(1e-300) == 2**16 - 2


def test_heads_batches_rows_and_seeds_are_independent():
    a = dropout_keep_mask(5, 0.5, 2, 2, 128, 128)
    b = dropout_keep_mask(6, 0.5, 2, 2, 128, 128)
    pairs = [
        (a, b),
        (a[0], a[1]),
        (a[:, 0], a[:, 1]),
        (a[..., 1:, :], a[..., :-1, :]),
        (a[..., 1:], a[..., :-1]),
    ]
    for x, y in pairs:
        agree = (x == y).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / x.numel() ** 0.5 + 0.004


@pytest.mark.parametrize("dropout_p", [-0.1, 0.9962, 1.0, float("nan")])
def test_the_reference_refuses_a_rate_that_no_limit_gives(dropout_p):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match=f"dropout_p must be .*got {dropout_p}"):
        attention_reference(q, q, q, dropout_p=dropout_p, dropout_seed=1)


def test_a_maximum_and_a_minimum_drop_what_the_limit_says():
    halves = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    generator = random.Random(1)
    rates = [generator.random() * MOST_DROPPED for _ in range(300)] + [1e-300, 0.1, MOST_DROPPED]
    # around the limit of 0, whose neighbours are the smallest numbers
    rates += [1.0 - kept / 2**16 for kept in range(32894 - 20, 32894 + 20)]
    for dropout_p in rates:
        limit = torch.tensor(limit_bits(dropout_p), dtype=torch.uint16).view(torch.bfloat16)
        slope, start = torch.tensor(line_bits(dropout_p), dtype=torch.uint16).view(torch.bfloat16).double()
        # exact, as is the sum before the instruction rounds it, and both round alike to what is below 2**-6
        line = (halves.double() * slope + start).clamp(min=0.0)
        assert torch.equal(line.isnan() | (line >= 2.0**-6), ~(halves >= limit))
        assert torch.equal(line == 0.0, halves >= limit)
        assert line[line > 0.0].min() >= least_line(dropout_p) >= 2.0**-6
    assert least_line(0.1) > 2.0**100


def test_decisions_are_uncorrelated_at_every_offset_and_a_product_alone_would_not_do(monkeypatch):
    assert largest_correlation() < 6
    monkeypatch.setattr("kernels.dropout.draw", multiply_words)
    assert largest_correlation() > 20


def test_rows_columns_and_heads_are_uncorrelated_any_two_of_them():
    n = 1024
    mask = dropout_keep_mask(3, 0.5, 1, 2, n, n)[0].double() * 2 - 1
    rows, columns = mask[0].split(n // 2), mask[0].T.split(n // 2)
    for x, y in (rows, columns, (mask[0], mask[1])):
        products = x @ y.T / n**0.5
        assert products.abs().max() < 6
        assert abs(products.std() - 1.0) < 0.01


def test_no_line_of_a_mask_is_a_sum_of_others():
    # the largest singular value of as many random signs is two deviations of a line; structure adds to it
    mask = dropout_keep_mask(9, 0.5, 1, 1, 1024, 1024)[0, 0].double() * 2 - 1
    assert torch.linalg.matrix_norm(mask, 2) < 2.1 * 1024**0.5


def test_words_of_pairs_are_odd_and_distinct():
    words = pair_word(torch.arange(2**18))
    assert (words % 2 == 1).all()
    assert len(words.unique()) == len(words)


def largest_correlation() -> float:
    """Of a mask's decisions with those at any offset, in standard deviations of independent ones."""
    n = 512
    x = dropout_keep_mask(3, 0.5, 1, 1, n, n)[0, 0].double() * 2 - 1
    correlations = torch.fft.irfft2(torch.fft.rfft2(x).abs() ** 2) / n
    # of decisions that share a word, see kernels/dropout.py
    correlations[0, list(range(10)) + list(range(-9, 0))] = 0
    return correlations.abs().max().item()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_nan_among_the_queries_reaches_dk_and_dv(head_dim, device):
    q, k, v = random_qkv(1, 40, 40, 2, 1, head_dim, torch.float16, device)
    with torch.no_grad():
        q[0, 20, 0, 0] = float("nan")
    out = flash_attention(q, k, v, dropout_p=0.1, dropout_seed=3)
    dk, dv = torch.autograd.grad(out, (k, v), torch.ones_like(out))
    # causal: query 20 sees the keys to 20; of those dropped it may or may not reach dv
    kept = dropout_keep_mask(3, 0.1, 1, 2, 40, 40, device)[0, 0, 20, :21]
    assert dk[:, :21].isnan().all()
    assert dv[0, :21][kept].isnan().all()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)
    runs = [flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_seed_may_be_a_tensor(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)
    seed = torch.tensor([9], device=device)
    number = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=9)
    assert torch.equal(flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed), number)


def test_without_a_seed_dropout_follows_the_generator_of_torch(device):
    q, k, v = random_qkv(1, 40, 40, 1, 1, 16, torch.float32, device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
