"""The Hopper kernels without a GPU, see gluon_on_cpu.py; test_hopper.py tests what compilers make of them."""

from itertools import accumulate

import pytest
import torch

from kernels import block_masks, hopper
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.hopper.tiles import forward_tile
from kernels.operators import use_implementation
from kernels.reference import visible_keys
from tests.accuracy import (
    assert_as_accurate_as_torch,
    assert_close_to_truth,
    peaked_qkv,
    random_qkv,
    rising_qkv,
)
from tests.gluon_on_cpu import hopper_on_cpu
from tests.gluon_partitions import DeadlockError

HEAD_DIMS = [40, 64, 128, 136, 256]
MASKS = ["full", "causal", "window", "documents", "blocks"]
# what a head's backward pass is asked for: wide ones have one, which is deterministic unasked
PASSES = {head_dim: [False, True] if head_dim <= 128 else [False] for head_dim in HEAD_DIMS}
every_pass = pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(head_dim, x) for head_dim in HEAD_DIMS for x in PASSES[head_dim]]
)


@pytest.fixture
def launch(monkeypatch, fresh_memory_is_nan):
    """kernels.hopper.launch of a CPU that passes for a Hopper GPU of three multiprocessors."""
    launch = hopper_on_cpu(seed=torch.initial_seed() % 2**20)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "launcher", lambda: launch)
    # the interpreter's fault is in products, of which what it runs has none
    monkeypatch.setattr("kernels.checks.is_interpreted_wrongly", lambda device, dtype: False)
    # rows long enough for sums of dq would take long here
    monkeypatch.setattr(launch, "sum_pays", lambda *_: True)
    # sums that take turns wait for other thread blocks
    monkeypatch.setattr(launch, "turns_pay", lambda *_: False)
    return launch


@pytest.fixture
def tiles_computed_anew(launch, monkeypatch):
    """Filled with whether there was a tile to compute anew, each time that a thread block looks for one."""
    overflow = launch.forward_kernel.__globals__["Overflow"]
    following, noted = overflow.next, []

    def note(self, i, index, end):
        i, index = following(self, i, index, end)
        noted.append(int(i) < int(end))
        return i, index

    monkeypatch.setattr(overflow, "next", note)
    return noted


def hopper_attention(*arguments, **options):
    with use_implementation("hopper"):
        return flash_attention(*arguments, **options)


