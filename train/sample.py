"""Text from a model: the sample at the end of a run, and what scripts/sample.py prints."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from data.tokenizer import Tokenizer
from model import GPT, ModelConfig
from model.generate import stream
from train.overrides import at_least

# what a decoder gives for bytes that are not yet a whole character
UNFINISHED = "\ufffd"
# the largest that torch's generators take
LARGEST_SEED = 2**64 - 1


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    # the sample continues this text; empty: it starts a new document
    prompt: str
    # tokens to generate; fewer if the model has no more positions; 0 for no sample
    tokens: int
    # 0 takes the likeliest token each time
    temperature: float
    # null for all tokens
    top_k: int | None
    top_p: float | None

    def __post_init__(self):
        at_least("sample.tokens", self.tokens, 0)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"sample.temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sample.top_k must be at least 1 or null, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"sample.top_p must be in (0, 1] or null, got {self.top_p}")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that no generator takes."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")


def sample_text(
    model: GPT, tokenizer: Tokenizer, config: SampleConfig, seed: int, mark: Callable[[], None]
) -> str:
    """The prompt and its continuation, up to the end of the document or of the model's positions.

    mark: called after each piece of it, as a sign of progress.
    """
    text = config.prompt
    for _, piece in stream_text(model, tokenizer, config, [config.prompt], seed):
        text += piece
        mark()
    return text


def stream_text(
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    prompts: list[str],
    seed: int,
    *,
    begin: list[int] | None = None,
    stop_tokens: tuple[int, ...] = (),
    compiled: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yields (number of the prompt, next piece of its continuation); all prompts are continued together.

    A continuation ends with its document, at one of stop_tokens, or when config.tokens or the model's
    positions are used up. begin: as in prompt_ids. config.prompt is not read. Raises ValueError for prompts
    that exceed the model's positions.
    """
    device = model.token_embedding.weight.device
    ids = [prompt_ids(tokenizer, prompt, model.config, begin) for prompt in prompts]
    lengths = [len(row) for row in ids]
    longest = max(lengths)
    n_new = min(config.tokens, model.config.max_seq_len - longest)
    padded = [row + [tokenizer.end_of_text] * (longest - len(row)) for row in ids]
    stops = {tokenizer.end_of_text, *stop_tokens}
    new_tokens = stream(
        model,
        torch.tensor(padded, device=device),
        n_new,
        lengths=torch.tensor(lengths, device=device),
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        # the model may have room for more tokens, which stand for no text
        vocab_size=tokenizer.vocab_size,
        stop_tokens=sorted(stops),
        generator=torch.Generator(device).manual_seed(seed),
        compiled=compiled,
    )
    texts = [GrowingText(tokenizer, row) for row in ids]
    going_on = dict.fromkeys(range(len(prompts)))
    for new in new_tokens:
        tokens = new.tolist()
        for number in list(going_on):
            if tokens[number] in stops:
                del going_on[number]
            elif piece := texts[number].add(tokens[number]):
                yield number, piece
    for number, text in enumerate(texts):
        if rest := text.rest():
            yield number, rest


def prompt_ids(
    tokenizer: Tokenizer, prompt: str, model: ModelConfig, begin: list[int] | None = None
) -> list[int]:
    """The tokens of a prompt, after those that go before it. Raises ValueError if they exceed the positions.

    begin: the tokens before the text; None: the end of text, which precedes each document in training.
    """
    ids = [*([tokenizer.end_of_text] if begin is None else begin), *map(int, tokenizer.encode(prompt))]
    if len(ids) > model.max_seq_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the model {model.max_seq_len} positions: shorten it"
        )
    return ids


class GrowingText:
    """Turns tokens that come one by one into pieces of text, in whole characters."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self._tokenizer = tokenizer
        self._ids = list(ids)
        # where in ids the last piece began and ended; new tokens are decoded together with it, because a
        # decoder may treat the first token of a text differently
        self._begin, self._end = max(len(ids) - 1, 0), len(ids)
        # nor may it begin within a character, of up to four tokens: decoders with byte fallback give up all
        # characters beside such a part
        while self._begin > max(len(ids) - 4, 0) and UNFINISHED in tokenizer.decode(ids[self._begin :]):
            self._begin -= 1

    def add(self, token: int) -> str:
        """What this token adds to the text; nothing while a character is incomplete."""
        self._ids.append(token)
        piece = self._new_text()
        if piece.endswith(UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return piece

    def rest(self) -> str:
        """What `add` has kept back."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._ids[self._begin : self._end])
        return self._tokenizer.decode(self._ids[self._begin :])[len(known) :]
