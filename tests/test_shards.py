"""data/shards.py: what is written is read back, and anything else is refused by file, value and remedy."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data.shards import HEADER, HEADER_BYTES, ShardError, ShardWriter, read_shard, write_shard


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50257, 1000).astype(np.uint16)


@pytest.fixture
def path(tmp_path, tokens):
    path = tmp_path / "train_00000.bin"
    write_shard(path, tokens, tokenizer="gpt2")
    return path


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_tokens_are_read_back_from_a_memory_map(tmp_path, tokens, count):
    path = tmp_path / "shard.bin"
    write_shard(path, tokens[:count], tokenizer="gpt2")
    back = read_shard(path, tokenizer="gpt2", verify=True)
    assert np.array_equal(back, tokens[:count])
    assert back.dtype == np.uint16
    assert (str(path) in Path("/proc/self/maps").read_text()) == (count > 0)
    del back
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_shards_that_are_read_keep_no_descriptors_of_which_a_process_may_have_1024(path, tokens):
    before = os.listdir("/proc/self/fd")
    shards = [read_shard(path, tokenizer="gpt2", verify=True) for _ in range(10)]
    assert os.listdir("/proc/self/fd") == before
    path.unlink()
    assert all(np.array_equal(shard, tokens) for shard in shards)


def test_a_shard_is_a_header_and_little_endian_uint16(path, tokens):
    content = path.read_bytes()
    assert content[:8] == b"NANOFLSH"
    assert struct.unpack_from("<IIQ", content, 8) == (2, HEADER_BYTES, 1000)
    assert content[28:32] == b"gpt2"
    assert content[HEADER_BYTES:] == tokens.astype("<u2").tobytes()


def test_tokens_cannot_be_changed_through_the_map(path):
    with pytest.raises(ValueError, match="read-only"):
        read_shard(path, tokenizer="gpt2")[0] = 1


def test_only_the_finished_file_has_the_name_of_a_shard(tmp_path, tokens):
    writer = ShardWriter(tmp_path, "train", tokens_per_shard=2000, tokenizer="gpt2", dtype=np.dtype("<u2"))
    writer.append(tokens)
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["train_00000.bin"]


def test_a_shard_is_on_the_disk_before_it_has_its_name_and_then_its_name(tmp_path, tokens, monkeypatch):
    path, synced = tmp_path / "train_00000.bin", []

    def fsync(number: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{number}")), path.exists()))
        if not path.exists():
            assert os.fstat(number).st_size == HEADER_BYTES + 2 * len(tokens)

    monkeypatch.setattr(os, "fsync", fsync)
    write_shard(path, tokens, tokenizer="gpt2")
    assert synced == [(tmp_path / f".{path.name}.{os.getpid()}.partial", False), (tmp_path, True)]


def test_a_writer_fills_each_shard_before_the_next(tmp_path, tokens):
    writer = ShardWriter(tmp_path, "val", tokens_per_shard=300, tokenizer="gpt2", dtype=np.dtype("<u2"))
    for start in range(0, 1000, 70):
        writer.append(tokens[start : start + 70])
    writer.close()
    assert [shard["tokens"] for shard in writer.shards] == [300, 300, 300, 100]
    back = [read_shard(tmp_path / shard["file"], tokenizer="gpt2", verify=True) for shard in writer.shards]
    assert np.array_equal(np.concatenate(back), tokens)


def change(path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def refused(path, match: str, tokenizer: str = "gpt2") -> None:
    with pytest.raises(ValueError, match=match) as caught:
        read_shard(path, tokenizer=tokenizer, verify=True)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_shard_is_refused(tmp_path):
    path = tmp_path / "other.bin"
    for content in (b"", b"NANO", b"NANOFLSH", b"PK\x03\x04" * 100):
        path.write_bytes(content)
        refused(path, "is no shard: it must begin with b'NANOFLSH'.*prepare it again")


def test_another_version_is_refused(path):
    change(path, 8, struct.pack("<I", 7))
    refused(path, "must have shard version 1 or 2, got 7")


def test_a_shard_that_was_cut_short_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "is cut short: 1000 tokens need 2256 bytes, got 2255")


def test_a_shard_that_grew_is_refused(path):
    path.write_bytes(path.read_bytes() + b"12")
    refused(path, "is too long: 1000 tokens need 2256 bytes, got 2258")


def test_a_changed_token_is_recognised(path, tokens):
    change(path, HEADER_BYTES + 500, struct.pack("<H", int(tokens[250]) ^ 1))
    refused(path, "is corrupt: its tokens have crc32")


def test_a_shard_of_another_tokenizer_is_refused(path):
    refused(path, "made with tokenizer 'gpt2', this run asks for 'bytes'.*data.tokenizer", tokenizer="bytes")


@pytest.mark.parametrize("wrong", [np.zeros(3, dtype=np.int64), np.zeros((3, 3), dtype=np.uint16)])
def test_tokens_of_another_type_are_not_squeezed_into_a_shard(tmp_path, wrong):
    with pytest.raises(ValueError, match="must be uint16"):
        write_shard(tmp_path / "shard.bin", wrong, tokenizer="gpt2")
    assert not any(tmp_path.iterdir())


def test_a_shard_of_the_first_version_is_read_and_one_with_tokens_of_another_size_refused(path, tokens):
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 8, 1)
    path.write_bytes(content)
    assert np.array_equal(read_shard(path, tokenizer="gpt2", verify=True), tokens)
    *rest, _ = HEADER.unpack_from(content)
    HEADER.pack_into(content, 0, *rest, 3)
    path.write_bytes(content)
    with pytest.raises(ShardError, match="got 1 with tokens of 3 bytes; delete the folder"):
        read_shard(path, tokenizer="gpt2")
