"""Block masks refuse what they cannot hold, with the argument, its value and the way out."""

import copy

import numpy as np
import pytest
import torch

from kernels import block_masks
from kernels.block_mask import BlockMask, reach, without_lists
from kernels.flash_attention import flash_attention


def dense(*shape: int) -> BlockMask:
    return block_masks.from_dense(torch.ones(shape, dtype=torch.bool), block_size=64)


def intervals(first: list, end: list, seq_k: int, **options) -> BlockMask:
    return block_masks.from_intervals(torch.tensor(first), torch.tensor(end), seq_k, **options)


def blocks(row: list, column: list) -> BlockMask:
    return block_masks.from_blocks(torch.tensor(row), torch.tensor(column), 200)


def top_k(q_shape: tuple[int, ...], k_shape: tuple[int, ...], n: int = 1, **options) -> BlockMask:
    return block_masks.top_k(torch.zeros(q_shape), torch.zeros(k_shape), n, **options)


def on_meta(mask: BlockMask) -> BlockMask:
    """The same mask on the device that is everywhere and has no values."""
    moved = copy.copy(mask)
    for name in ("keys", "tiles", "bits"):
        setattr(moved, name, getattr(mask, name).to("meta"))
    return moved


REFUSED = {
    "strides of a fraction": (
        lambda: block_masks.strided(1024, 1.5),
        "n_blocks_apart must be an integer, got float 1.5",
    ),
    "a window of a fraction": (
        lambda: block_masks.bigbird(1024, 1.5, 1, 1),
        "n_window must be an integer, got float 1.5",
    ),
    "a window of True": (lambda: block_masks.window(128, True), "n must be an integer, got bool True"),
    "window of none": (lambda: block_masks.window(100, 0), "n must be at least 1, got 0"),
    "global blocks": (lambda: block_masks.bigbird(100, 2, -1, 0), "n_global must be at least 0, got -1"),
    "random blocks": (lambda: block_masks.bigbird(100, 2, 0, -1), "n_random must be at least 0, got -1"),
    "blocks of none": (
        lambda: block_masks.strided(100, 2, block_size=0),
        r"block_size must be one of \(64, 128\), got 0",
    ),
    "blocks of 32": (
        lambda: block_masks.causal(100, block_size=32),
        r"block_size must be one of \(64, 128\), got 32",
    ),
    "blocks of a float": (
        lambda: block_masks.causal(100, block_size=64.0),
        r"block_size must be one of \(64, 128\), got 64\.0",
    ),
    "no token": (lambda: block_masks.causal(0), "seq_len must be at least 1, got 0"),
    "fewer tokens than none": (lambda: block_masks.causal(-5), "seq_len must be at least 1, got -5"),
    "no token in strides": (lambda: block_masks.strided(0, 2), "seq_len must be at least 1, got 0"),
    "no query in blocks": (
        lambda: block_masks.from_blocks(torch.tensor([0]), torch.tensor([0]), 0),
        "seq_q must be at least 1, got 0",
    ),
    "no query in intervals": (lambda: intervals([], [], 3), "seq_q must be at least 1, got 0"),
    "no key in intervals": (lambda: intervals([0], [0], 0), "seq_k must be at least 1, got 0"),
    "no query in a dense mask": (lambda: dense(0, 5), "seq_q must be at least 1, got 0"),
    "no key in a dense mask": (lambda: dense(5, 0), "seq_k must be at least 1, got 0"),
    "a row that is not there": (lambda: blocks([2], [0]), "row must be from 0 to 1.*got 2 to 2"),
    "a column that is not there": (lambda: blocks([0], [-1]), "column must be from 0 to 1.*got -1 to -1"),
    "more rows than columns": (lambda: blocks([0, 1], [0]), r"row and column must be .*\(2,\) and .*\(1,\)"),
    "fractions of blocks": (lambda: blocks([0.5], [0.0]), "row and column must be int32 or int64.*float32"),
    "blocks in rows": (
        lambda: blocks([[0, 1]], [[0, 1]]),
        r"row and column must be .* \(n,\), got .*\(1, 2\)",
    ),
    "first that decreases": (
        lambda: intervals([0, 1, 0], [2, 2, 2], 2),
        "first must not decrease .*, got 0 after 1 at query 2: use from_dense",
    ),
    "end that decreases in one batch": (
        lambda: intervals([[0] * 3, [0] * 3], [[1, 2, 3], [1, 3, 2]], 3),
        "end must not decrease .*, got 2 after 3 at query 2: use from_dense",
    ),
    "an end beyond the keys": (
        lambda: intervals([0, 0], [1, 300], 2),
        "end must be from 0 to seq_k, 2, got 1 to 300",
    ),
    "a first before the keys": (
        lambda: intervals([-1, 0], [1, 2], 2),
        "first must be from 0 to seq_k, 2, got -1 to 0",
    ),
    "intervals of other lengths": (lambda: intervals([0, 0], [1, 1, 1], 3), r"got .*\(2,\) and .*\(3,\)"),
    "fractions of keys": (
        lambda: intervals([0.0], [1.0], 3),
        r"first and end must be int32 or int64.*float32",
    ),
    "an end behind the query": (
        lambda: intervals([0] * 4, [4] * 4, 4, block_size=64, causal=True),
        "end must be at most 1 at query 0 of a causal mask, got 4: clamp it, or leave causal out",
    ),
    "an end behind the last query alone": (
        # the queries stand at keys 1, 2 and 3
        lambda: intervals([[0] * 3, [0] * 3], [[2, 3, 4], [2, 4, 4]], 4, causal=True),
        "end must be at most 3 at query 1 of a causal mask, got 4",
    ),
    "a dense mask of numbers": (
        lambda: block_masks.from_dense(torch.ones(2, 2)),
        "mask must be bool.*float32",
    ),
    "a dense mask of NumPy's": (
        lambda: block_masks.from_dense(torch.ones(2, 2, dtype=torch.bool).numpy()),
        "mask must be a tensor, got ndarray: torch.as_tensor makes one",
    ),
    "intervals of lists": (
        lambda: block_masks.from_intervals([0], [1], 3),
        "first must be a tensor, got list",
    ),
    "an end of a list": (
        lambda: block_masks.from_intervals(torch.tensor([0]), [1], 3),
        "end must be a tensor, got list",
    ),
    "blocks of lists": (lambda: block_masks.from_blocks([0], [0], 9), "row must be a tensor, got list"),
    "a dense mask of one dimension": (lambda: dense(5), r"\(Tq, Tk\) or \(B, H, Tq, Tk\), got \(5,\)"),
    "a dense mask of three": (lambda: dense(2, 5, 5), r"got \(2, 5, 5\)"),
    "a dense mask of five": (lambda: dense(1, 1, 1, 5, 5), r"got \(1, 1, 1, 5, 5\)"),
    "documents of nothing": (lambda: block_masks.documents(None), "document_ids must be a tensor, got None"),
    "documents of one dimension": (
        lambda: block_masks.documents(torch.tensor([0, 0, 1])),
        r"document_ids must be int32 or int64 \(B, T\), got torch.int64 \(3,\)",
    ),
    "documents by fractions": (lambda: block_masks.documents(torch.zeros(1, 3)), "document_ids .*float32"),
    "documents out of order": (
        lambda: block_masks.documents(torch.tensor([[1, 0, 1, 0]])),
        "document_ids must not decrease",
    ),
    "masks of other lengths": (
        lambda: block_masks.causal(100) | block_masks.causal(101),
        "must have one seq_q, got 100 and 101",
    ),
    "masks of other blocks": (
        lambda: block_masks.causal(100) & block_masks.causal(100, block_size=64),
        "must have one block_size, got 128 and 64",
    ),
    "masks of other heads": (
        lambda: dense(1, 2, 70, 70) | dense(1, 3, 70, 70),
        "n_head of a block mask must be 1 or 3, got 2: one serves all",
    ),
    "heads twice": (
        lambda: block_masks.causal(100).expand(1, 2).expand(1, 3),
        "n_head of a block mask must be 1 or 3, got 2: one serves all",
    ),
    "a stack of none": (lambda: BlockMask.stack([]), "stack needs a mask for each head, got none"),
    "a stack of a mask": (
        lambda: BlockMask.stack(block_masks.causal(9)),
        "stack takes a list of block masks, one for each head, got BlockMask",
    ),
    "a stack with a gap": (
        lambda: BlockMask.stack([block_masks.causal(9), None]),
        r"stack takes a list of block masks, one for each head, got \[.*, None\]",
    ),
    "a stack of two heads": (
        lambda: BlockMask.stack([dense(1, 1, 70, 70), dense(1, 2, 70, 70)]),
        "masks of one head and 1 batches, got 2 heads and 1 batches",
    ),
    "a stack of other batches": (
        lambda: BlockMask.stack([dense(1, 1, 70, 70), dense(2, 1, 70, 70)]),
        "masks of one head and 1 batches, got 1 heads and 2 batches",
    ),
    "the best of other lengths": (
        lambda: top_k((1, 9, 1, 8), (1, 8, 1, 8)),
        r"got \(1, 9, 1, 8\) and \(1, 8",
    ),
    "the best of another batch": (
        lambda: top_k((2, 9, 1, 8), (1, 9, 1, 8)),
        r"got \(2, 9, 1, 8\) and \(1, 9",
    ),
    "the best of another head_dim": (lambda: top_k((1, 9, 1, 8), (1, 9, 1, 4)), r"and \(1, 9, 1, 4\)"),
    "the best of heads that do not divide": (
        lambda: top_k((1, 9, 4, 8), (1, 9, 3, 8)),
        r"\(1, 9, 4, 8\) and",
    ),
    "the best of no batch": (lambda: top_k((0, 9, 1, 8), (0, 9, 1, 8)), "batch must be at least 1, got 0"),
    "the best of no heads": (lambda: top_k((1, 9, 0, 8), (1, 9, 2, 8)), "n_head must be at least 1, got 0"),
    "the best of no heads of keys": (
        lambda: top_k((1, 9, 4, 8), (1, 9, 0, 8)),
        "n_kv_head must be at least 1, got 0",
    ),
    "the best without a batch": (
        lambda: top_k((9, 1, 8), (9, 1, 8)),
        r"q and k must be .*got \(9, 1, 8\) and",
    ),
    "the best of nothing": (
        lambda: block_masks.top_k(None, torch.zeros(1, 9, 1, 8), 1),
        "q must be a tensor, got None",
    ),
    "the best on two devices": (
        lambda: block_masks.top_k(torch.zeros(1, 9, 1, 8), torch.zeros(1, 9, 1, 8, device="meta"), 1),
        "q and k must be on one device, got cpu and meta: move one",
    ),
    "the best by a mask of None": (
        lambda: top_k((1, 9, 1, 8), (1, 9, 1, 8), causal=None),
        "causal must be True or False, got None",
    ),
    "the best none": (lambda: top_k((1, 9, 1, 8), (1, 9, 1, 8), 0), "n must be at least 1, got 0"),
    "the best blocks of none": (
        lambda: top_k((1, 9, 1, 8), (1, 9, 1, 8), block_size=0),
        r"block_size must be one of \(64, 128\), got 0",
    ),
    "a pattern of names": (
        lambda: block_masks.parse("window(x) | causal()", 100),
        r"window in 'window\(x\) \| causal\(\)' takes integers, got x$",
    ),
    "a pattern of sums": (
        lambda: block_masks.parse("bigbird(1, 2**3, 0)", 100),
        r"bigbird in 'bigbird\(1, 2\*\*3, 0\)' takes integers, got 1, 2\*\*3, 0$",
    ),
    "a pattern of nothing": (lambda: block_masks.parse(None, 9), "must be a text, got NoneType None"),
    "a pattern of very many": (
        lambda: block_masks.parse(" | ".join(["causal()"] * 5000), 9),
        "pattern 'causal.*: maximum recursion depth exceeded",
    ),
    "a sum of patterns": (lambda: block_masks.parse("causal() + causal()", 100), "is no pattern"),
    "a pattern of fractions": (
        lambda: block_masks.parse("window(1.5)", 100),
        r"window in 'window\(1.5\)' takes integers, got 1.5$",
    ),
    "a pattern of too few": (
        lambda: block_masks.parse("bigbird(2)", 100),
        r"bigbird in 'bigbird\(2\)' takes 3 integers, got 1$",
    ),
    "a pattern of too many": (
        lambda: block_masks.parse("window(1,2)", 100),
        r"window in 'window\(1,2\)' takes 1 integer, got 2$",
    ),
    "a pattern of none": (
        lambda: block_masks.parse("causal(3)", 100),
        r"causal in 'causal\(3\)' takes no integers, got 1$",
    ),
    "no layer": (lambda: reach([]), "reach needs at least one layer, got none"),
    "reach of a single mask": (
        lambda: reach(block_masks.causal(100)),
        r"reach takes the mask of each layer, got a single one: write reach\(\[mask\]\)",
    ),
    "reach of a number": (lambda: reach(1), r"reach takes the mask of each layer, got int: write reach"),
    "reach of no mask": (
        lambda: reach([block_masks.causal(100), None]),
        "masks must be BlockMasks, got NoneType: leave out dense layers",
    ),
    "fewer layers than one": (
        lambda: block_masks.causal(100).reach(0),
        "n_layers must be at least 1, got 0",
    ),
    "layers of a fraction": (
        lambda: block_masks.causal(100).reach(1.5),
        r"n_layers must be an integer, got float 1\.5",
    ),
    "no batch": (lambda: block_masks.causal(100).expand(0, 3), "n_batch must be at least 1, got 0"),
    "fractions of heads": (
        lambda: block_masks.causal(100).expand(1, 1.5),
        r"n_head must be an integer, got float 1\.5",
    ),
    "a seed of letters": (
        lambda: block_masks.bigbird(100, 1, 1, 1, seed="a"),
        "seed must be an integer, got str a",
    ),
    "a seed of a fraction": (
        lambda: block_masks.bigbird(100, 1, 1, 1, seed=1.5),
        r"seed must be an integer, got float 1\.5: int\(\) makes one",
    ),
    "a seed beyond 64 bits": (
        lambda: block_masks.bigbird(100, 1, 1, 1, seed=2**64),
        f"seed must be at most {2**64 - 1}, got {2**64}",
    ),
    "a seed below 64 bits": (
        lambda: block_masks.bigbird(100, 1, 1, 1, seed=-(2**63) - 1),
        f"seed must be at least {-(2**63)}, got {-(2**63) - 1}",
    ),
    "a plot to no path": (
        lambda: block_masks.causal(100).plot(None),
        "path must name a picture, got None: give a str or a Path",
    ),
    "reach of other numbers of queries and keys": (
        # as many blocks of queries as of keys
        lambda: reach([dense(65, 128)]),
        "reach needs as many queries as keys, got 65 and 128",
    ),
    "reach of other batches": (
        lambda: reach([dense(2, 1, 70, 70), dense(3, 1, 70, 70)]),
        "n_batch of a block mask must be 1 or 3, got 2: one serves all",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_the_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("number", [2**31, 10**30, 10**400], ids=["int32", "int64", "float64"])
@pytest.mark.parametrize(
    "pattern", ["window({})", "sinks({})", "strided({})", "fixed({})", "bigbird({},0,0)", "bigbird(1,0,{})"]
)
def test_a_number_beyond_int32_is_refused_by_name(pattern, number):
    with pytest.raises(ValueError, match=rf"n\w* must be at most 2147483647, got {number}"):
        block_masks.parse(pattern.format(number), 1000)


def test_the_largest_numbers_keep_everything_and_take_no_memory_of_their_own():
    largest, causal = 2**31 - 1, block_masks.causal(300, block_size=64).to_dense()
    for pattern in ("window({})", "sinks({})", "fixed({})", "bigbird({},0,0)", "bigbird(1,{},0)"):
        mask = block_masks.parse(pattern.format(largest), 300, block_size=64)
        assert torch.equal(mask.to_dense(), causal)
    block_masks.parse(f"strided({largest}) | bigbird(1, 0, {largest})", 300)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.int16, np.uint8])
