from copy import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist

from kernels import block_masks, operators, packed, sdpa
from kernels.block_mask import BlockMask
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.reference import attention_reference, visible_keys
from model.block_attention import BLOCK_ATTENTION
from model.ring import Ring, length, tokens_of_blocks
from model.ring_attention import merge, ring_attention
from scripts import benchmark_ring
from tests.accuracy import assert_within_rule, random_qkv, run
from tests.together import run_together
from train.distributed import Processes

# (window, whether the sequences are cut into documents)
MASKS = list(product((None, 1, 10, 40), (False, True)))
SEQ_LEN = 64
# of blocks of 64
PATTERNS = ["window(100)", "strided(2) | sinks(5)", "power_of_two_strided()"]


@dataclass
class NoGroup:
    """Stands for a process group where nothing is sent."""

    own_rank: int
    n_ranks: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.n_ranks


def documents(batch: int = 2) -> torch.Tensor:
    lengths = [[-1] * 2 + [0] * 1 + [1] * 30 + [5] * 31, [0] * 20 + [1] * 3 + [2] * 41]
    return torch.tensor(lengths, dtype=torch.int32)[:batch]


def long_documents() -> torch.Tensor:
    """(2, 512), whose ends are on no edge of a block."""
    return (torch.arange(512, dtype=torch.int32) // torch.tensor([[300], [99]])).int()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("window", "in_documents"), MASKS)
def test_the_steps_of_all_ranks_cover_the_mask_exactly_once(size, window, in_documents):
    seq_len = 66 if size == 3 else 64
    ids = None
    if in_documents:
        ids = torch.nn.functional.pad(documents(), (0, seq_len - 64), value=9)
    expected = visible_keys(seq_len, seq_len, causal=True, window=window, document_ids=ids)[:, 0]
    covered = torch.zeros(expected.shape, dtype=torch.int)
    for rank in range(size):
        ring = Ring(NoGroup(rank, size), seq_len, ids)
        for step in ring.steps(window):
            rows, keys = ring.positions[rank][step.rows].long(), ring.positions[step.source][step.keys].long()
            visible = step.mask.visible(len(rows), len(keys), torch.device("cpu"))[:, 0]
            covered[:, rows[:, None], keys] += visible
    assert torch.equal(covered, expected.int())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("in_documents", [False, True])
def test_the_steps_of_all_ranks_cover_a_block_mask_exactly_once(size, pattern, in_documents):
    mask, ids = block_masks.parse(pattern, 512, block_size=64), long_documents() if in_documents else None
    expected = visible_keys(512, 512, causal=True, document_ids=ids)[:, 0] & mask.to_dense()[0]
    covered = torch.zeros(expected.shape, dtype=torch.int)
    rings = [Ring(NoGroup(rank, size), 512, ids) for rank in range(size)]
    for rank, ring in enumerate(rings):
        for distance, step in enumerate(ring.steps(block_mask=mask)):
            rows, keys = ring.positions[rank][step.rows].long(), ring.positions[step.source][step.keys].long()
            if not step.is_empty:
                visible = step.mask.visible(len(rows), len(keys), torch.device("cpu"))[:, 0]
                covered[:, rows[:, None], keys] += visible
                # no block of keys comes that no query here sees
                assert in_documents or visible[0].view(len(rows), -1, 64).any(2).any(0).all()
            theirs = rings[step.destination].steps(block_mask=mask)[distance]
            assert torch.equal(numbers(theirs.keys), numbers(step.send))
    assert torch.equal(covered, expected.int())


def numbers(tokens: slice | torch.Tensor) -> torch.Tensor:
    return torch.arange(512)[tokens]


def test_tokens_of_one_run_are_a_slice_which_nothing_gathers():
    mask = block_masks.parse("strided(2)", 512, block_size=64)
    for rank in range(2):
        for step in Ring(NoGroup(rank, 2), 512).steps(block_mask=mask):
            assert isinstance(step.keys, slice)
            assert isinstance(step.send, slice)
    assert tokens_of_blocks(torch.tensor([1, 3]), 2).tolist() == [2, 3, 6, 7]


def test_a_sparse_pattern_sends_little():
    window, strided = (
        block_masks.parse(pattern, 4096, block_size=64)
        for pattern in ("window(65)", "window(64) | strided(8)")
    )
    dense = Ring(NoGroup(1, 4), 4096).tokens_sent()
    # the block before each of its chunks, and what its own chunks are to the next
    assert Ring(NoGroup(1, 4), 4096).tokens_sent(block_mask=window) == 2 * 64
    assert Ring(NoGroup(1, 4), 4096).tokens_sent(block_mask=strided) <= dense
    with pytest.raises(
        ValueError, match=r"multiple of 2 \* 4 ranks \* 64 = 512, got 4096 queries and 4096 keys"
    ):
        Ring(NoGroup(1, 4), 4160).tokens_sent(block_mask=window)
    with pytest.raises(
        ValueError, match=r"window must be None with a block_mask, got 10: add & window\(10\)"
    ):
        Ring(NoGroup(1, 4), 4096).steps(10, window)
    with pytest.raises(ValueError, match="block_mask must be causal, .*: add & causal"):
        Ring(NoGroup(1, 4), 4096).steps(None, block_masks.from_blocks(*torch.zeros(2, 1).int(), 4096, 4096))


def test_a_default_device_changes_no_step():
    mask = block_masks.parse("window(100)", 512, block_size=64)
    all_options = [(None, {}), (None, {"window": 10}), (long_documents(), {"block_mask": mask})]
    for ids, options in all_options:
        expected = Ring(NoGroup(1, 2), 512, ids).steps(**options)
        with torch.device("meta"):
            steps = Ring(NoGroup(1, 2), 512, ids).steps(**options)
        for mine, other in zip(steps, expected, strict=True):
            assert torch.equal(numbers(mine.keys), numbers(other.keys))
            assert torch.equal(numbers(mine.send), numbers(other.send))
            assert mine.mask.causal == other.mask.causal


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("window", "in_documents"), MASKS)
def test_what_a_rank_sends_is_what_the_other_receives(size, window, in_documents):
    ids = documents() if in_documents else None
    steps = [Ring(NoGroup(rank, size), SEQ_LEN, ids).steps(window) for rank in range(size)]
    for rank, distance in product(range(size), range(size)):
        step = steps[rank][distance]
        assert steps[step.destination][distance].keys == step.send
        assert steps[step.destination][distance].source == rank


