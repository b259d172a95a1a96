"""The patterns are as they are drawn, and top_k is what its formula says, in every block and head."""

import numpy as np
import pytest
import torch

from kernels import block_masks
from kernels.block_mask import BlockMask
from kernels.reference import visible_keys

SIZE = 64


def liked(blocks: list[int]) -> BlockMask:
    """top_k where each block of queries likes one block of keys alone, beside its own."""
    q, k = (
        torch.eye(len(blocks))[x].repeat_interleave(SIZE, 0)[None, :, None]
        for x in (blocks, torch.arange(len(blocks)))
    )
    return block_masks.top_k(q, k, 2, block_size=SIZE)


def three_documents() -> BlockMask:
    lengths = torch.tensor([SIZE * 3 // 2, SIZE * 3 // 2, SIZE])
    return block_masks.documents(torch.arange(3).repeat_interleave(lengths)[None], block_size=SIZE)


def prefix_and_text() -> BlockMask:
    visible = visible_keys(4 * SIZE, 4 * SIZE, causal=True)[0, 0].clone()
    visible[: SIZE * 3 // 2, : SIZE * 3 // 2] = True
    return block_masks.from_dense(visible, block_size=SIZE)


def parsed(text: str) -> BlockMask:
    return block_masks.parse(text, 8 * SIZE, block_size=SIZE)


DRAWN = {
    "causal": lambda: parsed("causal()"),
    "window": lambda: parsed(f"window({2 * SIZE})"),
    "sinks": lambda: parsed("sinks(50)"),
    "strided": lambda: parsed("strided(2)"),
    "power_of_two_strided": lambda: parsed("power_of_two_strided()"),
    "butterfly": lambda: parsed("butterfly()"),
    "fixed": lambda: parsed("fixed(2)"),
    "bigbird": lambda: parsed("bigbird(2, 1, 1)"),
    "documents": three_documents,
    # the first block has no other, the second and third like the first, the last the second
    "top_k": lambda: liked([0, 0, 0, 1]),
    "from_dense": prefix_and_text,
}


def drawn(mask: BlockMask) -> list[str]:
    """The blocks of a mask as the docstrings draw them."""
    picture = [["."] * mask.n_columns for _ in range(mask.n_rows)]
    for row, column, tile in zip(*mask.coordinates()[1:], mask.tiles, strict=True):
        picture[row][column] = "+" if tile else "#"
    return ["".join(line) for line in picture]


def test_every_pattern_is_drawn():
    assert block_masks.PATTERNS.keys() | {"documents", "top_k", "from_dense"} == DRAWN.keys()


@pytest.mark.parametrize("name", DRAWN)
def test_a_pattern_is_what_its_docstring_draws(name):
    lines = [line.strip() for line in getattr(block_masks, name).__doc__.splitlines()]
    picture = [line for line in lines if line and set(line) <= set("#+.")]
    assert len(picture) >= 4
    assert drawn(DRAWN[name]())[: len(picture)] == picture


@pytest.mark.parametrize("n_random", [1, 8, 100, block_masks.MOST_DRAWS])
def test_a_short_sequence_draws_the_blocks_of_a_longer_one(n_random):
    whole = block_masks.bigbird(12 * SIZE, 1, 0, n_random, block_size=SIZE).to_dense()
    for n_blocks in (1, 2, 4, 7):
        short = block_masks.bigbird(n_blocks * SIZE, 1, 0, n_random, block_size=SIZE).to_dense()
        assert torch.equal(short, whole[..., : n_blocks * SIZE, : n_blocks * SIZE])


@pytest.mark.parametrize(
    "pattern", ["window(100) | bigbird(2, 1, 1)", "fixed(2) & strided(2)", "butterfly()"]
)
def test_a_default_device_changes_no_mask(pattern, tmp_path):
    expected = parsed(pattern)
    with torch.device("meta"):
        mask = parsed(pattern)
        assert mask.density() == expected.density()
        mask.plot(tmp_path / "mask.png")
    assert all(map(torch.equal, mask.tensors(), expected.tensors()))


def test_a_default_dtype_changes_no_mask_and_no_reach(other_default_dtype):
    text = "window(100) | bigbird(1, 1, 2)"
    expected = block_masks.parse(text, 400 * SIZE, block_size=SIZE)
    with other_default_dtype():
        mask = block_masks.parse(text, 400 * SIZE, block_size=SIZE)
        assert mask.density() == expected.density()
        layers = block_masks.power_of_two_strided(64 * SIZE, block_size=SIZE)
        assert layers.reach(6) == 1.0
    assert all(map(torch.equal, mask.tensors(), expected.tensors()))


@pytest.mark.parametrize("seq_len", [1, 63, 130, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 99])
def test_top_k_is_its_formula_block_by_block(n, causal, seq_len):
    torch.manual_seed(0)
    q, k = torch.randn(2, seq_len, 6, 8), torch.randn(2, seq_len, 3, 8)
    # the last block of 300 tokens has 44: a mean over 64 would be another, and liked less
    k[:, seq_len // SIZE * SIZE :] += 0.3
    expected = torch.zeros(2, 6, seq_len, seq_len, dtype=torch.bool)
    blocks = [slice(start, start + SIZE) for start in range(0, seq_len, SIZE)]
    for batch in range(2):
        for head in range(6):
            for i, rows in enumerate(blocks):
                query = q[batch, rows, head].mean(0)
                scores = {
                    j: float(query @ k[batch, columns, head // 2].mean(0)) for j, columns in enumerate(blocks)
                }
                if causal:
                    scores = {j: torch.inf if j == i else score for j, score in scores.items() if j <= i}
                for j in sorted(scores, key=scores.get)[-n:]:
                    expected[batch, head, rows, blocks[j]] = True
    if causal:
        expected &= visible_keys(seq_len, seq_len, causal=True)
    mask = block_masks.top_k(q, k, n, causal=causal, block_size=SIZE)
    assert torch.equal(mask.to_dense(), expected)
    assert mask.causal == causal


@pytest.mark.parametrize("kind", [np.bool_, float, torch.tensor])
@pytest.mark.parametrize("causal", [True, False])
def test_top_k_takes_a_flag_of_any_kind(causal, kind):
    q, k = torch.randn(2, 1, 3 * SIZE, 1, 8)
    mask, expected = (block_masks.top_k(q, k, 2, causal=x, block_size=SIZE) for x in (kind(causal), causal))
    assert mask.causal is causal
    assert torch.equal(mask.to_dense(), expected.to_dense())


def test_autocast_changes_no_choice_of_top_k():
    q, k = torch.randn(2, 1, 32 * SIZE, 8, 8)
    chosen = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            chosen.append(block_masks.top_k(q, k, 8, causal=False, block_size=SIZE).keys)
    assert torch.equal(*chosen)