def options_of(mask: str, seq_q: int, seq_k: int, batch: int = 2) -> dict:
    options = {"causal": mask not in ("full", "blocks")}
    if mask == "window":
        options["window"] = 90
    if mask == "documents":
        options["document_ids"] = (torch.rand(batch, seq_k) < 0.02).cumsum(1).int()
    if mask == "blocks":
        # absent, partial and full blocks, and a row of none
        blocks = torch.randint(3, (-(-seq_q // 128), -(-seq_k // 128)))
        blocks[0] = 0
        shares = torch.tensor([0.0, 0.3, 1.0])[blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
        options["block_mask"] = block_masks.from_dense(torch.rand(seq_q, seq_k) < shares[:seq_q, :seq_k])
    return options


@every_pass
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_as_accurate_as_torch_however_partitions_take_turns(
    head_dim, mask, deterministic, launch
):
    for seq_len, batch, n_head in ((1, 2, 4), (65, 2, 4), (300, 1, 4) if deterministic else (300, 2, 2)):
        q, k, v = random_qkv(batch, seq_len, seq_len, n_head, n_head // 2, head_dim, torch.float16, "cpu")
        options = options_of(mask, seq_len, seq_len, batch)
        assert_as_accurate_as_torch(hopper_attention, q, k, v, deterministic=deterministic, **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dropout_keeps_what_the_reference_keeps(dtype, head_dim, mask, launch):
    # as many tiles in either
    batch, n_head = (2, 2) if dtype == torch.float16 else (1, 4)
    q, k, v = random_qkv(batch, 200, 200, n_head, n_head // 2, head_dim, dtype, "cpu")
    options = options_of(mask, 200, 200, batch) | {"dropout_p": 0.1, "dropout_seed": 2**40 + 3}
    for deterministic in PASSES[head_dim]:
        assert_as_accurate_as_torch(hopper_attention, q, k, v, deterministic=deterministic, **options)


def use_tiles_of_long_rows(launch, monkeypatch):
    """Heads of 64 get three warpgroups, or two under a window in which short tiles would keep no maximum.

    Rows that have these tiles by themselves would take long.
    """
    monkeypatch.setattr(
        launch, "forward_tile", lambda width, mask, _, *rest: forward_tile(width, mask, 2**20, *rest)
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_heads_of_64_are_as_accurate_in_the_tiles_of_long_rows(mask, dropout_p, launch, monkeypatch):
    use_tiles_of_long_rows(launch, monkeypatch)
    # windows without dropout have short tiles in bfloat16
    dtype = torch.float16 if mask == "window" and not dropout_p else torch.bfloat16
    for seq_q, seq_k in ((65, 65), (500, 500), (200, 300), (300, 200)):
        q, k, v = random_qkv(2, seq_q, seq_k, 2, 1, 64, dtype, "cpu")
        options = options_of(mask, seq_q, seq_k)
        if dropout_p:
            options |= {"dropout_p": dropout_p, "dropout_seed": 5}
        assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "tiles"), [(64, "short"), (64, "long"), (128, "long"), (256, "long")])
def test_scores_that_rise_far_above_those_of_the_first_blocks_are_exact(
    head_dim, tiles, mask, dropout_p, launch, tiles_computed_anew, monkeypatch
):
    if tiles == "long":
        use_tiles_of_long_rows(launch, monkeypatch)
    batch, n_head = (2, 2) if dropout_p else (1, 4)
    q, k, v = rising_qkv(batch, 400, n_head, n_head // 2, head_dim, "cpu")
    options = options_of(mask, 400, 400, batch)
    if mask == "window":
        options["window"] = 330
    if mask == "documents":
        options["document_ids"] = torch.tensor([[0] * 60 + [1] * 340] * batch).int()
    if mask == "blocks":
        options["block_mask"] = block_masks.causal(400)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": 5}
    assert_close_to_truth(hopper_attention, q, k, v, **options)
    # which do not keep the maximum under dropout
    in_short_tiles = head_dim == 64 and (mask == "documents" or (mask, tiles) == ("window", "short"))
    always_follows = dropout_p > 0.0 and in_short_tiles
    assert any(tiles_computed_anew) == (not always_follows), "tiles of such scores are computed once more"


@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("head_dim", "tiles"), [(64, "short"), (64, "long"), (128, "long"), (256, "long")])
def test_a_key_that_outweighs_all_others_weighs_as_much_as_its_rounded_probability(
    head_dim, tiles, sharpness, launch, monkeypatch
):
    if tiles == "long":
        use_tiles_of_long_rows(launch, monkeypatch)
    assert_as_accurate_as_torch(hopper_attention, *peaked_qkv(500, sharpness, head_dim, "cpu"))


@pytest.mark.parametrize("mask", ["window", "documents", "blocks"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_cut_behind_whole_ones_may_hold_the_largest_scores(
    head_dim, mask, launch, tiles_computed_anew
):
    # at the far edge of a window or a document, and on the diagonal, which a causal list ends with
    options, seen = {"causal": mask != "blocks"}, torch.arange(400)
    if mask == "window":
        options["window"], seen = 300, (seen - 299).clamp(min=0)
    elif mask == "documents":
        options["document_ids"], seen = (seen >= 60)[None].int(), torch.where(seen < 60, 0, 60)
    else:
        options["block_mask"] = block_masks.causal(400)
    q, k, v = random_qkv(1, 400, 400, 2, 2, head_dim, torch.bfloat16, "cpu")
    with torch.no_grad():
        q.copy_(2 * k[:, seen])
    assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)
    assert not any(tiles_computed_anew)
    if mask == "blocks":
        # so far above all others that a tile is computed anew
        q, k, v = rising_qkv(1, 400, 2, 1, head_dim, "cpu")
        with torch.no_grad():
            k.copy_(k.flip(1))
        assert_close_to_truth(hopper_attention, q, k, v, **options)
        assert any(tiles_computed_anew)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 300), (200, 70), (70, 200)])
def test_queries_are_aligned_to_the_last_key(seq_q, seq_k, head_dim, causal, launch):
    q, k, v = random_qkv(1, seq_q, seq_k, 2, 1, head_dim, torch.float16, "cpu")
    for deterministic in PASSES[head_dim]:
        assert_as_accurate_as_torch(hopper_attention, q, k, v, causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([64, 1], [64, 0]), ([64, 192], [64, 64]), ([130, 0, 64, 300], [64, 64, 0, 200])],
)
def test_queries_without_keys_leave_the_rings_in_step(lengths_q, lengths_k, head_dim, causal, launch):
    q, _, _ = random_qkv(1, sum(lengths_q), 1, 6, 1, head_dim, torch.float16, "cpu")
    _, k, v = random_qkv(1, 1, sum(lengths_k), 1, 3, head_dim, torch.float16, "cpu")
    starts_q, starts_k = (torch.tensor([0, *accumulate(x)]).int() for x in (lengths_q, lengths_k))
    pairs = zip(lengths_q, lengths_k, strict=True)
    seen = torch.block_diag(*(visible_keys(*pair, causal=causal)[0, 0] for pair in pairs)).bool()

    def packed(q, k, v, **_):
        with use_implementation("hopper"):
            out, lse = flash_attention_varlen(
                q[0], k[0], v[0], starts_q, cu_seqlens_k=starts_k, causal=causal, return_lse=True
            )
        return out[None], lse[None]

    assert_as_accurate_as_torch(packed, q, k, v, block_mask=block_masks.from_dense(seen), causal=False)


@every_pass
def test_lists_of_each_head_and_lists_that_intervals_cut_are_exact(head_dim, deterministic, launch):
    problems = ((2, 2, {"causal": False}), (1, 4, {"causal": True}), (1, 4, {"window": 100}))
    for batch, n_head, options in problems:
        q, k, v = random_qkv(batch, 200, 300, n_head, n_head // 2, head_dim, torch.bfloat16, "cpu")
        of_heads = block_masks.from_dense(torch.rand(batch, n_head, 200, 300) < 0.5)
        assert_as_accurate_as_torch(
            hopper_attention, q, k, v, block_mask=of_heads, deterministic=deterministic, **options
        )


@every_pass
def test_packed_and_head_major_tensors_are_read_in_place(head_dim, deterministic, launch):
    packed = torch.randn(2, 150, 3, 2, head_dim).bfloat16()
    head_major = torch.randn(3, 2, 2, 150, head_dim).bfloat16().transpose(2, 3)
    for q, k, v in (packed.unbind(2), head_major):
        options = {"window": 70, "deterministic": deterministic}
        assert_as_accurate_as_torch(hopper_attention, q, k, v, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_blocks_take_many_tiles_of_one_step(head_dim, launch):
    q, k, v = random_qkv(4, 40, 100, 6, 6, head_dim, torch.float16, "cpu")
    for deterministic in PASSES[head_dim]:
        assert_as_accurate_as_torch(hopper_attention, q, k, v, deterministic=deterministic)


def test_a_buffer_that_is_never_released_is_a_deadlock(launch, monkeypatch):
    monkeypatch.setattr(launch.forward_kernel.__globals__["Ring"], "release", lambda self, i: None)
    q, k, v = random_qkv(1, 300, 300, 2, 2, 64, torch.float16, "cpu")
    with pytest.raises(DeadlockError, match="wait for each other"):
        hopper_attention(q, k, v)


@pytest.mark.parametrize("method", ["fill", "take"])
@pytest.mark.parametrize("share", [1, 2])
def test_a_buffer_that_is_used_without_waiting_for_it_is_noticed(share, method, launch, monkeypatch):
    ring = launch.forward_kernel.__globals__["Ring"]
    waiting = getattr(ring, method)

    def at_once(self, i, wanted=True):
        if int(i) % share:
            return waiting(self, i) if method == "fill" else waiting(self, i, wanted)
        stage = i % self.STAGES
        return stage if method == "take" else (stage, self.full.index(stage))

    monkeypatch.setattr(ring, method, at_once)
    q, k, v = random_qkv(1, 500, 500, 2, 2, 64, torch.float16, "cpu")
    with pytest.raises((AssertionError, DeadlockError)):
        assert_as_accurate_as_torch(hopper_attention, q, k, v)
