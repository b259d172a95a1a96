"""Continues text with a trained model: python -m scripts.sample run=runs/NAME 'prompt=import '

The text appears as it is generated; several samples are generated together and printed one after the other.
The prompt is preceded by what the model saw before every text in training: for a run, the end of the previous
document; for a Hugging Face folder, the token that tokenizer.json adds, or else bos_token_id of config.json,
or else the tokenizer's eos_token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from model import GPT
from scripts.arguments import argument, run_script
from scripts.inference import check_inference, find_model, model_tokenizer
from train.out_of_memory import is_out_of_memory
from train.sample import SampleConfig, check_seed, prompt_ids, stream_text
from train.step import DTYPES
from train.weights import begin_of_text, ends_of_text, load_model, run_attention

# a limit, because all samples are generated as one batch
MOST_SAMPLES = 2**16


@dataclass
class Arguments:
    run: str = argument("", "a run's folder: its newest checkpoint is read", path=True)
    checkpoint: str = argument(
        "", "in place of run: a checkpoint's folder, or a Hugging Face folder", path=True
    )
    tokenizer: str = argument(
        "", "gpt2, bytes or a folder with tokenizer.json; empty: the model's own", path=True
    )
    prompt: str = argument("def", "text to continue")
    prompt_file: str = argument("", "a file with the text to continue, in place of prompt", path=True)
    tokens: int = argument(200, "tokens to generate, at most")
    samples: int = argument(1, "how many continuations")
    temperature: float = argument(0.8, "0 takes the likeliest token")
    top_k: int | None = argument(50, "draw from the k likeliest tokens; null for all")
    top_p: float | None = argument(None, "draw from the likeliest tokens that hold this probability")
    stop_tokens: list[int] = argument([], "ids that end a continuation, besides the model's own")
    seed: int = argument(1, "seed of the random draws")
    device: str = argument("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    precision: str = argument(
        "bf16" if torch.cuda.is_available() else "fp32", "of weights and cache: bf16, fp16 or fp32"
    )
    attention: str = argument("", "flash, sdpa or reference; empty: the fastest that runs this model here")
    compile: bool = argument(False, "a minute of compiling, then fewer, larger kernels: for long outputs")


def main(arguments: Arguments) -> None:
    config = sampling(arguments)
    key = "run" if arguments.run else "checkpoint"
    source = arguments.run or arguments.checkpoint
    place = find_model(key, source)
    tokenizer = load_tokenizer(model_tokenizer(f"{key}={source}", place, arguments.tokenizer))
    model = load_model(place, run_attention(place, arguments.attention, arguments.device))
    check_vocabulary(arguments, tokenizer, model)
    begin = begin_of_text(place, tokenizer)
    n_prompt = prompt_tokens(arguments, config.prompt, tokenizer, model, begin)
    # generation is bound by reading the weights: fewer bytes give faster tokens
    model.to(arguments.device, DTYPES[arguments.precision])
    pieces = stream_text(
        model,
        tokenizer,
        config,
        [config.prompt] * arguments.samples,
        arguments.seed,
        begin=begin,
        stop_tokens=(*arguments.stop_tokens, *ends_of_text(place)),
        compiled=arguments.compile,
    )
    try:
        print_texts(pieces, arguments.samples, config.prompt, shows_prompt=not arguments.prompt_file)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"samples={arguments.samples} of prompts of {n_prompt} tokens and tokens={arguments.tokens} do "
            f"not fit into the memory of device={arguments.device}: lower samples or tokens, or shorten the "
            "prompt"
        ) from error


def sampling(arguments: Arguments) -> SampleConfig:
    """What to continue and how. Raises ValueError for arguments that are wrong whatever the model is."""
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise ValueError(f"samples must be from 1 to {MOST_SAMPLES}, got {arguments.samples}")
    check_seed(arguments.seed)
    if bool(arguments.run) == bool(arguments.checkpoint):
        raise ValueError("give either run=runs/NAME or checkpoint=FOLDER")
    if arguments.prompt_file and arguments.prompt != Arguments.prompt:
        raise ValueError(
            f"give either prompt={arguments.prompt} or prompt_file={arguments.prompt_file}, not both"
        )
    prompt = read_prompt(arguments.prompt_file) if arguments.prompt_file else arguments.prompt
    check_inference(arguments.device, arguments.precision, arguments.attention)
    try:
        return SampleConfig(
            prompt=prompt,
            tokens=arguments.tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
        )
    except ValueError as error:
        # this script's keys have no group in front
        raise ValueError(str(error).removeprefix("sample.")) from error


def check_vocabulary(arguments: Arguments, tokenizer: Tokenizer, model: GPT) -> None:
    """Raises ValueError for a tokenizer or stop_tokens with ids that the model does not have."""
    n_ids = model.config.vocab_size
    if tokenizer.vocab_size > n_ids:
        raise ValueError(
            f"tokenizer={tokenizer.name} has {tokenizer.vocab_size} tokens, the model {n_ids}: give the one "
            "that the model was trained with"
        )
    if not all(0 <= token < n_ids for token in arguments.stop_tokens):
        raise ValueError(f"stop_tokens must be ids from 0 to {n_ids - 1}, got {arguments.stop_tokens}")


def prompt_tokens(
    arguments: Arguments, prompt: str, tokenizer: Tokenizer, model: GPT, begin: list[int]
) -> int:
    """How many of the model's positions the prompt takes; says so if they leave too few for all tokens."""
    positions = model.config.max_seq_len
    try:
        n_prompt = len(prompt_ids(tokenizer, prompt, model.config, begin))
    except ValueError as error:
        name = "prompt_file" if arguments.prompt_file else "prompt"
        raise ValueError(f"{name}: {error}, or extend the model (docs/long_context.md)") from error
    if n_prompt + arguments.tokens > positions:
        print(
            f"tokens={arguments.tokens}, but of the model's {positions} positions the prompt takes "
            f"{n_prompt}: at most {positions - n_prompt} tokens come; lower tokens, shorten the prompt, or "
            "extend the model (docs/long_context.md)",
            file=sys.stderr,
        )
    return n_prompt


def print_texts(pieces: Iterator[tuple[int, str]], n_texts: int, prompt: str, *, shows_prompt: bool) -> None:
    """Prints a single text as it comes, several one after the other; pieces: (number of the text, piece)."""
    if n_texts == 1:
        print(prompt if shows_prompt else "", end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    texts = [prompt if shows_prompt else ""] * n_texts
    for number, piece in pieces:
        texts[number] += piece
    for number, text in enumerate(texts, start=1):
        print(f"--- sample {number} ---\n{text}")


def read_prompt(path: str) -> str:
    """The text of prompt_file. Raises ValueError for a file that cannot be read as UTF-8."""
    try:
        # the same way as data/sources.py reads text
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    raise ValueError(f"prompt_file={path} cannot be read ({reason}): give a file of UTF-8 text")


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