def test_a_causal_mask_needs_no_bounds_and_every_rank_does_the_same_work():
    work = []
    for rank in range(4):
        ring = Ring(NoGroup(rank, 4), SEQ_LEN)
        steps = ring.steps()
        assert all(step.mask.key_bounds is None for step in steps)
        visible = (
            step.mask.visible(step.rows.stop - step.rows.start, step.keys.stop - step.keys.start, "cpu")
            for step in steps
        )
        work.append(sum(int(part.sum()) for part in visible))
    assert work == [SEQ_LEN * (SEQ_LEN + 1) // 2 // 4] * 4


def test_keys_that_no_query_sees_are_not_sent():
    # 1024 tokens in 8 chunks of 128: a window of 33 needs the 32 keys before each chunk, and no more
    for rank in range(4):
        ring = Ring(NoGroup(rank, 4), 1024)
        chunks_with_a_successor_elsewhere = 1 if rank in (0, 3) else 2
        assert ring.tokens_sent(window=33) == 32 * chunks_with_a_successor_elsewhere
    # dense: each rank needs the first chunk of the ranks before it, and both of those behind it
    assert sum(Ring(NoGroup(rank, 4), 1024).tokens_sent() for rank in range(4)) == 6 * 128 + 6 * 256
    one_document_a_chunk = (torch.arange(1024, dtype=torch.int32) // 128)[None]
    assert Ring(NoGroup(1, 4), 1024, one_document_a_chunk).tokens_sent() == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_ring_keeps_the_blocks_of_a_pattern_while_documents_change(pattern):
    mask = block_masks.parse(pattern, 512, block_size=64)
    ring = Ring(NoGroup(1, 2), 512)
    before = ring.steps(block_mask=mask)
    for ids in (long_documents(), long_documents().flip(0)):
        kept = ring.with_documents(ids).steps(block_mask=mask)
        fresh = Ring(NoGroup(1, 2), 512, ids).steps(block_mask=mask)
        for mine, other, dense in zip(kept, fresh, before, strict=True):
            assert torch.equal(numbers(mine.keys), numbers(other.keys))
            assert torch.equal(numbers(mine.send), numbers(other.send))
            assert mine.rows == other.rows
            assert mine.mask.blocks is dense.mask.blocks
            for bounds in ("key_bounds", "query_bounds"):
                assert torch.equal(getattr(mine.mask, bounds), getattr(other.mask, bounds))
    assert ring.steps(block_mask=mask) is before
    with pytest.raises(ValueError, match=r"document_ids must be \(B, 512\) on the CPU"):
        ring.with_documents(long_documents()[:, :100])


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"seq_len=100 must be a multiple of 2 \* 4 ranks .* use 104"):
        Ring(NoGroup(0, 4), 100)


def test_a_length_that_is_no_integer_is_refused():
    with pytest.raises(ValueError, match=r"seq_len must be an int, got float 64.0"):
        Ring(NoGroup(0, 2), 64.0)


def test_an_implementation_without_an_lse_is_refused():
    q = torch.zeros(1, 32, 2, 16)
    with pytest.raises(ValueError, match="implementation='sdpa' does not run over several processes"):
        ring_attention(q, q, q, Ring(NoGroup(0, 2), SEQ_LEN), "sdpa")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1.*got 0"),
        ({"window": -3}, "window must be at least 1.*got -3"),
        ({"softmax_scale": -30.0}, "softmax_scale must be positive and finite, got -30"),
    ],
)
def test_numbers_that_attention_refuses_are_refused(options, message):
    q = torch.zeros(1, 32, 2, 16)
    with pytest.raises(ValueError, match=message):
        ring_attention(q, q, q, Ring(NoGroup(0, 2), SEQ_LEN), "flash", **options)


