"""Measures what a model gains from its context.

    python -m scripts.evaluate_context model=runs/NAME data=datasets/NAME

model is a run's folder, a checkpoint, or a Hugging Face folder; data is a folder that training or
scripts.prepare_data has prepared, whose validation split is read. Writes a JSON file of rows and a picture:
the loss by position, the loss of the same tokens by the length of their context, and the recall of a passkey
and of one key among many, by length and depth.
"""

import os
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from data.loader import TokenLoader
from data.manifest import read_manifest
from data.shards import ShardError, read_shard
from data.tokenizer import Tokenizer, is_tokenizer, load_tokenizer, same_tokens, shard_mark
from model import GPT
from scripts.arguments import argument, check_least, check_place, run_script
from scripts.context import (
    LEAST_LENGTH,
    begun,
    effective_context,
    key_value,
    loss_by_context,
    loss_by_position,
    passkey,
    recall_accuracy,
    token_losses,
)
from scripts.inference import check_inference, find_model
from scripts.plot_context import draw_context
from train.overrides import at_least
from train.results import write_result
from train.step import autocast_context
from train.weights import begin_of_text, load_model, run_attention, tokenizer_name, weights_mark

# sequences of the validation split whose text fills the prompts
FILLER_SEQUENCES = 4


@dataclass
class Arguments:
    model: str = argument(..., "a run's folder, a checkpoint, or a Hugging Face folder", path=True)
    data: str = argument(..., "a prepared folder of the model's tokenizer", path=True)
    seq_len: int | None = argument(None, "tokens a sequence; null: the model's longest")
    # with the same window, models of different lengths score the same tokens
    window: int | None = argument(None, "tokens of text whose start and end are read; null: seq_len")
    sequences: int = argument(16, "windows of the validation split to score, at most as many as it has")
    scored: int | None = argument(
        None, "tokens at the end of each, with more and more context; null: 256, at most half of seq_len"
    )
    lengths: list[int] = argument([], "of the recall prompts; empty: seq_len and its halves down to 256")
    depths: list[float] = argument(
        [0.0, 0.25, 0.5, 0.75, 1.0], "where the needle is, 0 the start to 1 the end"
    )
    prompts: int = argument(10, "of each length and depth")
    seed: int = argument(1, "of the prompts")
    attention: str = argument("", "flash, sdpa or reference; empty: the fastest that runs this model here")
    device: str = argument("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    precision: str = argument("bf16" if torch.cuda.is_available() else "fp32", "bf16, fp16 or fp32")
    out: str = argument(
        "context.json", "the rows, a new .json; the picture goes beside it, as .png", path=True
    )


def main(arguments: Arguments) -> None:
    out, picture = new_files(arguments.out)
    check_settings(arguments)
    manifest = read_manifest(Path(arguments.data), key="data")
    place = find_model("model", arguments.model)
    own = tokenizer_name(place)
    name = text_tokenizer(arguments, manifest, own)
    attention = run_attention(place, arguments.attention, arguments.device)
    model = load_model(place, attention)
    tokenizer = load_tokenizer(name)
    # a Hugging Face folder may lack its tokenizer
    if is_tokenizer(own) and not same_tokens(load_tokenizer(own), tokenizer):
        raise ValueError(
            f"data={arguments.data} is in tokens of {name}, the model reads those of {own}: prepare the text "
            f"with data.tokenizer={own}"
        )
    if manifest["vocab_size"] > model.config.vocab_size:
        raise ValueError(
            f"data={arguments.data} has {manifest['vocab_size']} tokens, of tokenizer {name}, the model "
            f"{model.config.vocab_size}: prepare the text with the model's tokenizer"
        )
    seq_len, lengths = checked_lengths(arguments, model.config.max_seq_len)
    scored = checked_scored(arguments, seq_len)
    window = seq_len if arguments.window is None else arguments.window
    if not seq_len <= window < manifest["splits"]["val"]["tokens"]:
        raise ValueError(
            f"window must be at least seq_len={seq_len}, and below the "
            f"{manifest['splits']['val']['tokens']} tokens of validation text, got {window}"
        )
    model.to(arguments.device).eval()
    loader = TokenLoader(
        arguments.data,
        split="val",
        seq_len=window,
        sequences_per_step=1,
        seed=0,
        tokenizer=name,
        shuffle=False,
    )
    filler, begin = filler_text(loader, max(lengths)), begin_of_text(place, tokenizer)
    with autocast_context(arguments.device, arguments.precision):
        rows = text_rows(model, loader, seq_len, scored, arguments)
        rows += recall_rows(model, filler, lengths, tokenizer, begin, arguments)
    shared = {"model": arguments.model, "seq_len": seq_len, "window": window, "scored": scored}
    # by which scripts.compare_extensions knows these results again
    settings = {key: value for key, value in asdict(arguments).items() if key not in ("model", "out")}
    origin = {"weights": weights_mark(place), "settings": settings}
    write_result(out, [row | shared for row in rows], n_gpus=int(arguments.device == "cuda"), **origin)
    draw_context(rows, picture)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"{out}\n{picture}")


