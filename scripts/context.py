"""Does a model use its context? Loss by position, the gain of context, and recall of what lies far back."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import Tokenizer
from model import GPT

# tokens whose logits are in memory at once
HEAD_CHUNK = 4096
# a context is long enough if its loss is this close, in nats, to the least loss of it and longer ones
CLOSE = 0.01
# tokens that give a recall prompt room for needle and question, even if each byte is a token
LEAST_LENGTH = 64
PASSKEY = ("\n# the passkey is {}\n", "\n# the passkey is")


@torch.no_grad()
def token_losses(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy in nats of each target, (B, T) float32; only HEAD_CHUNK tokens' logits in memory."""
    hidden = model.hidden_states(tokens)
    return torch.cat(
        [
            F.cross_entropy(model.logits(part).float().transpose(1, 2), labels, reduction="none")
            for part, labels in zip(hidden.split(HEAD_CHUNK, 1), targets.split(HEAD_CHUNK, 1), strict=True)
        ],
        dim=1,
    )


def position_bins(seq_len: int) -> list[tuple[int, int]]:
    """[first, end) of bins of positions, each twice as long as the one before: 0-1, 1-2, 2-4, 4-8 ..."""
    ends = [min(2**i, seq_len) for i in range(math.ceil(math.log2(seq_len)) + 1)]
    return list(zip([0, *ends], ends, strict=False))


def loss_by_position(losses: Tensor) -> list[dict]:
    """The mean of losses (B, T) in bins of positions: rows of first, end, loss."""
    return [
        {"first": first, "end": end, "loss": losses[:, first:end].mean().item()}
        for first, end in position_bins(losses.shape[1])
    ]


def loss_by_context(model: GPT, tokens: Tensor, targets: Tensor, n_scored: int) -> list[dict]:
    """The mean loss of the last n_scored tokens when the model sees only `context` tokens before them.

    tokens, targets: (B, T). Rows of context, loss, for contexts of 0, n_scored, 2 n_scored, 4 n_scored ...
    T - n_scored tokens: the same targets each time.
    """
    most = tokens.shape[1] - n_scored
    contexts = [0, *(n_scored * 2**i for i in range(20) if n_scored * 2**i < most), most]
    rows = []
    for context in contexts:
        part = slice(most - context, None)
        losses = token_losses(model, tokens[:, part], targets[:, part])
        rows.append({"context": context, "loss": losses[:, -n_scored:].mean().item()})
    return rows


def effective_context(rows: list[dict]) -> int | None:
    """The least context of loss_by_context from which on more tokens gain less than CLOSE nats.

    A loss that is not finite is no gain; None if no loss is finite.
    """
    losses = [row["loss"] if math.isfinite(row["loss"]) else math.inf for row in rows]
    # inf - inf is nan, which is not close
    close = (loss - min(losses[index:]) < CLOSE for index, loss in enumerate(losses))
    return next((row["context"] for row, is_close in zip(rows, close, strict=True) if is_close), None)


@dataclass(frozen=True, slots=True)
class Recall:
    """A prompt that ends with an answer to be recalled: tokens (T,), the last n_answer are the answer."""

    tokens: np.ndarray
    n_answer: int


def passkey(
    tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float, rng: np.random.Generator
) -> Recall:
    """`length` tokens: filler with a number hidden at `depth`, 0 (start) to 1 (end), then asked for."""
    number = f" {rng.integers(10**6, 10**7)}"
    needle = tokenizer.encode(PASSKEY[0].format(number.strip()))
    asked, n_answer = question_and_answer(tokenizer, PASSKEY[1], number)
    room = length - len(needle) - len(asked)
    if not 0 < room <= len(filler):
        raise ValueError(f"length={length} leaves {room} tokens of filler, there are {len(filler)}")
    start = rng.integers(len(filler) - room + 1)
    text, place = filler[start : start + room], round(depth * room)
    return Recall(np.concatenate([text[:place], needle, text[place:], asked]), n_answer)


def key_value(tokenizer: Tokenizer, length: int, depth: float, rng: np.random.Generator) -> Recall:
    """Up to `length` tokens of lines that give each key a number; the one at `depth` is asked for again."""
    lines, used = [], 0
    # a line has more than four tokens
    for key in rng.choice(900_000, min(length // 4 + 1, 900_000), replace=False) + 100_000:
        number = rng.integers(100_000, 1_000_000)
        line = tokenizer.encode(f"value_{key} = {number}\n")
        # question and answer take as much as a line
        if used + 2 * len(line) > length:
            break
        lines.append((key, number, line))
        used += len(line)
    if not lines:
        raise ValueError(f"length={length} has no room for a line and a question: raise it")
    chosen = min(int(depth * len(lines)), len(lines) - 1)
    key, number, _ = lines[chosen]
    asked, n_answer = question_and_answer(tokenizer, f"value_{key} =", f" {number}")
    # the answer may have more tokens than the number of the last line, for which room was left
    while used + len(asked) > length and len(lines) > chosen + 1:
        used -= len(lines.pop()[2])
    return Recall(np.concatenate([*(line for _, _, line in lines), asked]), n_answer)


def question_and_answer(tokenizer: Tokenizer, question: str, answer: str) -> tuple[np.ndarray, int]:
    """The tokens of both as one text, as in the prompt before, and how many of them are the answer."""
    # Llama 2's tokenizer puts a space before a text: an answer by itself would begin with two
    asked, whole = tokenizer.encode(question), tokenizer.encode(question + answer)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    return whole, len(whole) - len(list(same))


def begun(recall: Recall, begin: list[int]) -> Recall:
    """The prompt after the tokens that a model has learned to see before a text (weights.begin_of_text)."""
    return Recall(np.concatenate([np.array(begin, recall.tokens.dtype), recall.tokens]), recall.n_answer)


@torch.no_grad()
def recall_accuracy(model: GPT, prompts: Iterator[Recall], device: torch.device) -> tuple[float, float]:
    """Share of the prompts whose whole answer is the likeliest continuation, and its mean loss in nats."""
    right, losses = [], []
    for prompt in prompts:
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)[None]
        hidden = model.hidden_states(tokens[:, :-1])[:, -prompt.n_answer :]
        logits, answer = model.logits(hidden)[0].float(), tokens[0, -prompt.n_answer :]
        right.append(bool((logits.argmax(-1) == answer).all()))
        losses.append(F.cross_entropy(logits, answer).item())
    return float(np.mean(right)), float(np.mean(losses))
