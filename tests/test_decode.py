"""Attention of new queries to a cache: as accurate as torch, whatever the lengths, heads and splits."""

import pytest
import torch

from kernels import block_masks, decode
from kernels.decode import append_and_decode, decode_attention
from kernels.portable.decode import choose_splits
from kernels.reference import decode_reference
from model.rope import RotaryConfig, rotate, rotation
from tests.accuracy import assert_within_rule

CAPACITY = 200
# the interpreter's products of it are wrong
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


def random_cache(batch, n_query, n_head, n_kv_head, head_dim, dtype, device):
    q = torch.randn(batch, n_query, n_head, head_dim, device=device).to(dtype)
    # as the model stores them: a head's keys one behind the other
    k, v = torch.randn(2, batch, n_kv_head, CAPACITY, head_dim, device=device).to(dtype).transpose(2, 3)
    return q, k, v


def assert_as_accurate_as_torch(q, k, v, lengths, **options):
    ours = decode_attention(q, k, v, lengths, **options)
    torchs = decode_reference(q, k, v, lengths, **options)
    truth = decode_reference(q.double(), k.double(), v.double(), lengths, **options)
    assert_within_rule("out", ours, torchs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("n_query", [1, 3])
def test_queries_at_the_end_of_a_cache_are_as_accurate_as_torch(n_query, n_head, n_kv_head, dtype, device):
    q, k, v = random_cache(4, n_query, n_head, n_kv_head, 64, dtype, device)
    lengths = torch.tensor([n_query, 32, 33, CAPACITY], device=device)
    assert_as_accurate_as_torch(q, k, v, lengths)


@pytest.mark.parametrize("seen", [CAPACITY + 1, 2**31 - 1, 2**31, 2**32 + 1])
def test_a_cache_may_have_seen_any_number_of_tokens(seen, device):
    q, k, v = random_cache(1, 1, 2, 2, 64, torch.float32, device)
    full, lengths = (torch.tensor([n], device=device) for n in (CAPACITY, seen))
    assert torch.equal(decode_attention(q, k, v, lengths), decode_attention(q, k, v, full))


def test_queries_may_be_farther_apart_than_32_bits_count(device):
    # of 4 GiB little is touched
    n_query, stride = 17, 2**27
    far = torch.empty((n_query - 1) * stride + 64, dtype=torch.float16, device=device)
    q, k, v = random_cache(1, n_query, 1, 1, 64, torch.float16, device)
    far = far.as_strided(q.shape, (0, stride, 64, 1)).copy_(q)
    lengths = torch.tensor([CAPACITY], device=device)
    assert torch.equal(decode_attention(far, k, v, lengths), decode_attention(q, k, v, lengths))


@pytest.mark.parametrize("head_dim", [8, 80, 128])
def test_any_head_dim_will_do(head_dim, device):
    q, k, v = random_cache(1, 1, 4, 2, head_dim, torch.float32, device)
    assert_as_accurate_as_torch(q, k, v, torch.tensor([150], device=device), softmax_scale=0.3)


@pytest.mark.parametrize("pattern", ["window(70) | sinks(3)", "strided(2)"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_pattern_of_blocks_sees_what_its_row_of_the_mask_says(pattern, block_size, device):
    mask = block_masks.parse(pattern, CAPACITY, block_size=block_size, device=device)
    q, k, v = random_cache(4, 1, 4, 2, 64, torch.float32, device)
    lengths = torch.tensor([1, 64, 131, CAPACITY], device=device, dtype=torch.int32)
    assert_as_accurate_as_torch(q, k, v, lengths, block_mask=mask)


@pytest.mark.parametrize("pattern", [None, "window(70) | sinks(3)", "window(30) & strided(2)"])
@pytest.mark.parametrize(("head_dim", "counted_in"), [(64, torch.int64), (80, torch.int32)])
def test_a_new_key_counts_as_if_it_were_in_the_cache_and_is_there_afterwards(
    head_dim, counted_in, pattern, device
):
    q, k, v = random_cache(6, 1, 4, 2, head_dim, torch.float32, device)
    # a block mask has no more queries than the cache has places; without one it may be a ring
    lengths = [1, 32, 33, 64, 131, CAPACITY if pattern else CAPACITY + 77]
    lengths = torch.tensor(lengths, device=device, dtype=counted_in)
    mask = pattern and block_masks.parse(pattern, CAPACITY, block_size=64, device=device)
    rows, places = torch.arange(6, device=device), (lengths - 1) % CAPACITY
    new = tuple(x[rows, places][:, None].clone() for x in (k, v))
    complete = k.clone(), v.clone()
    # what stood in its place before is not looked at
    k[rows, places], v[rows, places] = float("nan"), float("nan")
    ours = append_and_decode(torch.cat((q, *new), dim=2), k, v, lengths, block_mask=mask)
    torchs = decode_reference(q, *complete, lengths, block_mask=mask)
    truth = decode_reference(q.double(), *(x.double() for x in complete), lengths, block_mask=mask)
    assert_within_rule("out", ours, torchs, truth)
    assert torch.equal(k, complete[0])
    assert torch.equal(v, complete[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("head_dim", [8, 80])
def test_query_and_new_key_are_turned_on_their_way(head_dim, dtype, device):
    q, k, v = random_cache(3, 1, 6, 2, head_dim, dtype, device)
    lengths = torch.tensor([1, 100, CAPACITY + 5], device=device)
    rotary = RotaryConfig(base=10000.0)
    turn = rotation(rotary, head_dim, (lengths - 1)[:, None])
    new = tuple(torch.randn(3, 1, 2, head_dim, device=device).to(dtype) for _ in range(2))
    turned = rotate(q, *turn), rotate(new[0], *turn)
    expected = append_and_decode(torch.cat((*turned, new[1]), dim=2), k.clone(), v.clone(), lengths)
    out = append_and_decode(torch.cat((q, *new), dim=2), k, v, lengths, turn=turn)
    # the same products, which the kernel may round once where torch rounds twice
    rows, places = torch.arange(3, device=device), (lengths - 1) % CAPACITY
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    tolerance = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(k[rows, places], turned[1][:, 0], **tolerance)
    torch.testing.assert_close(out, expected, **tolerance)
    assert not torch.equal(k[rows, places][1], new[0][1, 0])


def test_cosine_and_sine_may_be_one_tensor(device):
    q, k, v = random_cache(2, 1, 6, 2, 64, torch.float32, device)
    qkv = torch.cat((q, *torch.randn(2, 2, 1, 2, 64, device=device)), dim=2)
    lengths = torch.tensor([7, 100], device=device)
    turn = rotation(RotaryConfig(base=10000.0), 64, (lengths - 1)[:, None])
    outs = [append_and_decode(qkv, k, v, lengths, turn=x) for x in (turn, torch.stack(turn))]
    assert torch.equal(*outs)


def test_a_key_that_its_own_query_does_not_see_is_stored_and_does_not_count(device):
    q, k, v = random_cache(1, 1, 2, 2, 64, torch.float32, device)
    sees = torch.ones(CAPACITY, CAPACITY, dtype=torch.bool).tril(-1).to(device)
    mask = block_masks.from_dense(sees, block_size=64)
    lengths = torch.tensor([150], device=device)
    expected = decode_attention(q, k, v, lengths, block_mask=mask)
    new = torch.randn(2, 1, 1, 2, 64, device=device)
    out = append_and_decode(torch.cat((q, *new), dim=2), k, v, lengths, block_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(k[:, 149:150], new[0])


def test_an_empty_sequence_takes_no_new_key(device):
    q, k, v = random_cache(2, 1, 2, 1, 64, torch.float32, device)
    before = k.clone(), v.clone()
    new = torch.randn(2, 2, 1, 1, 64, device=device)
    lengths = torch.tensor([0, 0], device=device)
    out = append_and_decode(torch.cat((q, *new), dim=2), k, v, lengths)
    assert not out.any()
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


@pytest.mark.parametrize("n_head", [40, 128])
def test_many_heads_may_share_their_keys(n_head, device):
    q, k, v = random_cache(1, 1, n_head, 1, 64, torch.float32, device)
    assert_as_accurate_as_torch(q, k, v, torch.tensor([150], device=device))


@pytest.mark.parametrize("n_splits", [1, 2, 7, 100])
def test_the_number_of_splits_changes_nothing_but_rounding(n_splits, device, monkeypatch):
    q, k, v = random_cache(2, 2, 4, 2, 64, torch.float32, device)
    lengths = torch.tensor([CAPACITY, 40], device=device)
    outs = []
    for n in (1, n_splits):
        monkeypatch.setattr("kernels.portable.decode.choose_splits", lambda *_, n=n: n)
        outs.append(decode_attention(q, k, v, lengths))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)


def test_an_empty_sequence_gives_zeros(device):
    q, k, v = random_cache(1, 1, 2, 1, 64, torch.float32, device)
    assert not decode_attention(q, k, v, torch.tensor([0], device=device)).any()


def test_a_scale_of_zero_is_a_scale(device):
    q, k, v = random_cache(1, 1, 2, 2, 64, torch.float32, device)
    lengths = torch.tensor([77], device=device)
    out = decode_attention(q, k, v, lengths, softmax_scale=0.0)
    torch.testing.assert_close(out[:, 0], v[:, :77].mean(dim=1))
    torch.testing.assert_close(decode_reference(q, k, v, lengths, softmax_scale=0.0), out)


def test_lengths_may_be_a_view(device):
    q, k, v = random_cache(3, 1, 2, 2, 64, torch.float32, device)
    columns = torch.tensor([[77, 0], [5, 0], [30, 0]], device=device)
    for lengths in (columns[:, 0], torch.tensor([40], device=device).expand(3)):
        expected = decode_attention(q, k, v, lengths.contiguous())
        assert torch.equal(decode_attention(q, k, v, lengths), expected)


def test_the_keys_behind_the_length_are_never_read(device):
    q, k, v = random_cache(1, 1, 2, 2, 64, torch.float32, device)
    lengths = torch.tensor([77], device=device)
    expected = decode_attention(q, k, v, lengths)
    k[:, 77:], v[:, 77:] = float("nan"), float("nan")
    assert torch.equal(decode_attention(q, k, v, lengths), expected)


def test_the_operator_keeps_pytorchs_rules(device):
    q, k, v = random_cache(1, 1, 2, 2, 64, torch.float32, device)
    arguments = q, k, v, torch.tensor([77], device=device), [], 0.125
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.nanoflash.decode_attention, arguments, test_utils=checks)
    qkv, turn = torch.randn(1, 1, 6, 64, device=device), list(torch.randn(2, 1, 1, 1, 32, device=device))
    arguments = qkv, k, v, turn, torch.tensor([77], device=device), [], 0.125
    torch.library.opcheck(torch.ops.nanoflash.append_and_decode, arguments, test_utils=checks)


def test_there_are_splits_enough_for_the_gpu_and_never_more_than_tiles():
    assert choose_splits(1, 1000, torch.device("cpu")) == 4
    assert choose_splits(64, 1000, torch.device("cpu")) == 1
    assert choose_splits(1, 2, torch.device("cpu")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 1, 3, 64)}, "3 heads of q must be a multiple of those of k and v, got 2"),
        ({"q": torch.zeros(1, 1, 2, 64).half()}, "one dtype, got q torch.float16 and k torch.float32"),
        ({"q": torch.zeros(1, 2, 64)}, "q must have 4 dimensions"),
        ({"q": torch.zeros(1, 1, 64, 2).mT}, r"q must have contiguous channels, .*: call q.contiguous\(\)"),
        (
            {"lengths": torch.zeros(1, dtype=torch.int32, device="meta")},
            "lengths must be on .*, got meta: move",
        ),
        ({"lengths": torch.zeros(1)}, r"int32 or int64, got \(1,\) torch.float32"),
        ({"q": torch.zeros(1, 129, 2, 64)}, "129 queries for each of 1 heads.*use flash_attention"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths must be \(1,\) int32 or int64"),
        ({"lengths": [5]}, "lengths must be a tensor, got list"),
        ({"block_mask": object()}, "block_mask must be a BlockMask, got object"),
        ({"k": torch.zeros(1, CAPACITY, 64, 2).mT}, r"k must .*: keep k.contiguous\(\) in its place"),
        ({"softmax_scale": "a"}, "softmax_scale must be a number, got str 'a'"),
        ({"softmax_scale": float("inf")}, "softmax_scale must be finite, got inf"),
        ({"softmax_scale": -1e39}, "softmax_scale must be finite, got -1e.39: scale q"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, device):
    k = torch.zeros(1, CAPACITY, 2, 64)
    arguments = {"q": torch.zeros(1, 1, 2, 64), "k": k, "v": k, "lengths": torch.tensor([5])} | changes
    with pytest.raises(ValueError, match=message):
        decode_attention(**{name: moved(x, device) for name, x in arguments.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(1, 1, 4, 64)}, r"qkv must be \(B, 1, H \+ 2 Hkv, D\), .* got \(1, 1, 4, 64\)"),
        ({"qkv": torch.zeros(1, 2, 6, 64)}, r"one token, .* got \(1, 2, 6, 64\) and \(1, 200, 2, 64\)"),
        ({"qkv": [1]}, "qkv must be a tensor, got list"),
        ({"k": [1]}, "k must be a tensor, got list"),
        ({"turn": (1, 2)}, "turn's cos must be a tensor, got int"),
        ({"qkv": torch.zeros(1, 1, 7, 64)}, r"H a multiple of Hkv, .* got \(1, 1, 7, 64\)"),
        ({"k": torch.zeros(200, 2, 64)}, r"k \(B, capacity, Hkv, D\), got .* and \(200, 2, 64\)"),
        ({"qkv": torch.zeros(1, 1, 64, 6).mT}, "qkv must have contiguous channels, got strides"),
        ({"turn": (torch.zeros(1, 1, 1, 32),)}, r"turn must be \(cos, sin\), got 1 tensors"),
        ({"turn": 5}, r"turn must be \(cos, sin\), got int"),
        ({"turn": torch.tensor(1.0)}, r"turn must be \(cos, sin\), got Tensor"),
        ({"qkv": torch.zeros(1, 1, 6, 64).half()}, "one dtype, got q torch.float16 and k torch.float32"),
        (
            {"turn": (torch.zeros(1, 1, 1, 64),) * 2},
            r"turn's cos must be \(1, 1, 1, 32\) float32 .* got \(1, 1, 1, 64\)",
        ),
        (
            {"turn": (torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 32).half())},
            "turn's sin .* torch.float16",
        ),
    ],
)
def test_a_new_token_that_does_not_fit_is_refused(changes, message, device):
    k, v = torch.zeros(2, 1, CAPACITY, 2, 64)
    arguments = {"qkv": torch.zeros(1, 1, 6, 64), "k": k, "v": v, "lengths": torch.tensor([5])} | changes
    with pytest.raises(ValueError, match=message):
        append_and_decode(**{name: moved(x, device) for name, x in arguments.items()})


