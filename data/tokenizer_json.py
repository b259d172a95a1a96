"""Tokenizers of Hugging Face folders: tokenizer.json, by the tokenizers library, from the disk alone."""

import json
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as JsonVocabulary

from data.tokenizer import folder_mark, token_dtype, without_surrogates

FILE = "tokenizer.json"
# where the end of a document may be named: the first that does decides
END_OF_TEXT_FILES = ("tokenizer_config.json", "generation_config.json", "config.json")
REMEDY = "copy it again from its model"


class JsonTokenizer:
    """The tokenizer of a folder, such as that of Llama, Qwen or SmolLM. Text is always ordinary text.

    end_of_text: eos_token of tokenizer_config.json, or else eos_token_id of the model's configuration.
    begin_of_text: what tokenizer.json adds before a text, such as Llama's <s>; encode does not. Raises
    ValueError for a folder without these files, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        self.name = folder_mark(folder)
        try:
            self._vocabulary = JsonVocabulary.from_file(str(path))
        # the library raises nothing more specific
        except Exception as error:
            raise ValueError(f"{path} is no tokenizer ({error}): {REMEDY}") from error
        self._vocabulary.no_truncation()
        self._vocabulary.no_padding()
        # "<|endoftext|>" inside a document is text
        self._vocabulary.encode_special_tokens = True
        self.vocab_size = max(self._vocabulary.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = token_dtype(self.vocab_size)
        self.end_of_text = self._find_end_of_text(folder)
        end = self._vocabulary.get_added_tokens_decoder().get(self.end_of_text)
        if end is not None and not end.special:
            # a chat's end token is not always marked special, and would end the documents that name it
            end.special = True
            self._vocabulary.add_special_tokens([end])
        text = self._vocabulary.encode("a", add_special_tokens=True)
        added = takewhile(lambda pair: pair[1], zip(text.ids, text.special_tokens_mask, strict=True))
        self.begin_of_text = tuple(token for token, _ in added)

    def encode(self, text: str) -> np.ndarray:
        ids = self._vocabulary.encode(without_surrogates(text), add_special_tokens=False).ids
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; those that only pad the model's vocabulary decode to nothing."""
        return self._vocabulary.decode([int(i) for i in ids], skip_special_tokens=False)

    def _find_end_of_text(self, folder: Path) -> int:
        for name in END_OF_TEXT_FILES:
            path = folder / name
            settings = read_settings(path) if path.is_file() else {}
            given = settings.get("eos_token")
            # an object with its options, or the token alone
            token = given.get("content") if isinstance(given, dict) else given
            if given is not None and not isinstance(token, str):
                raise ValueError(
                    f"{path} must name the end of text by a text, got eos_token={given!r}: {REMEDY}"
                )
            if given is not None and self._vocabulary.token_to_id(token) is not None:
                return self._vocabulary.token_to_id(token)
            number = settings.get("eos_token_id")
            if number is not None:
                first = number[0] if isinstance(number, list) and number else number
                if not isinstance(first, int) or first not in range(self.vocab_size):
                    raise ValueError(
                        f"{path}: eos_token_id must be a token, from 0 to {self.vocab_size - 1}, got "
                        f"{first!r}: {REMEDY}"
                    )
                return first
        raise ValueError(
            f"{folder} names no end of text: put tokenizer_config.json with eos_token beside {FILE}"
        )


def read_settings(path: Path) -> dict:
    """What a JSON file of a folder holds. Raises ValueError, naming the file, for a damaged one."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {REMEDY}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold an object, got {type(settings).__name__}: {REMEDY}")
    return settings


@lru_cache(maxsize=4)
def load_json_tokenizer(folder: Path, files: tuple) -> JsonTokenizer:
    """The folder's tokenizer; files: what tells them from those of another time or working directory."""
    return JsonTokenizer(folder)
