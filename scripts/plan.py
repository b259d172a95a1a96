"""Predicts memory and speed of a training run, and the largest micro-batch that fits, before it is launched.

    python -m scripts.plan model=gpt2_xl seq_len=4096 recompute=full

It takes the arguments of python -m train, and gpu=H200 where there is no GPU. These commands
measure a short probe of another card, plan with rates fitted to it, and compare predictions to measured rows:

    python -m scripts.benchmark_training 'models=[gpt2,gpt2_medium]' 'seq_lens=[1024,8192]' out=probe.json
    python -m scripts.plan 'probe=[probe.json]' model=gpt2_xl
    python -m scripts.plan 'compare=[training.json]' out=plan.json
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path

import torch
from hydra.errors import HydraException

from kernels import hopper
from model.gpt import LOGIT_ROWS
from model.recompute import RECOMPUTE
from scripts.arguments import OVERWRITE, argument, result_file, run_script, unknown_argument
from train.config import Config, parse
from train.logger import counted, readable
from train.memory import USABLE, gathered_in_turn, largest_microbatch, peak_bytes
from train.overrides import compose_conf, explain, key_of, known_keys, refuse_idle_overrides, refuse_misread
from train.results import write_result
from train.speed import RATES, Rates, fit_rates, step_seconds
from train.throughput import peak_flops
from train.weights import start_positions

# bytes, as torch tells them, of the cards of RATES
MEMORY = {"H200": 150_123_077_632}
# arguments for other cards, whose rates can be fitted to rows that are here
PROBES = {"H100": "'probe=[docs/results/h100/training_jobs.json]' memory_gib=79"}


@dataclass
class Arguments:
    processes: int = argument(1, "GPUs")
    gpu: str = argument("", "whose rates to use; empty for this machine's")
    memory_gib: float = argument(0.0, "memory of a GPU; 0 for that of gpu")
    probe: list[str] = argument([], "result files of benchmark_training, to fit the rates to", path=True)
    probe_bandwidth: float = argument(3.3e12, "bytes/s of large tensors, with probe: 0.7 of the nominal")
    compare: list[str] = argument([], "result files, whose rows are compared with predictions", path=True)
    chunk: int = argument(
        LOGIT_ROWS, "rows of logits that the fused loss held at a time when these were measured"
    )
    out: str = result_file("", "JSON file for the comparison; empty for none")
    overwrite: bool = argument(False, OVERWRITE)
    train: list[str] = argument([], "KEY=VALUE of python -m train, given one by one")


def main(arguments: Arguments) -> None:
    check(arguments)
    probe = measured("probe", arguments.probe) if arguments.probe else []
    rates = choose_rates(arguments, probe)
    if arguments.compare:
        print(rates)
        found = measured("compare", arguments.compare)
        rows = [compare(row, config, rates, arguments.chunk) for row, config in found]
        for row in rows:
            print(describe(row))
        worst = {key: max(abs(row[f"{key}_error"]) for row in rows) for key in ("memory", "speed")}
        print(f"{len(rows)} rows; largest errors: memory {worst['memory']:.1%}, speed {worst['speed']:.1%}")
        if arguments.out:
            write_result(Path(arguments.out), [{"rates": asdict(rates), **row} for row in rows])
        return
    config, memory = composed(arguments.train), card_memory(arguments)
    print(rates)
    # older cards cannot fuse GELU, even if asked to, and rows say what ran
    if config.fused_gelu and probe and not any(of_row.fused_gelu for _, of_row in probe):
        print("fused_gelu=true: no row of the probe had it, planned without fused GELU")
        config = replace(config, fused_gelu=False)
    plan(config, rates, memory, arguments.processes)


def check(arguments: Arguments) -> None:
    """Raises ValueError for impossible numbers, and for arguments that this call would not read.

    But memory_gib beside compare is let through: commands that result files name have both.
    """
    if arguments.processes < 1:
        raise ValueError(f"processes must be at least 1, got {arguments.processes}: give the number of GPUs")
    if not 0.0 <= arguments.memory_gib < math.inf:
        raise ValueError(
            f"memory_gib must be above 0, got {arguments.memory_gib}: give that of one GPU, as "
            "memory_gib=139.8 for an H200, or leave it out for this machine's"
        )
    if not 0.0 < arguments.probe_bandwidth < math.inf:
        raise ValueError(
            f"probe_bandwidth must be above 0, got {arguments.probe_bandwidth}: give bytes/s, as "
            f"probe_bandwidth={Arguments.probe_bandwidth}"
        )
    if arguments.chunk < 1:
        raise ValueError(
            f"chunk must be at least 1, got {arguments.chunk}: leave it out for today's {Arguments.chunk}"
        )
    refuse_misspelled(arguments.train)
    if arguments.compare and arguments.train:
        raise ValueError(
            f"compare={arguments.compare} takes the configurations of its rows, got {arguments.train}: "
            "leave these out, or compare="
        )
    if arguments.compare and arguments.processes != Arguments.processes:
        raise ValueError(
            f"processes={arguments.processes}, but the rows of compare={arguments.compare} are of one GPU "
            "each: leave it out"
        )
    for name, needed in (("probe_bandwidth", "probe"), ("chunk", "compare"), ("out", "compare")):
        given = getattr(arguments, name)
        if given != getattr(Arguments, name) and not getattr(arguments, needed):
            raise ValueError(f"{name}={given} is read with {needed}=[FILE] only: give that, or leave it out")


def refuse_misspelled(words: list[str]) -> None:
    """Raises ValueError for KEY=VALUE whose key is more like an argument of this script than one of train."""
    own = [item.name for item in fields(Arguments)]
    keys = sorted(key for key in known_keys(Config) if "." not in key)
    for key in map(key_of, words):
        # keys of a group, such as optim.betas, are train's to name
        if "." not in key and set(get_close_matches(key, own + keys, 1)) & set(own):
            raise ValueError(
                f"{unknown_argument(key, Arguments)}--help lists them, and python -m train --help its keys"
            )


def plan(config: Config, rates: Rates, memory: int, processes: int) -> None:
    """Prints the given configuration, and the largest micro-batch that fits, by kind of recomputation."""
    config.check_processes(processes)
    config.accumulation(processes)
    gpus = counted(processes, "GPU")
    print(f"{config.name} on {gpus} of {memory / 2**30:.1f} GiB, {USABLE:.0%} of it for tensors:")
    if config.separate_documents:
        print("separate_documents=true: planned as if each sequence were one document")
    if processes > 1:
        print("exchange between processes is not counted")
    head_dim = config.model.head_dim
    slower = {
        "precision=fp32": not has_rates(config),
        # heads between 128 and 256 take the time of 192 or 256
        f"model.head_dim={head_dim}": head_dim not in hopper.HEAD_DIMS or 128 < head_dim < 256,
        f"model.dropout={config.model.dropout}": config.model.dropout > 0.0,
        "deterministic=true": config.deterministic,
        "attention.block_size=64": config.attention.sparse and config.attention.block_size == 64,
    }
    if any(slower.values()):
        given = ", ".join(name for name, is_set in slower.items() if is_set)
        but = "slower than planned here" if has_rates(config) else "no speed: the rates are of bf16 and fp16"
        print(f"{given}: {but}")
    fits = peak_bytes(config, processes) <= USABLE * memory
    print(line(config, rates, processes, "as given" if fits else "as given: does not fit"))
    tried = [(replace(config, recompute=kind), "") for kind in RECOMPUTE]
    if in_turn := gathered_in_turn(config, processes):
        tried.append((in_turn, " with reshard_after_forward=true"))
    for candidate, change in tried:
        largest = largest_microbatch(candidate, memory, processes)
        if largest is None:
            print(f"recompute={candidate.recompute:<10} not even one sequence fits{change}")
        else:
            is_whole = largest.accumulation(processes) == 1
            limit = "all of tokens_per_step" if is_whole else "the largest that fits"
            print(line(largest, rates, processes, limit + change))


def has_rates(config: Config) -> bool:
    """Whether speed can be planned: matrix products in float32 have other rates."""
    return config.precision != "fp32"


def line(config: Config, rates: Rates, processes: int, remark: str) -> str:
    gib, speed = peak_bytes(config, processes) / 2**30, ""
    if has_rates(config):
        seconds = step_seconds(config, rates, processes)
        speed = f"{readable(config.tokens_per_step / seconds)} tokens/s  {seconds:.3f} s a step  "
    return (
        f"recompute={config.recompute:<10} tokens_per_microbatch={config.tokens_per_microbatch:<8} "
        f"{gib:6.1f} GiB  {speed}{remark}"
    )


def choose_rates(arguments: Arguments, probe: Sequence[tuple[dict, Config]] = ()) -> Rates:
    """The rates fitted to the rows of the probe or, without a probe, those of the card."""
    if probe:
        configs, seconds = [config for _, config in probe], [row["step_ms"] / 1000 for row, _ in probe]
        return fit_rates(configs, seconds, arguments.probe_bandwidth)
    if not arguments.gpu and not torch.cuda.is_available():
        raise ValueError(
            f"gpu is empty, but torch sees no GPU: give gpu={' or gpu='.join(RATES)}, or for another card "
            "probe=[FILE] and memory_gib (--help shows how)"
        )
    name = arguments.gpu or torch.cuda.get_device_name()
    # typed in any case; the driver's own spelling is the table's
    spelled = arguments.gpu.upper() or name
    for card, rates in RATES.items():
        if card not in words_of(spelled):
            continue
        if not is_whole(spelled, card):
            raise ValueError(
                f"gpu={name!r} is not the {card} whose rates are known: give probe=[FILE] (--help shows how)"
            )
        return rates
    known = (given for card, given in PROBES.items() if card in words_of(spelled))
    probe = next(known, "probe=[FILE] memory_gib=NUMBER")
    raise ValueError(
        f"gpu={name!r} has no rates, {', '.join(RATES)} has: name it, or give {probe} (--help shows how)"
    )


def words_of(gpu: str) -> list[str]:
    return gpu.replace("-", " ").split()


def is_whole(gpu: str, card: str) -> bool:
    """Whether a name with the word `card` is the card's own, not that of a slice of it or another variant."""
    return peak_flops(gpu, "bf16") == peak_flops(card, "bf16")