def text_tokenizer(arguments: Arguments, manifest: dict, own: str) -> str:
    """The name of the prepared text's tokenizer: the one it was prepared with, or own if that one is gone.

    own: the model's tokenizer. Raises ValueError if the text was not prepared with that one either.
    """
    name = manifest["config"]["tokenizer"]
    if is_tokenizer(name):
        return name
    gone = f"data={arguments.data} was prepared with the tokenizer of {name}, where no tokenizer.json is"
    if not is_tokenizer(own):
        raise ValueError(f"{gone}, nor in {own}, where the model has its own: put it back there")
    shard = manifest["splits"]["val"]["shards"][0]["file"]
    try:
        # a shard carries its tokenizer's digest
        read_shard(Path(arguments.data, shard), tokenizer=shard_mark(own))
    except ShardError as error:
        raise ValueError(
            f"{gone}, and that of {own}, the model's own, does not open it ({error}): put the tokenizer back "
            f"there, or prepare the text with data.tokenizer={own}"
        ) from error
    end = load_tokenizer(own).end_of_text
    if manifest.get("end_of_text", end) != end:
        raise ValueError(
            f"{gone}, and with token {manifest['end_of_text']} as the end of text, which is {end} in {own}, "
            f"where the model has its own: prepare the text with data.tokenizer={own}"
        )
    return own


def new_files(name: str) -> tuple[Path, Path]:
    """The files for the rows and the picture. Raises ValueError if one exists, or name is no .json."""
    out = Path(name)
    if out.suffix != ".json":
        raise ValueError(f"out must end in .json, got {name}: the picture goes beside it, as .png")
    check_place("out", name)
    picture = out.with_suffix(".png")
    for path in (out, picture):
        # a link that leads nowhere is somebody's too
        if os.path.lexists(path):
            raise ValueError(f"out={name}: {path} exists, choose another name")
    return out, picture


def check_settings(arguments: Arguments) -> None:
    """Raises ValueError for what cannot be measured on this machine, whatever the model."""
    check_inference(arguments.device, arguments.precision, arguments.attention)
    check_least(arguments, "sequences", "scored", "prompts")
    # numpy's generators would refuse it, but only after the text is scored
    at_least("seed", arguments.seed, 0)
    if not all(0.0 <= depth <= 1.0 for depth in arguments.depths):
        raise ValueError(f"depths must be from 0 to 1, got {arguments.depths}")


