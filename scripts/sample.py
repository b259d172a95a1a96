"""Continues text with a trained model: python -m scripts.sample run=runs/NAME 'prompt=import '

The text appears as it is generated; several samples are generated together and printed one after the other.
The prompt is preceded by what the model saw before every text in training: for a run, the end of the previous
document; for a Hugging Face folder, the token that tokenizer.json adds, or else bos_token_id of config.json,
or else the tokenizer's eos_token.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from data.tokenizer import load_tokenizer
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
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise ValueError(f"samples must be from 1 to {MOST_SAMPLES}, got {arguments.samples}")
    check_seed(arguments.seed)
    if bool(arguments.run) == bool(arguments.checkpoint):
        raise ValueError("give either run=runs/NAME or checkpoint=FOLDER")
    if arguments.prompt_file and arguments.prompt != Arguments.prompt:
        raise ValueError(
            f"give either prompt={arguments.prompt} or prompt_file={arguments.prompt_file}, not both"
        )
    source = arguments.run or arguments.checkpoint
    prompt = read_prompt(arguments.prompt_file) if arguments.prompt_file else arguments.prompt
    check_inference(arguments.device, arguments.precision, arguments.attention)
    try:
        config = SampleConfig(
            prompt=prompt,
            tokens=arguments.tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
        )
    except ValueError as error:
        # this script's keys have no group in front
        raise ValueError(str(error).removeprefix("sample.")) from error
    key = "run" if arguments.run else "checkpoint"
    place = find_model(key, source)
    tokenizer = load_tokenizer(model_tokenizer(f"{key}={source}", place, arguments.tokenizer))
    model = load_model(place, run_attention(place, arguments.attention, arguments.device))
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer={tokenizer.name} has {tokenizer.vocab_size} tokens, the model "
            f"{model.config.vocab_size}: leave tokenizer empty for the model's own"
        )
    if not all(0 <= token < model.config.vocab_size for token in arguments.stop_tokens):
        raise ValueError(
            f"stop_tokens must be ids from 0 to {model.config.vocab_size - 1}, got {arguments.stop_tokens}"
        )
    begin = begin_of_text(place, tokenizer)
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
    # generation is bound by reading the weights: fewer bytes give faster tokens
    model.to(arguments.device, DTYPES[arguments.precision])
    texts = [""] * arguments.samples
    pieces = stream_text(
        model,
        tokenizer,
        config,
        [prompt] * arguments.samples,
        arguments.seed,
        begin=begin,
        stop_tokens=(*arguments.stop_tokens, *ends_of_text(place)),
        compiled=arguments.compile,
    )
    alone = arguments.samples == 1
    if alone and not arguments.prompt_file:
        print(prompt, end="", flush=True)
    try:
        for number, piece in pieces:
            texts[number] += piece
            if alone:
                print(piece, end="", flush=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"samples={arguments.samples} of prompts of {n_prompt} tokens and tokens={arguments.tokens} do "
            f"not fit into the memory of device={arguments.device}: lower samples or tokens, or shorten the "
            "prompt"
        ) from error
    if alone:
        print()
        return
    for number, text in enumerate(texts, start=1):
        print(f"--- sample {number} ---\n{prompt}{text}")


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
