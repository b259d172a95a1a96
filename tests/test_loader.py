"""data/loader.py: the same tokens at the same step, whatever the ranks; each sequence once an epoch."""

import numpy as np
import pytest
import torch

from data.loader import TokenLoader
from data.manifest import write_manifest
from data.shards import ShardWriter

TOKENS = 10_007
SEQ_LEN = 16
SEQUENCES = (TOKENS - 1) // SEQ_LEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token i is i, so that every batch tells where it comes from; in shards that sequences cross."""
    folder = tmp_path_factory.mktemp("shards")
    splits = {}
    for split, count in (("train", TOKENS), ("val", 1000)):
        writer = ShardWriter(folder, split, tokens_per_shard=777, tokenizer="gpt2", dtype=np.dtype("<u2"))
        writer.append(np.arange(count, dtype=np.uint16))
        writer.close()
        splits[split] = {"tokens": count, "shards": writer.shards}
    write_manifest(folder, {"config": {}, "splits": splits})
    return folder


def load(folder, **changes) -> TokenLoader:
    values = {
        "split": "train",
        "seq_len": SEQ_LEN,
        "sequences_per_step": 8,
        "seed": 1,
        "tokenizer": "gpt2",
    }
    return TokenLoader(folder, **(values | changes))


def test_a_batch_is_int64_and_targets_are_one_token_further_on(folder):
    tokens, targets = load(folder).batch(3)
    assert tokens.shape == targets.shape == (8, SEQ_LEN)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    # token i is i: also where a sequence crosses shards
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(SEQ_LEN))


def test_an_epoch_holds_each_sequence_once(folder):
    loader = load(folder, sequences_per_step=25)
    assert len(loader) == loader.sequences_per_epoch == SEQUENCES == 625
    assert loader.tokens_per_epoch == SEQUENCES * SEQ_LEN
    for epoch in range(3):
        tokens = torch.cat([loader.batch(25 * epoch + step)[0] for step in range(25)])
        assert torch.equal(tokens.flatten().sort().values, torch.arange(SEQUENCES * SEQ_LEN))


def test_no_sequence_comes_twice_in_an_epoch_that_steps_do_not_divide(folder):
    loader = load(folder, sequences_per_step=8)
    first = torch.cat([loader.batch(step)[0][:, 0] for step in range(160)])
    for epoch in range(2):
        assert len(first[SEQUENCES * epoch : SEQUENCES * (epoch + 1)].unique()) == SEQUENCES


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_any_number_of_ranks_consumes_the_same_tokens_in_the_same_step(folder, world_size, shuffle):
    alone = load(folder, shuffle=shuffle)
    ranks = [load(folder, shuffle=shuffle, rank=rank, world_size=world_size) for rank in range(world_size)]
    # 78.125 steps an epoch: the last steps are of the next
    for step in (0, 1, 77, 78, 79, 500):
        for whole, parts in zip(
            alone.batch(step), zip(*[rank.batch(step) for rank in ranks], strict=True), strict=True
        ):
            assert all(part.shape == (8 // world_size, SEQ_LEN) for part in parts)
            assert torch.equal(torch.cat(parts), whole)


def test_a_batch_depends_on_seed_and_step_alone(folder):
    loader = load(folder)
    later = [loader.batch(step)[0] for step in (100, 5, 78, 0, 5)]
    for step, tokens in zip((100, 5, 78, 0, 5), later, strict=True):
        assert torch.equal(load(folder).batch(step)[0], tokens)
    assert not torch.equal(load(folder, seed=2).batch(5)[0], later[1])


def test_small_integers_of_numpy_count_as_far_as_others(folder):
    given = {"sequences_per_step": 100, "seq_len": 4}
    small = load(folder, **{key: np.int8(value) for key, value in given.items()})
    for step in (100, 2**30):
        batches = small.batch(np.int32(step)), load(folder, **given).batch(step)
        assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))


def test_another_epoch_has_another_order(folder):
    loader = load(folder, sequences_per_step=SEQUENCES)
    assert not torch.equal(loader.batch(0)[0], loader.batch(1)[0])


def test_an_epoch_of_one_seed_has_the_order_of_no_epoch_of_its_neighbour(folder):
    first, second = (load(folder, sequences_per_step=SEQUENCES, seed=seed) for seed in (1, 2))
    orders = [loader.batch(epoch)[0].numpy().tobytes() for loader in (first, second) for epoch in range(3)]
    assert len(set(orders)) == 6


def test_without_shuffle_the_text_comes_in_order(folder):
    loader = load(folder, split="val", shuffle=False)
    assert torch.equal(loader.batch(2)[0].flatten(), torch.arange(2 * 8 * SEQ_LEN, 3 * 8 * SEQ_LEN))
    # of 62 sequences; the rest of a step, or a step longer than the text, begins again
    assert torch.equal(loader.batch(7)[0][-2:], loader.batch(0)[0][:2])
    long = load(folder, split="val", shuffle=False, sequences_per_step=63)
    assert torch.equal(long.batch(0)[0][-1], loader.batch(0)[0][0])


def test_the_last_sequence_that_has_all_its_targets_is_used(folder):
    assert load(folder, seq_len=TOKENS - 1, sequences_per_step=1).sequences_per_epoch == 1
    with pytest.raises(ValueError, match="too few"):
        load(folder, seq_len=TOKENS, sequences_per_step=1)


def test_too_little_text_is_refused_with_the_keys_to_change(folder):
    with pytest.raises(
        ValueError,
        match=r"'val' in .* has 1000 tokens, too few for one sequence of seq_len 1000: lower seq_len, or .* "
        r"data.validation_fraction",
    ):
        load(folder, split="val", seq_len=1000, shuffle=False)
    with pytest.raises(ValueError, match="'train' in .* lower seq_len or tokens_per_step, or prepare more"):
        load(folder, sequences_per_step=10_000)


def test_ranks_that_do_not_divide_a_step_are_refused_with_the_nearest_that_do(folder):
    with pytest.raises(
        ValueError, match=r"multiple of the 3 ranks, got 8: change tokens_per_step, 144 is nearest"
    ):
        load(folder, world_size=3)
    # never none at all
    with pytest.raises(ValueError, match=r"multiple of the 3 ranks, got 1: change tokens_per_step, 48 is n"):
        load(folder, world_size=3, sequences_per_step=1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"split": "test"}, r"split must be one of \('train', 'val'\), got 'test'"),
        ({"rank": 2, "world_size": 2}, "rank must be in"),
        ({"seq_len": 0}, "seq_len and sequences_per_step must be at least 1, got 0"),
        ({"tokenizer": "bytes"}, r"made with tokenizer 'gpt2', this run asks for 'bytes'"),
    ],
)
def test_a_bad_argument_is_refused(folder, change, match):
    with pytest.raises(ValueError, match=match):
        load(folder, **change)


def test_a_folder_that_was_not_prepared_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest\.json.*scripts\.prepare_data"):
        load(tmp_path)


def test_a_negative_step_is_refused(folder):
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        load(folder).batch(-1)