Q = torch.zeros(3, 128, 4, 16)
MASK = block_masks.parse("causal()", 256, block_size=64)
TWO = torch.cat([MASK.to_dense()] * 2)
ELSEWHERE = copy(MASK)
ELSEWHERE.bits = MASK.bits.to("meta")


@pytest.mark.parametrize("implementation", BLOCK_ATTENTION)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "k must be a tensor, got NoneType"),
        ({"q": Q[0]}, r"q must have 4 dimensions.*\(128, 4, 16\)"),
        ({"q": Q[:, :64]}, "q must hold this rank's 128 of 256 tokens, got 64: ring.split"),
        ({"k": Q[:, :64], "v": Q[:, :64]}, "k must hold this rank's 128 of 256 tokens, got 64"),
        ({"k": Q[:, :, :3], "v": Q[:, :, :3]}, "4 heads of q must be a multiple of those of k and v, got 3"),
        ({"k": Q[:1], "v": Q[:1]}, "k must have the batch of q, 3, got 1"),
        ({"k": Q[..., :8], "v": Q[..., :8]}, "k must have the head_dim of q, 16, got 8"),
        ({"v": Q[:, :, :1]}, r"k and v must have one shape, got \(3, 128, 4, 16\) and \(3, 128, 1, 16\)"),
        ({"k": Q.half(), "v": Q.half()}, "one dtype, got q torch.float32 and k torch.float16"),
        ({"v": Q.to("meta")}, "one device, got q on cpu and v on meta"),
        ({"block_mask": object()}, "block_mask must be a BlockMask, got object"),
        ({"block_mask": BlockMask.stack([MASK, MASK])}, "block_mask must have 1 or 4 heads, as q, got 2"),
        (
            {"block_mask": block_masks.from_dense(TWO, block_size=64) & MASK},
            "block_mask must have 1 or 3 batches, as q, got 2",
        ),
        ({"block_mask": ELSEWHERE}, "block_mask must be on cpu, got meta"),
        ({"device": "meta"}, "ring must have its masks on cpu, as q, got meta: give Ring device=cpu"),
        ({"document_ids": torch.zeros(2, 256).int()}, r"document_ids must have 1 or 3 rows, as q, got 2"),
    ],
)
def test_tensors_and_masks_that_do_not_fit_are_refused(implementation, change, message):
    arguments = {"q": Q, "k": Q, "v": Q} | change
    ring = Ring(NoGroup(0, 2), 256, arguments.pop("document_ids", None), arguments.pop("device", "cpu"))
    with pytest.raises(ValueError, match=message):
        ring_attention(**arguments, ring=ring, implementation=implementation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[..., :12], "head_dim must be a multiple of 8 from 8 to 256, got 12"),
        (lambda x: x.double(), "q must be bfloat16, float16 or float32, got torch.float64"),
        (lambda x: x.bfloat16(), "q, k and v must be float16 or float32 on a CPU, got bfloat16"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_of_flash(change, message):
    x = change(Q)
    with pytest.raises(ValueError, match=message):
        ring_attention(x, x, x, Ring(NoGroup(0, 2), 256), "flash")


def test_documents_that_are_no_int32_are_refused():
    with pytest.raises(ValueError, match=r"document_ids must be int32, got torch.float32: call .int\(\)"):
        Ring(NoGroup(0, 2), SEQ_LEN, documents().float())
    with pytest.raises(ValueError, match="document_ids must be a tensor, got list"):
        Ring(NoGroup(0, 2), SEQ_LEN, documents().tolist())


def test_documents_out_of_order_are_refused():
    with pytest.raises(ValueError, match="document_ids must not decrease along a row"):
        Ring(NoGroup(0, 2), SEQ_LEN, documents().flip(1))
    with pytest.raises(ValueError, match=r"document_ids must be \(B, 64\) .*got \(64,\)"):
        Ring(NoGroup(0, 2), SEQ_LEN, documents()[0])


@pytest.mark.parametrize(
    ("masks", "in_documents"),
    [
        ({}, False),
        ({"window": 10}, False),
        ({"window": 40}, True),
        ("strided(3)", False),
        ("window(90)", True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("implementation", "in_16_bits"), [("flash", False), ("reference", False), ("reference", True)]
)
def test_the_steps_of_all_ranks_add_up_to_the_whole_attention(
    implementation, in_16_bits, masks, in_documents, device
):
    # flash in 16 bits on a GPU: the interpreter knows no bf16
    dtype = torch.bfloat16 if in_16_bits or device.type == "cuda" else torch.float32
    seq_len, ids = SEQ_LEN, documents() if in_documents else None
    if isinstance(masks, str):
        seq_len, ids = 256, long_documents()[:, :256].contiguous() if in_documents else None
        masks = {"block_mask": block_masks.parse(masks, 256, block_size=64, device=device)}
    q, k, v = random_qkv(2, seq_len, seq_len, 2, 1, 64, dtype, device)
    dout, no_dlse = torch.randn_like(q), torch.zeros(2, 2, seq_len, device=device)
    options = {**masks, "document_ids": None if ids is None else ids.to(device)}
    torchs = run(attention_reference, q, k, v, dout, no_dlse, **options)
    truths = run(attention_reference, *(x.double() for x in (q, k, v, dout, no_dlse)), **options)
    ours = add_up(q.detach(), k.detach(), v.detach(), dout, ids, masks, implementation)
    for name, x, pt, ref in zip(("out", "lse", "dq", "dk", "dv"), ours, torchs, truths, strict=True):
        assert_within_rule(name, x, pt, ref)


def add_up(q, k, v, dout, ids, masks, implementation, size=2):
    """out, lse, dq, dk, dv from the steps of all ranks, one after the other in this process."""
    attention_forward, attention_backward = BLOCK_ATTENTION[implementation]
    accurate = {"dtype": torch.float32, "device": q.device}
    out, dq, dk, dv = (torch.zeros(x.shape, **accurate) for x in (q, q, k, v))
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), **accurate)
    steps = []
    for rank in range(size):
        ring = Ring(NoGroup(rank, size), q.shape[1], ids, q.device)
        for step in (step for step in ring.steps(**masks) if not step.is_empty):
            rows = ring.positions[rank].to(q.device)[step.rows]
            keys = ring.positions[step.source].to(q.device)[step.keys]
            part, part_lse = attention_forward(q[:, rows], k[:, keys], v[:, keys], step.mask, 64**-0.5)
            merged, merged_lse = out[:, rows], lse[:, :, rows]
            merge(merged, merged_lse, part, part_lse)
            out[:, rows], lse[:, :, rows] = merged, merged_lse
            steps.append((rows, keys, step.mask))
    out = out.to(q.dtype)
    for rows, keys, mask in steps:
        row_data = out[:, rows], lse[:, :, rows], mask, 64**-0.5
        parts = attention_backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], *row_data)
        for x, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            x[:, where] += part
    return out, lse, *(x.to(q.dtype) for x in (dq, dk, dv))