def test_numbers_may_be_numpys(kind):
    # the numbers of tokens of a row, and of blocks of all heads, need more bits
    q = torch.randn(1, 200, 4, 8)
    i = torch.arange(200)

    def masks(number):
        length, size = number(200), number(64)
        yield from (
            pattern(length, block_size=size) for pattern in (block_masks.causal, block_masks.butterfly)
        )
        yield block_masks.power_of_two_strided(length, block_size=size)
        yield block_masks.window(length, number(70), block_size=size) | block_masks.sinks(
            length, number(3), block_size=size
        )
        yield block_masks.strided(length, number(2), block_size=size).expand(number(9), number(8))
        yield block_masks.fixed(length, number(2), block_size=size)
        yield block_masks.bigbird(length, number(1), number(1), number(1), seed=number(3), block_size=size)
        yield block_masks.documents(i[None] // 90, block_size=size)
        yield block_masks.from_intervals(i // 2, i + 1, length, block_size=size)
        yield block_masks.from_blocks(i[:3], i[:3], length, number(250), block_size=size)
        yield block_masks.from_dense(torch.ones(200, 200).tril() > 0, block_size=size)
        yield block_masks.top_k(q, q, number(2), block_size=size)

    for mask, same in zip(masks(kind), masks(int), strict=True):
        assert torch.equal(mask.to_dense(), same.to_dense())
        assert mask.density() == same.density()


@pytest.mark.parametrize(
    ("kind", "seq_len"), [(np.int32, 4_200_000), (np.uint16, 33_000), (np.uint16, 65_535)]
)
def test_numpys_narrow_numbers_serve_long_sequences(kind, seq_len):
    mask, same = (block_masks.window(number(seq_len), 1000, block_size=64) for number in (kind, int))
    assert torch.equal(mask.keys, same.keys)
    assert torch.equal(mask.rows.entries, same.rows.entries)


def test_every_seed_of_pytorch_draws_blocks():
    for seed in block_masks.SEEDS:
        assert block_masks.bigbird(1000, 1, 0, 1, seed=seed).density() > 0.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "path must name a picture, got the folder '{}': add a name to it"),
        ("folder.png", "path must name a picture, got the folder '{}': add a name to it"),
        ("mask", r"path must end in one of .*\.png, .*, got '{}': add one"),
        ("mask.txt", r"path must end in one of .*\.png, .*, got '{}': add one"),
    ],
)
def test_a_plot_writes_to_no_other_name_than_its_own(path, message, tmp_path):
    for folder in ("folder", "folder.png"):
        (tmp_path / folder).mkdir()
    with pytest.raises(ValueError, match=message.format(tmp_path / path)):
        block_masks.causal(100).plot(tmp_path / path)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "folder.png"}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_without_an_order_are_refused_with_their_number(causal, bad):
    q, k = torch.ones(1, 130, 1, 8), torch.ones(1, 130, 1, 8)
    k[0, 70] = bad
    with pytest.raises(ValueError, match="finite scores, got 3 of 9 that are nan or infinite"):
        block_masks.top_k(q, k, 1, causal=causal, block_size=64)


