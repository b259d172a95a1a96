"""Times generation with a long cache: the time of each new token, against the bytes that it must read.

    python -m scripts.benchmark_generate models=[gpt2,llama] seq_lens=[65536]

Weights and the prompt of seq_len tokens are random, sampling is greedy, and every token is copied to the CPU,
as for a terminal. A token must read all weights but the embedding tables, and the keys and values that the
layers see; bandwidth_share is these bytes over what `bandwidth` bytes a second would read in the same time.
"""

import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import torch

from model import GPT, AttentionConfig
from model.attention import window_of
from model.generate import stream
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.inference import check_inference
from scripts.sizes import check_models, read_model
from train.results import write_result
from train.step import DTYPES

# untimed tokens: they cover the prompt, a warm-up step and the step that is captured
UNTIMED = 4


@dataclass(kw_only=True, slots=True)
class Arguments:
    models: list[str] = argument(["gpt2", "llama"], "of conf/model")
    seq_lens: list[int] = argument([1024, 16384, 65536], "tokens of the prompt")
    batches: list[int] = argument([1], "sequences")
    patterns: list[str] = argument(["dense"], "of attention, one layer after the other")
    implementations: list[str] = argument(["flash"], "flash, sdpa or reference")
    compiled: list[bool] = argument([False, True], "by torch.compile")
    tokens: int = argument(100, "new tokens that are timed")
    precision: str = argument("bf16", "of weights and cache: bf16, fp16 or fp32")
    bandwidth: float = argument(4.3e12, "bytes a second that the GPU's memory gives; an H200's, measured")
    device: str = argument("cuda", "cuda, or cpu to try it")
    out: str = result_file("generate.json", "the rows")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check_some(arguments, "models", "seq_lens", "batches", "patterns", "implementations", "compiled")
    check_models(arguments.models)
    for implementation in arguments.implementations:
        check_inference(arguments.device, arguments.precision, implementation, "implementations")
    if arguments.tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {arguments.tokens}: 100 give a steady median")
    check_least(arguments, "seq_lens", "batches")
    if not arguments.bandwidth > 0:
        raise ValueError(
            f"bandwidth must be above 0, got {arguments.bandwidth}: give bytes a second, as 4.3e12"
        )
    rows = []
    for name, seq_len, batch in product(arguments.models, arguments.seq_lens, arguments.batches):
        for implementation, compiled in product(arguments.implementations, arguments.compiled):
            rows.append(measure(arguments, name, seq_len, batch, implementation, compiled))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            write_result(Path(arguments.out), rows, n_gpus=int(arguments.device == "cuda"))


def measure(
    arguments: Arguments, name: str, seq_len: int, batch: int, implementation: str, compiled: bool
) -> dict:
    n_new = UNTIMED + arguments.tokens
    config = read_model(name, seq_len + n_new)
    attention = AttentionConfig(implementation=implementation, patterns=list(arguments.patterns))
    model = GPT(config, attention).to(arguments.device, DTYPES[arguments.precision])
    prompt = torch.randint(config.vocab_size, (batch, seq_len), device=arguments.device)
    torch._dynamo.reset()
    times = []
    for new in stream(model, prompt, n_new, temperature=0.0, compiled=compiled):
        new.tolist()
        times.append(time.perf_counter())
    # a token takes from when the previous one arrived until it arrives itself
    seconds = median([end - start for start, end in pairwise(times[UNTIMED - 1 :])])
    n_bytes = weight_bytes(model) + cache_bytes(model, batch, seq_len)
    return {
        "implementation": implementation,
        "model": name,
        "patterns": list(arguments.patterns),
        "seq_len": seq_len,
        "batch": batch,
        "compiled": compiled,
        "dtype": arguments.precision,
        "token_ms": seconds * 1e3,
        "tokens_per_second": batch / seconds,
        "bytes_per_token": n_bytes,
        "bandwidth": arguments.bandwidth,
        "bandwidth_share": n_bytes / arguments.bandwidth / seconds,
    }


def weight_bytes(model: GPT) -> int:
    """Bytes of the blocks, the last norm and the head: the weights that every new token reads."""
    read = [*model.blocks.parameters(), *model.final_norm.parameters(), model.head_weight]
    return sum(x.nbytes for x in read)


def cache_bytes(model: GPT, batch: int, seq_len: int) -> int:
    """Bytes of keys and values of seq_len tokens, or of a layer's window; other patterns count as dense."""
    config, patterns = model.config, model.attention.patterns
    windows = (window_of(patterns[index % len(patterns)]) for index in range(config.n_layer))
    n_tokens = sum(min(window or seq_len, seq_len) for window in windows)
    return 2 * batch * n_tokens * config.n_kv_head * config.head_dim * model.head_weight.element_size()


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