def test_a_new_token_is_refused_by_one_tensor_for_keys_and_values(device):
    cache = torch.zeros(1, CAPACITY, 2, 64, device=device)
    lengths = torch.tensor([5], device=device)
    for k, v in ((cache, cache), (cache[:], cache[:])):
        with pytest.raises(ValueError, match="k and v must be two tensors, got one for both"):
            append_and_decode(torch.zeros(1, 1, 6, 64, device=device), k, v, lengths)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("k", (1, CAPACITY, 1, 64), r"k .* strides \(12800, 64, 0, 1\): keep k.contiguous\(\) in its place"),
        ("v", (1, 1, 2, 64), r"v .* strides \(128, 0, 64, 1\): keep v.contiguous\(\) in its place"),
    ],
)
def test_a_new_token_is_refused_by_a_cache_whose_tokens_or_heads_share_memory(name, part, message, device):
    k, v = torch.zeros(2, 1, CAPACITY, 2, 64, device=device)
    arguments = {"qkv": torch.zeros(1, 1, 6, 64, device=device), "k": k, "v": v}
    # behind a move they would have memory of their own
    arguments[name] = torch.zeros(part, device=device).expand(k.shape)
    with pytest.raises(ValueError, match=message):
        append_and_decode(**arguments, lengths=torch.tensor([5], device=device))