@pytest.mark.parametrize("other", [True, 1, None, torch.ones(100, 100, dtype=torch.bool)], ids=type)
def test_a_mask_combines_with_masks_alone(other):
    mask = block_masks.causal(100)
    for combine in (lambda: mask & other, lambda: mask | other, lambda: other & mask, lambda: other | mask):
        with pytest.raises(TypeError, match="unsupported operand|must be Tensor"):
            combine()


def test_masks_of_different_devices_do_not_combine():
    mask = block_masks.causal(100)
    other = on_meta(mask)
    for combine in (lambda: mask & other, lambda: mask | other, lambda: BlockMask.stack([mask, other])):
        with pytest.raises(
            ValueError, match="must have one device, got cpu and meta: build both for the same"
        ):
            combine()


def test_attention_refuses_a_mask_of_another_device(device):
    x = torch.zeros(1, 100, 1, 16, device=device)
    mask = on_meta(block_masks.causal(100, device=device))
    with pytest.raises(
        ValueError, match=f"block_mask must be on {x.device}, got meta: build it with device="
    ):
        flash_attention(x, x, x, block_mask=mask)


def test_attention_refuses_a_mask_without_lists_until_they_are_made(device):
    x = torch.randn(1, 128, 1, 16, device=device)
    with without_lists():
        mask = block_masks.window(128, 20, device=device) | block_masks.sinks(128, 4, device=device)
    with pytest.raises(ValueError, match=r"block_mask has no lists, .*: call its make_lists\(\) first"):
        flash_attention(x, x, x, block_mask=mask)
    mask.make_lists()
    given = block_masks.parse(" window(20) | sinks(4)", 128, device=device)
    assert torch.equal(flash_attention(x, x, x, block_mask=mask), flash_attention(x, x, x, block_mask=given))
