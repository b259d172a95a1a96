"""Block masks hold exactly the mask that they were built from, and never more than their blocks."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from torch.profiler import ProfilerActivity, profile

from kernels import bit_tiles, block_mask, block_masks
from kernels.block_mask import BlockMask, key_dtype, reach, without_lists
from kernels.reference import visible_keys

SHAPES = [(50, 64), (256, 64), (300, 64), (500, 128)]


def positions(seq_len: int, block_size: int):
    """Query, key, block of the query and block of the key, to broadcast."""
    i, j = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    return i, j, i // block_size, j // block_size


def assert_is(mask: BlockMask, expected: torch.Tensor) -> None:
    assert torch.equal(mask.to_dense(), expected.expand_as(mask.to_dense()))
    rows = torch.arange(0, mask.seq_q, 7)
    assert torch.equal(mask.rows_to_dense(rows), mask.to_dense()[:, :, rows])


@pytest.mark.parametrize(("seq_len", "block_size"), SHAPES)
def test_patterns_are_what_they_say(seq_len, block_size):
    i, j, row, column = positions(seq_len, block_size)
    back, size = row - column, {"block_size": block_size}
    power_of_two = (back & (back - 1)) == 0
    expected = {
        "causal()": j <= i,
        "window(1)": j == i,
        "window(70)": (j <= i) & (j > i - 70),
        "window(1000)": j <= i,
        "sinks(64)": (j <= i) & (j < 64),
        "sinks(70)": (j <= i) & (j < 70),
        "strided(1)": j <= i,
        "strided(3)": (j <= i) & (back % 3 == 0),
        "power_of_two_strided()": (j <= i) & power_of_two,
        "butterfly()": ((row ^ column) & ((row ^ column) - 1)) == 0,
        "fixed(2)": (j <= i) & ((row // 2 == column // 2) | (column % 2 == 1)),
        "bigbird(2, 1, 0)": (j <= i) & ((back < 2) | (column < 1)),
    }
    for text, dense in expected.items():
        mask = block_masks.parse(text, seq_len, **size)
        assert_is(mask, dense)
        assert mask.causal == (text != "butterfly()")


@pytest.mark.parametrize(("seq_len", "block_size"), SHAPES)
def test_and_and_or_are_exact_to_the_token(seq_len, block_size):
    i, j, row, column = positions(seq_len, block_size)
    texts = {
        "window(70) | strided(3)": (j <= i) & ((j > i - 70) | ((row - column) % 3 == 0)),
        "window(70) & sinks(90)": (j <= i) & (j > i - 70) & (j < 90),
        "butterfly() & causal() | window(9)": (j <= i)
        & (((row ^ column) & ((row ^ column) - 1) == 0) | (j > i - 9)),
        "window(7) & strided(2) & sinks(3)": (j <= i) & (j > i - 7) & ((row - column) % 2 == 0) & (j < 3),
    }
    for text, dense in texts.items():
        assert_is(block_masks.parse(text, seq_len, block_size=block_size), dense)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seq_q=st.integers(1, 200),
    seq_k=st.integers(1, 200),
    shape=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]),
    share=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_dense_mask_survives_and_combines(seq_q, seq_k, shape, share, seed):
    torch.manual_seed(seed)
    a, b = torch.rand(*shape, seq_q, seq_k) < share, torch.rand(1, 1, seq_q, seq_k) < 0.01
    mask, other = (block_masks.from_dense(x, block_size=64) for x in (a, b))
    assert_is(mask, a)
    assert_is(mask & other, a & b)
    assert_is(other | mask, a | b)
    assert (mask & other).causal == (mask.causal or other.causal)
    assert (mask | other).causal == (mask.causal and other.causal)
    assert mask.causal == (not (a & torch.ones(seq_q, seq_k, dtype=torch.bool).triu(1 + seq_k - seq_q)).any())


def test_the_lists_name_each_block_once_from_both_sides_full_ones_first():
    mask = block_masks.parse("window(100) | strided(3)", 700, block_size=64)
    stored = sorted(zip(*(x.tolist() for x in mask.coordinates()[1:]), mask.tiles.tolist(), strict=True))
    for lists, swap in ((mask.rows, False), (mask.columns, True)):
        found = []
        by_line, by_length = lists.spans[0, 0].split(4, dim=1)
        for line, (start, partial, end, number) in enumerate(by_line.tolist()):
            assert number == line
            entries = lists.entries[start:end].tolist()
            assert all(tile == 0 for _, tile in entries[: partial - start])
            assert all(tile > 0 for _, tile in entries[partial - start :])
            assert [b for b, _ in entries[: partial - start]] == sorted(
                b for b, _ in entries[: partial - start]
            )
            found += [(block, line, tile) if swap else (line, block, tile) for block, tile in entries]
        assert sorted(found) == stored
        assert sorted(by_length.tolist(), key=lambda span: span[3]) == by_line.tolist()
        assert ((by_length[:, 2] - by_length[:, 0]).diff() <= 0).all()


def test_documents_differ_by_batch():
    ids = torch.randint(4, (2, 300)).sort(dim=1).values
    expected = ids[:, None, :, None] == ids[:, None, None, :]
    assert_is(block_masks.documents(ids, block_size=64), expected)
    i, j, _, _ = positions(300, 64)
    assert_is(
        block_masks.documents(ids, block_size=64) & block_masks.causal(300, block_size=64),
        expected & (j <= i),
    )


def test_each_head_may_have_its_own_pattern():
    masks = [block_masks.parse(text, 200, block_size=64) for text in ("window(5)", "sinks(9)", "causal()")]
    stacked = BlockMask.stack(masks)
    assert stacked.n_head == 3
    for head, mask in enumerate(masks):
        assert torch.equal(stacked.to_dense()[:, head], mask.to_dense()[:, 0])


def test_padding_sees_nothing_in_a_mask_of_documents():
    ids = torch.tensor([[-1] * 70 + [0] * 30, [0] * 60 + [1] * 40])
    expected = visible_keys(100, 100, causal=False, document_ids=ids)
    assert_is(block_masks.documents(ids, block_size=64), expected)


def test_a_group_may_be_longer_than_the_sequence():
    assert_is(block_masks.fixed(100, 5, block_size=64), visible_keys(100, 100, causal=True))


def test_a_dense_mask_may_be_a_view():
    mask = torch.rand(2, 1, 256, 128).lt(0.5).transpose(2, 3).expand(2, 3, 128, 256)
    assert_is(block_masks.from_dense(mask), mask)


def test_top_k_keeps_the_blocks_that_score_best():
    q, k = torch.zeros(1, 256, 2, 4), torch.zeros(1, 256, 1, 4)
    q[..., 0] = 1
    # blocks 0 to 3 of keys: the second is liked best, then the first
    k[:, :, 0, 0] = torch.tensor([2.0, 3.0, 1.0, 0.0]).repeat_interleave(64)
    kept = block_masks.top_k(q, k, 2, block_size=64).to_dense()[0, :, ::64, ::64].int().tolist()
    assert kept == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]] * 2
    kept = block_masks.top_k(q, k, 1, causal=False, block_size=64).to_dense()[0, 0, ::64, ::64]
    assert kept.int().tolist() == [[0, 1, 0, 0]] * 4


def test_equal_tiles_are_stored_once():
    assert len(block_masks.window(4096, 1024).bits) == 3
    assert len(block_masks.causal(4096).bits) == 2


@pytest.mark.parametrize("block_size", [64, 128])
def test_transposed_tiles_have_a_row_for_each_key(block_size):
    torch.manual_seed(0)
    visible = torch.rand(5, block_size, block_size) < 0.4
    assert torch.equal(bit_tiles.transpose(bit_tiles.pack(visible)), bit_tiles.pack(visible.mT))


def test_density_counts_kept_blocks_over_causal_ones():
    assert block_masks.causal(1024).density() == 1.0
    assert block_masks.window(1024, 128).density() == pytest.approx(15 / 36)
    # log2 of n, plus one, of n blocks: the paper's
    assert block_masks.butterfly(4096).density() == pytest.approx(6 / 32)


def test_a_mask_tells_its_size_instead_of_its_tensors():
    text = repr(block_masks.window(1000, 128))
    assert "1000 queries, 1000 keys, n_batch=1, n_head=1, 15 of 64 blocks of 128, causal=True, cpu" in text


def test_reach_is_that_of_the_paper_and_warns_below_all():
    butterfly = block_masks.butterfly(16 * 128)
    assert butterfly.reach(4) == 1.0
    with pytest.warns(UserWarning, match="59.6% of block pairs are reached in 12 layers"):
        assert (butterfly & block_masks.causal(16 * 128)).reach(12) == pytest.approx(81 / 136)
    with pytest.warns(UserWarning, match="are reached in 4 layers"):
        assert block_masks.power_of_two_strided(64 * 128).reach(4) == pytest.approx(0.97, abs=0.01)
    assert block_masks.power_of_two_strided(64 * 128).reach(6) == 1.0
    # the layers may differ
    window, dense = block_masks.window(1024, 256), block_masks.causal(1024)
    assert reach([window, dense, window]) == 1.0
    assert reach([window, dense.expand(2, 3), window.expand(2, 1)]) == 1.0


@pytest.mark.parametrize(
    ("pattern", "peak", "kept"),
    [
        # of 8192 x 8192 blocks: a byte for each would be 67 MB
        ("power_of_two_strided()", 10e6, 5e6),
        # arrays of a number for each token
        ("window(1024) | sinks(64)", 65e6, 3e6),
        # arrays of a number for each kept block
        ("fixed(64)", 36e6, 14e6),
        ("window(1024) | strided(16)", 84e6, 38e6),
    ],
)
def test_a_million_tokens_take_memory_for_their_blocks_and_a_moment(pattern, peak, kept):
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        mask = block_masks.parse(pattern, 2**20)
    assert time.perf_counter() - start < 15.0  # two seconds on an idle core
    events = [x for x in profiled.profiler.kineto_results.events() if x.name() == "[memory]"]
    allocated = torch.tensor([x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())]).cumsum(0)
    assert allocated[-1] >= sum(x.nbytes for x in mask.tensors())
    assert allocated.max() < peak
    assert sum(x.nbytes for x in mask.tensors()) < kept


def test_masks_without_lists_combine_to_the_same():
    listed = block_masks.window(1000, 200) | block_masks.strided(1000, 2) & block_masks.sinks(1000, 300)
    with without_lists():
        window, strided, sinks = (
            make(1000, n)
            for make, n in ((block_masks.window, 200), (block_masks.strided, 2), (block_masks.sinks, 300))
        )
        mask = window | strided & sinks
    assert not hasattr(window, "rows")
    assert not hasattr(mask, "rows")
    mask.make_lists()
    assert all(map(torch.equal, mask.tensors(), listed.tensors()))
    assert hasattr(block_masks.window(1000, 200), "rows"), "it ends with its block"


def test_more_pairs_of_blocks_than_int32_numbers_are_kept_apart():
    row = torch.arange(128, dtype=torch.int32)
    first = (row * 2**24).repeat_interleave(64)
    # the lists have a line for each of the 2**25 blocks of keys
    with without_lists():
        mask = block_masks.from_intervals(first, first + 64, 2**31 - 1, block_size=64)
    head, rows, columns = mask.coordinates()
    assert not head.any()
    assert torch.equal(rows, row.long())
    assert torch.equal(columns, row.long() * 2**24 // 64)


def plotted(mask: BlockMask, path, monkeypatch) -> list[list[float]]:
    """What plot hands to matplotlib, which draws it."""
    pictures, imshow = [], Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda *given, **options: pictures.append(given[1]) or imshow(*given))
    mask.plot(path)
    monkeypatch.undo()
    assert path.stat().st_size > 1000
    (picture,) = pictures
    return picture.tolist()


def test_a_plot_makes_its_folder_and_shows_full_blocks_dark_and_partial_ones_half(tmp_path, monkeypatch):
    mask = block_masks.window(4 * 64, 2 * 64, block_size=64)
    dark, half, none = 1.0, 0.5, 0.0
    assert plotted(mask, tmp_path / "missing" / "mask.png", monkeypatch) == [
        [half, none, none, none],
        [dark, half, none, none],
        [half, dark, half, none],
        [none, half, dark, half],
    ]


def test_a_plot_is_of_the_first_head_and_has_a_row_for_each_block_of_queries(tmp_path, monkeypatch):
    visible = torch.zeros(2, 2, 70, 200, dtype=torch.bool)
    visible[0, 0, :, 64:128] = True
    visible[0, 0, 65, 199] = True
    # of another head and another batch
    visible[0, 1], visible[1] = True, True
    mask = block_masks.from_dense(visible, block_size=64)
    # the last blocks are cut at 70 queries and 200 keys
    expected = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.5]]
    assert plotted(mask, tmp_path / "mask.png", monkeypatch) == expected


def test_a_plot_of_many_blocks_shows_the_darkest_of_those_that_share_a_pixel(tmp_path, monkeypatch):
    # 1024 x 1024 blocks, two by two in a pixel: partial ones on the diagonal, full ones in two places
    row, column = torch.tensor([1, 1023]), torch.tensor([0, 3])
    full = block_masks.from_blocks(row, column, 2**16, block_size=64)
    mask = block_masks.window(2**16, 1, block_size=64) | full
    expected = torch.eye(512) / 2
    expected[0, 0] = expected[511, 1] = 1.0
    assert plotted(mask, tmp_path / "mask.png", monkeypatch) == expected.tolist()


def test_sums_that_collide_do_not_merge_different_rows(monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *shape, **_: torch.zeros(shape[1], dtype=torch.int64))
    rows = torch.tensor([[1, 2], [3, 4], [1, 2]])
    first, which = bit_tiles.distinct(rows)
    assert torch.equal(rows[first][which], rows)


@pytest.mark.parametrize("at_once", [1, 7, 40])
def test_lists_that_are_sorted_in_parts_are_those_that_are_sorted_at_once(at_once, monkeypatch):
    mask = block_masks.window(2000, 300) | block_masks.strided(2000, 3)
    mask = BlockMask.stack([mask, block_masks.sinks(2000, 200), mask & block_masks.butterfly(2000)])
    expected = mask.tensors()
    monkeypatch.setattr(block_mask, "SORTED_AT_ONCE", at_once)
    mask.make_lists()
    assert len(mask.keys) > 2 * at_once
    assert all(map(torch.equal, mask.tensors(), expected))


@pytest.mark.parametrize("n", [9, 50, 10**6])
def test_numbers_are_numbered_alike_by_a_table_and_by_sorting(n):
    x = torch.tensor([8, 3, 3, 0, 8, 5, 3], dtype=torch.int32).repeat(3)
    values, place = block_mask.numbered(x, n)
    assert values.tolist() == [0, 3, 5, 8]
    assert place.dtype == torch.int32
    assert torch.equal(values[place], x.to(values.dtype))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(65, 128), (65, 200), (1, 65), (128, 100)])
def test_a_causal_mask_that_leaves_nothing_out_has_a_density_of_one(seq_q, seq_k):
    mask = block_masks.from_dense(visible_keys(seq_q, seq_k, causal=True)[0, 0], block_size=64)
    assert mask.causal
    assert mask.density() == 1.0


def test_density_of_queries_before_the_first_key_counts_no_block():
    visible = visible_keys(256, 64, causal=True)
    mask = block_masks.from_dense(visible, block_size=64)
    assert mask.causal
    # the first three blocks of queries see nothing
    assert mask.density() == 1.0


def test_a_causal_mask_may_have_empty_intervals_anywhere():
    first = torch.tensor([30, 40, 50]).repeat_interleave(20)
    mask = block_masks.from_intervals(first, first, 60, block_size=64, causal=True)
    assert mask.causal
    assert not mask.to_dense().any()


def test_reach_is_that_of_each_batch():
    masks = [block_masks.causal(256, block_size=64), block_masks.strided(256, 4, block_size=64)]
    dense = torch.stack([mask.to_dense()[0] for mask in masks]).expand(2, 3, 256, 256)
    both = block_masks.from_dense(dense, block_size=64)
    with pytest.warns(UserWarning, match="never"):
        # all 10 pairs of the first batch, the 4 on the diagonal of the second
        assert both.reach(1) == pytest.approx(14 / 20)


def test_reach_ends_where_equal_layers_add_nothing_and_is_warned_of_where_it_was_asked_for():
    window = block_masks.window(8 * 64, 65, block_size=64)
    assert window.reach(10**9) == 1.0
    short = window & block_masks.strided(8 * 64, 4, block_size=64)
    with pytest.warns(UserWarning, match=f"are reached in {10**9} layers") as warned:
        far = short.reach(10**9)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="are reached in 8 layers") as warned:
        assert reach([short] * 8) == far
    assert warned[0].filename == __file__


def test_reach_counts_all_pairs_if_one_layer_is_not_causal():
    masks = [block_masks.causal(256, block_size=64), block_masks.butterfly(256, block_size=64)]
    with pytest.warns(UserWarning, match="never"):
        # block 3 alone sees block 0 by a block that is not its own
        assert reach(masks) == pytest.approx(share_of_pairs(masks))


def share_of_pairs(masks):
    crossed = [
        mask.to_dense()[0, 0].unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).any(3).any(1) for mask in masks
    ]
    seen = torch.eye(len(crossed[0]), dtype=torch.bool)
    for c in crossed:
        seen = (c.float() @ seen.float()) > 0
    return seen.float().mean().item()


@pytest.mark.parametrize(("n", "dtype"), [(2**30 - 1, torch.int32), (2**30, torch.int64)])
def test_numbers_of_blocks_leave_room_for_twice_as_many(n, dtype):
    assert key_dtype(n) == dtype