def card_memory(arguments: Arguments) -> int:
    """Bytes of memory_gib, of the card that gpu names or, without both, of this machine's.

    Raises ValueError if gpu names a card of unknown memory, and if there is no GPU to ask.
    """
    if arguments.memory_gib:
        return int(arguments.memory_gib * 2**30)
    if arguments.gpu:
        spelled = arguments.gpu.upper()
        for card, memory in MEMORY.items():
            if card in words_of(spelled) and is_whole(spelled, card):
                return memory
        raise ValueError(
            f"memory_gib=0, but the memory of gpu={arguments.gpu!r} is not known: give that of one GPU, as "
            "memory_gib=139.8 for an H200, or leave gpu out for this machine's"
        )
    if not torch.cuda.is_available():
        raise ValueError("memory_gib=0, but torch sees no GPU to ask: give memory_gib=139.8 for an H200")
    return torch.cuda.get_device_properties(0).total_memory


def measured(key: str, files: list[str]) -> list[tuple[dict, Config]]:
    """Rows of benchmark_training that can be predicted (compiled, flash, 16 bits), with their configurations.

    key: the argument that names the files. Raises ValueError for a file that is missing or of another kind,
    and if no row can be predicted.
    """
    found = []
    for file in files:
        try:
            rows = [
                row
                for row in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
                if row["compile"] and row["implementation"] == "flash" and row["tokens_per_second"]
                # matrix products in float32 have other rates
                if row["precision"] != "fp32"
            ]
        except OSError as error:
            raise ValueError(f"{key}: {file} cannot be read ({error.strerror}): correct it") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{key}: {file} is no result file of scripts.benchmark_training: name one that its out= made"
            ) from error
        for row in rows:
            # older rows were measured before these two settings existed, and with the models' own bias
            row = {"recompute": "none", "fused_gelu": False, **row}
            given = [
                f"{key}={row[key]}"
                for key in (
                    "model",
                    "seq_len",
                    "tokens_per_step",
                    "precision",
                    "fused_loss",
                    "fused_gelu",
                    "low_precision_residual",
                    "recompute",
                )
            ]
            given += [f"tokens_per_microbatch={row['batch'] * row['seq_len']}"]
            given += [f"++model.bias={row['bias']}"] if "bias" in row else []
            found.append(({**row, "source": Path(file).name}, composed(given)))
    if not found:
        raise ValueError(
            f"{key}: {', '.join(files)} must hold a row compiled with flash in bf16 or fp16 that fit into "
            "memory, got none: measure one with scripts.benchmark_training"
        )
    return found