def test_a_dimension_of_one_shares_no_memory_whatever_its_stride(device):
    k, v = (torch.zeros(1, CAPACITY, 1, 64, device=device) for _ in range(2))
    k = k.as_strided(k.shape, (0, 64, 0, 1))
    qkv = torch.ones(1, 1, 3, 64, device=device)
    append_and_decode(qkv, k, v, torch.tensor([5], device=device))
    assert bool((k[0, 4] == 1.0).all())


@pytest.mark.parametrize("changed", ["q", "k", "v"])
def test_a_forward_derivative_is_refused_with_a_way_out(changed, device):
    arguments = dict(zip("qkv", random_cache(1, 1, 2, 2, 64, torch.float32, device), strict=True))
    with torch.autograd.forward_ad.dual_level():
        x = arguments[changed]
        arguments[changed] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward derivative: use attention_reference"):
            decode_attention(**arguments, lengths=torch.tensor([5], device=device))


def moved(x, device):
    if isinstance(x, tuple):
        return tuple(moved(item, device) for item in x)
    return x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x


@pytest.mark.parametrize(
    ("n_query", "capacity", "n_head", "message"),
    [
        (1, 100, 1, "block_mask must be of 200 queries and keys, .* got 100 and 100: build it for 200"),
        (1, 200, 2, "block_mask must be one for all .* got 1 batches and 2 heads"),
        (2, 200, 1, "q must have one query with block_mask, got 2: pass one token"),
    ],
)
def test_a_block_mask_of_another_length_or_for_heads_or_queries_is_refused(
    n_query, capacity, n_head, message, device
):
    q, k, v = random_cache(1, n_query, 2, 2, 64, torch.float32, device)
    mask = block_masks.causal(capacity, device=device).expand(1, n_head)
    with pytest.raises(ValueError, match=message):
        decode_attention(q, k, v, torch.tensor([5], device=device), block_mask=mask)


def test_more_heads_than_a_grid_has_are_refused(monkeypatch):
    monkeypatch.setattr(decode, "MOST_HEADS", 3)
    x = torch.zeros(2, 1, 2, 16)
    with pytest.raises(ValueError, match="k must have at most 3 heads over all batches, got 4"):
        decode.decode_attention(x, x, x, torch.ones(2, dtype=torch.int32))
    # those of queries that share keys are one in the grid
    keys, many, lengths = torch.zeros(2, 1, 1, 16), torch.zeros(2, 1, 4, 16), torch.ones(2, dtype=torch.int32)
    decode.decode_attention(many, keys, keys, lengths)