def checked_lengths(arguments: Arguments, positions: int) -> tuple[int, list[int]]:
    """Tokens of a sequence, and of recall prompts. Raises ValueError for what is too long for the model."""
    seq_len = positions if arguments.seq_len is None else arguments.seq_len
    # the second half is scored, with the first as its context
    if not 2 <= seq_len <= positions:
        raise ValueError(f"seq_len must be from 2 to the model's {positions} positions, got {seq_len}")
    if positions < LEAST_LENGTH:
        raise ValueError(
            f"model={arguments.model} has {positions} positions, recall needs {LEAST_LENGTH}: train it with "
            f"seq_len={LEAST_LENGTH} or more"
        )
    lengths = arguments.lengths or [seq_len // 2**i for i in range(20) if seq_len // 2**i >= 256] or [seq_len]
    if not all(LEAST_LENGTH <= length <= positions for length in lengths):
        raise ValueError(
            f"lengths must be from {LEAST_LENGTH} to the model's {positions} positions, got {lengths} with "
            f"seq_len={seq_len}: give lengths that fit"
        )
    return seq_len, lengths


def checked_scored(arguments: Arguments, seq_len: int) -> int:
    """Tokens that are scored with more and more context. Raises ValueError for more than half of seq_len."""
    most = seq_len // 2
    if arguments.scored is None:
        return min(256, most)
    if arguments.scored > most:
        raise ValueError(
            f"scored must be at most {most}, half of seq_len={seq_len}, got {arguments.scored}: lower it, or "
            "raise seq_len"
        )
    return arguments.scored


def filler_text(loader: TokenLoader, longest: int) -> np.ndarray:
    """Text of the validation split, at least `longest` tokens. Raises ValueError if it has fewer."""
    n_sequences = min(FILLER_SEQUENCES, len(loader))
    filler = np.concatenate([loader.batch(index)[0][0].numpy() for index in range(n_sequences)])
    if len(filler) < longest:
        raise ValueError(
            f"lengths must be at most {len(filler)}, the tokens of {n_sequences} windows of "
            f"{loader.seq_len}, got {longest}: lower lengths or raise window"
        )
    return filler


def text_rows(model: GPT, loader: TokenLoader, seq_len: int, scored: int, arguments: Arguments) -> list[dict]:
    """Loss by position at the start of a window, and by length of context at its end: means over windows."""
    n_sequences = min(arguments.sequences, len(loader))
    if n_sequences < arguments.sequences:
        print(
            f"sequences={arguments.sequences}, but the validation split has {n_sequences} windows of "
            f"{loader.seq_len} tokens: all of them are scored"
        )
    by_position, by_context = [], []
    for index in range(n_sequences):
        tokens, targets = (part.to(arguments.device) for part in loader.batch(index))
        losses = token_losses(model, tokens[:, :seq_len], targets[:, :seq_len])
        by_position.append(loss_by_position(losses))
        by_context.append(loss_by_context(model, tokens[:, -seq_len:], targets[:, -seq_len:], scored))
    by_context = mean_rows(by_context)
    rows = [{"kind": "position", **row} for row in mean_rows(by_position)]
    rows += [{"kind": "context", **row} for row in by_context]
    return [*rows, {"kind": "effective_context", "context": effective_context(by_context), "n": n_sequences}]


def mean_rows(tables: list[list[dict]]) -> list[dict]:
    """One table, whose losses are the means over several tables."""
    return [
        {**rows[0], "loss": float(np.mean([row["loss"] for row in rows]))}
        for rows in zip(*tables, strict=True)
    ]


def recall_rows(
    model: GPT,
    filler: np.ndarray,
    lengths: list[int],
    tokenizer: Tokenizer,
    begin: list[int],
    arguments: Arguments,
) -> list[dict]:
    """Accuracy and loss at recalling a passkey, and one key among many, for each length and depth.

    begin: the tokens that each prompt begins with, which count towards its length.
    """
    rng = np.random.default_rng(arguments.seed)
    rows = []
    for length, depth in product(sorted(lengths), arguments.depths):
        room = length - len(begin)
        tasks = {
            "passkey": partial(passkey, tokenizer, filler, room, depth, rng),
            "key_value": partial(key_value, tokenizer, room, depth, rng),
        }
        for kind, draw in tasks.items():
            prompts = (begun(draw(), begin) for _ in range(arguments.prompts))
            accuracy, loss = recall_accuracy(model, prompts, torch.device(arguments.device))
            rows.append({"kind": kind, "length": length, "depth": depth, "accuracy": accuracy, "loss": loss})
    return rows


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