def compare(row: dict, config: Config, rates: Rates, chunk: int) -> dict:
    memory, seconds = peak_bytes(config, chunk=chunk), step_seconds(config, rates)
    keys = (
        "model",
        "seq_len",
        "batch",
        "tokens_per_step",
        "fused_loss",
        "fused_gelu",
        "low_precision_residual",
    )
    return {
        **{key: row[key] for key in keys},
        "bias": config.model.bias,
        "recompute": config.recompute,
        "source": row["source"],
        "peak_memory_bytes": row["peak_memory_bytes"],
        "predicted_peak_memory_bytes": memory,
        "memory_error": memory / row["peak_memory_bytes"] - 1,
        "step_ms": row["step_ms"],
        "predicted_step_ms": seconds * 1000,
        "speed_error": row["step_ms"] / 1000 / seconds - 1,
    }


def describe(row: dict) -> str:
    return (
        f"{row['model']:<11} bias {row['bias']:<4} T {row['seq_len']:<6} B {row['batch']:<3} "
        f"recompute {row['recompute']:<9} "
        f"fused_loss {row['fused_loss']!s:<5} {row['peak_memory_bytes'] / 2**30:6.1f} GiB "
        f"({row['memory_error']:+.1%})  {row['step_ms']:7.1f} ms (speed {row['speed_error']:+.1%})"
    )


def composed(overrides: list[str]) -> Config:
    """The configuration that python -m train makes of overrides. Raises ValueError if it refuses them."""
    refuse_misread(overrides, Config)
    try:
        config = parse(compose_conf(overrides))
    except HydraException as error:
        raise ValueError(explain(error, Config, sweeps=False)) from error
    refuse_idle_overrides(overrides, config, start_positions(config.start))
    return config


if __name__ == "__main__":
    run_script(main, Arguments, __doc__, others="train")