def test_autocast_lowers_no_product_of_the_reference():
    q, k, v = random_qkv(1, SEQ_LEN, SEQ_LEN, 2, 1, 16, torch.bfloat16, "cpu")
    dout = torch.randn_like(q)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = ring_attention(q, k, v, Ring(NoGroup(0, 1), SEQ_LEN), "reference")
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("implementation", ["flash", "reference"])
def test_double_backward_is_refused_with_a_way_out(implementation):
    q, k, v = random_qkv(1, SEQ_LEN, SEQ_LEN, 1, 1, 16, torch.float32, "cpu")
    out = ring_attention(q, k, v, Ring(NoGroup(0, 1), SEQ_LEN), implementation)
    with pytest.raises(NotImplementedError, match=r"use attention_reference.*leave out create_graph=True"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize(("n_before", "n_part"), [(0, 0), (0, 5), (5, 0), (3, 4)])
def test_merged_parts_are_the_attention_to_the_keys_of_both_or_nothing_where_there_are_none(n_before, n_part):
    scores = 30 * torch.randn(2, 3, 7, n_before + n_part, dtype=torch.float64)  # (B, H, T, keys)
    values = torch.randn(2, 3, n_before + n_part, 4, dtype=torch.float64)

    def attend_to(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out = scores[..., keys].softmax(-1) @ values[..., keys, :]  # of no keys 0
        return out.transpose(1, 2), scores[..., keys].logsumexp(-1)

    out, lse = attend_to(slice(n_before))
    merge(out, lse, *attend_to(slice(n_before, None)))
    expected, expected_lse = attend_to(slice(None))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_together_give_the_output_and_gradients_of_one(size, tmp_path):
    run_together(compare_with_one_process, size, tmp_path / "meeting")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_together_are_as_accurate_as_torch_on_one(size, tmp_path):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    run_together(compare_in_16_bits, size, tmp_path / "meeting", "flash", "cuda", 1024, on_gpus=True)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_together_are_as_accurate_in_16_bits_as_torch_in_one(size, tmp_path):
    run_together(compare_in_16_bits, size, tmp_path / "meeting", "reference", "cpu", 512)


def compare_in_16_bits(rank: int, implementation: str, device: str, seq_len: int) -> None:
    block_size = seq_len // 8
    patterns = [block_masks.parse(p, seq_len, block_size=block_size, device=device) for p in PATTERNS]
    all_masks = [{}, {"window": 100}, *({"block_mask": pattern} for pattern in patterns)]
    for masks, in_documents, n_kv_head in product(all_masks, (False, True), (4, 1)):
        torch.manual_seed(0)
        q, k, v = random_qkv(2, seq_len, seq_len, 4, n_kv_head, 64, torch.bfloat16, device)
        dout, no_dlse = torch.randn_like(q), torch.zeros(2, 4, seq_len, device=device)
        ids = (torch.arange(seq_len, dtype=torch.int32) // 300).repeat(2, 1) if in_documents else None
        options = {**masks, "document_ids": None if ids is None else ids.to(device)}
        torchs = run(attention_reference, q, k, v, dout, no_dlse, **options)
        truths = run(attention_reference, *(x.double() for x in (q, k, v, dout, no_dlse)), **options)
        ring = Ring(dist.group.WORLD, seq_len, ids, device)
        parts = [ring.split(x).detach().requires_grad_() for x in (q, k, v)]
        out = ring_attention(*parts, ring, implementation, **masks)
        out.backward(ring.split(dout))
        ours = {"out": out.detach(), **{f"d{n}": x.grad for n, x in zip("qkv", parts, strict=True)}}
        for index, (name, x) in zip((0, 2, 3, 4), ours.items(), strict=True):
            assert_within_rule(name, x, ring.split(torchs[index]), ring.split(truths[index]))


def compare_with_one_process(rank: int) -> None:
    cases = [
        ({"window": window}, SEQ_LEN, documents() if in_documents else None) for window, in_documents in MASKS
    ]
    for pattern, ids in product(PATTERNS, (None, long_documents())):
        cases.append(({"block_mask": block_masks.parse(pattern, 512, block_size=64)}, 512, ids))
    for (masks, seq_len, ids), n_kv_head in product(cases, (4, 2)):
        torch.manual_seed(0)
        batch = 1 if ids is None else 2
        q, dout = (torch.randn(batch, seq_len, 4, 8, dtype=torch.float64) for _ in range(2))
        k, v = (torch.randn(batch, seq_len, n_kv_head, 8, dtype=torch.float64) for _ in range(2))
        ring = Ring(dist.group.WORLD, seq_len, ids)

        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = attention_reference(*whole, **masks, document_ids=ids)
        expected.backward(dout)
        parts = [ring.split(x).requires_grad_() for x in (q, k, v)]
        actual = ring_attention(*parts, ring, "reference", **masks)
        actual.backward(ring.split(dout))

        torch.testing.assert_close(actual, ring.split(expected), rtol=1e-12, atol=1e-12)
        for part, x in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, ring.split(x.grad), rtol=1e-12, atol=1e-12)


def count_operations(rank: int) -> None:
    together = Processes(rank, 2, torch.device("cpu"), None, None)
    arguments = benchmark_ring.Arguments(
        tokens_per_gpu=256, n_head=4, n_kv_head=2, repeats=1, implementation="reference", device="cpu"
    )
    rows = benchmark_ring.measure(arguments, together, 16)
    for mask in ({"window": 100}, {"pattern": "window(128)"}):
        rows += benchmark_ring.measure(arguments, together, 16, **mask)
    assert [row["seq_len"] for row in rows] == [256, 512, 512, 512]
    # of four chunks of 128 rank 0 sends its first, and rank 1, which sends more, both of its own
    assert [row.get("tokens_sent") for row in rows[:3]] == [None, 256, 99]
    # of 512 tokens each of two computes half; of four rows of blocks the first sees one
    pairs = [256 * 257 / 2, 512 * 513 / 4, sum(min(i, 100) for i in range(1, 513)) / 2, 7 * 128**2 / 2]
    for row, seen in zip(rows, pairs, strict=True):
        for direction, products in (("forward", 2), ("backward", 5)):
            flop = row[f"{direction}_tflops"] * row[f"{direction}_ms"] * 1e9
            assert flop == pytest.approx(products * 2 * 4 * 16 * seen)


def test_the_benchmark_counts_what_the_mask_keeps_for_each_gpu(tmp_path):
    run_together(count_operations, 2, tmp_path / "meeting")


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("n_padding", [0, 40])
def test_bounds_of_a_step_lie_within_its_rows_and_keys(window, n_padding):
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int32)
    # queries of padding beside others that see late keys
    ids[0, :n_padding] = -1
    for rank in range(2):
        for step in Ring(NoGroup(rank, 2), SEQ_LEN, ids).steps(window):
            if step.mask.key_bounds is not None:
                for bounds, tokens in (
                    (step.mask.key_bounds, step.keys),
                    (step.mask.query_bounds, step.rows),
                ):
                    assert 0 <= int(bounds.min()) <= int(bounds.max()) <= length(tokens)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("padded", [0, 1])
def test_a_sequence_of_padding_alone_sees_nothing_beside_one_of_text(size, padded):
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int32)
    ids[padded] = -1
    expected = visible_keys(SEQ_LEN, SEQ_LEN, causal=True, document_ids=ids)[:, 0]
    covered = torch.zeros(expected.shape, dtype=torch.int)
    for rank in range(size):
        ring = Ring(NoGroup(rank, size), SEQ_LEN, ids)
        for step in (step for step in ring.steps() if not step.is_empty):
            rows, keys = ring.positions[rank][step.rows], ring.positions[step.source][step.keys]
            visible = step.mask.visible(len(rows), len(keys), torch.device("cpu"))[:, 0]
            covered[:, rows[:, None], keys] += visible.expand(2, -1, -1).int()
    assert torch.equal(covered, expected.int())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_steps_of_all_ranks_cover_a_block_mask_of_each_head_exactly_once(size):
    # of the first blocks of a rank no head but the last sees any of the rank before
    masks = [block_masks.parse(text, 512, block_size=64) for text in ("strided(3)", "window(9)", "causal()")]
    mask = BlockMask.stack(masks)
    expected = mask.to_dense()
    covered = torch.zeros(expected.shape, dtype=torch.int)
    for rank in range(size):
        ring = Ring(NoGroup(rank, size), 512)
        for step in (step for step in ring.steps(block_mask=mask) if not step.is_empty):
            rows, keys = ring.positions[rank][step.rows].long(), ring.positions[step.source][step.keys].long()
            visible = step.mask.visible(len(rows), len(keys), torch.device("cpu"))
            covered[:, :, rows[:, None], keys] += visible
    assert torch.equal(covered, expected.int())


@pytest.mark.parametrize("seq_len", [64, 128, 192])
def test_chunks_that_blocks_do_not_fill_are_refused(seq_len):
    mask = block_masks.causal(seq_len, block_size=64)
    with pytest.raises(ValueError, match=r"a multiple of 2 \* 2 ranks \* 64 = 256, got"):
        Ring(NoGroup(0, 2), seq_len).steps(block_mask=mask)


def test_a_block_mask_of_other_keys_than_queries_is_refused():
    mask = block_masks.from_dense(visible_keys(256, 512, causal=True), block_size=64)
    with pytest.raises(ValueError, match="got 256 queries and 512 keys"):
        Ring(NoGroup(0, 2), 256).steps(block_mask=mask)


@pytest.mark.parametrize("implementation", BLOCK_ATTENTION)
def test_a_scale_replaces_the_default_in_both_passes(implementation):
    q, k, v = random_qkv(1, SEQ_LEN, SEQ_LEN, 2, 1, 16, torch.float32, "cpu")
    dout, options = torch.randn_like(q), {"softmax_scale": 0.1}
    ours = ring_attention(q, k, v, Ring(NoGroup(0, 1), SEQ_LEN), implementation, **options)
    expected = attention_reference(q, k, v, **options)
    for a, b in zip(
        *((out, *torch.autograd.grad(out, (q, k, v), dout)) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", BLOCK_ATTENTION)
def test_gradients_of_a_rank_whose_first_rows_see_nothing_are_those_of_the_definition(implementation):
    # two tokens of padding, which no step computes
    ids = documents(1)
    q, k, v = random_qkv(1, SEQ_LEN, SEQ_LEN, 2, 1, 16, torch.float32, "cpu")
    dout = torch.randn_like(q)
    ring = Ring(NoGroup(0, 1), SEQ_LEN, ids)
    assert ring.steps()[0].rows == slice(2, SEQ_LEN)
    results = []
    for out in (
        ring_attention(q, k, v, ring, implementation),
        attention_reference(q, k, v, document_ids=ids),
    ):
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_form_of_the_call_tells_the_kernels_whether_gradients_are_to_repeat(deterministic, monkeypatch):
    problems = []
    for module in (operators, packed):

        def run(problem, *given, own=module.run):
            problems.append(problem)
            return own(problem, *given)

        monkeypatch.setattr(module, "run", run)
    x = torch.randn(1, SEQ_LEN, 1, 16, requires_grad=True)
    cu_seqlens = torch.tensor([0, SEQ_LEN], dtype=torch.int32)
    flash_attention(x, x, x, deterministic=deterministic).sum().backward()
    flash_attention_varlen(x[0], x[0], x[0], cu_seqlens, deterministic=deterministic).sum().backward()
    packed.flash_attention_packed(torch.stack([x] * 3, 2), deterministic=deterministic).sum().backward()
    torch.use_deterministic_algorithms(deterministic)
    try:
        ring_attention(x, x, x, Ring(NoGroup(0, 1), SEQ_LEN), "flash").sum().backward()
        y = x.detach().transpose(1, 2)
        out, lse, *_, seed, offset, _ = sdpa.sdpa_forward(y, y, y)
        sdpa.sdpa_backward(y, y, y, y, out, lse, None, None, 64, 64, 0.0, False, seed, offset)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [problem.deterministic for problem in problems] == [deterministic] * 10
