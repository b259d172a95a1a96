"""Weights to start from: a Hugging Face folder or a run of ours, with room for longer sequences if asked."""

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data.prepare import spelled_out
from data.tokenizer import TOKENIZERS, Tokenizer
from data.tokenizer_json import read_settings
from model import GPT, AttentionConfig, ModelConfig
from model.attention import why_not_flash
from model.extend import EXTENSIONS, ROTARY_METHODS, extended_config, extended_state
from model.pretrained import check_pretrained, load_pretrained, read_pretrained_config
from train.checkpoint import (
    MARKER,
    REMOVED,
    load_tensors,
    newest_checkpoint,
    read_checkpoint,
    readable_checkpoints,
    verify_checkpoint,
)
from train.lora import LoraConfig, add_adapters, merge_adapters
from train.overrides import one_of


@dataclass(kw_only=True, slots=True)
class StartConfig:
    # a Hugging Face folder, a run's folder or a checkpoint; null: random weights
    weights: str | None
    # how positions are extended beyond those of the weights. rotary: none, linear, ntk or yarn; learned:
    # repeat or interpolate
    positions: str
    # the base of rotary positions; null: that of the weights
    rotary_base: float | None

    def __post_init__(self):
        if self.weights is not None:
            self.weights = os.path.expanduser(self.weights)
        if self.weights == "":
            raise ValueError(
                "start.weights must name a Hugging Face folder, runs/NAME or a checkpoint, got ''"
            )
        one_of("start.positions", self.positions, (*ROTARY_METHODS, *EXTENSIONS))
        if self.rotary_base is not None and not 1.0 <= self.rotary_base < math.inf:
            raise ValueError(
                f"start.rotary_base must be at least 1 and finite, or null, got {self.rotary_base}"
            )


def start_model(config: StartConfig, seq_len: int, dropout: float, run: Path) -> ModelConfig:
    """The shape of the model that training starts from, with room for seq_len tokens.

    run: the run's folder, whose own checkpoints hold the shape if the weights that it started from are gone
    or damaged. Raises ValueError if neither gives one, or if the positions of the checkpoints were extended
    otherwise.
    """
    try:
        model = read_model_config(config.weights)
    except ValueError as error:
        own = began_from(config.weights, run)
        if own is None:
            raise ValueError(f"start.weights: {error}") from error
        began = own["config"]["start"]
        for key, now in (("positions", config.positions), ("rotary_base", config.rotary_base)):
            # older checkpoints lack some of these keys, and fit any
            then = began.get(key, now)
            if now != then:
                then, now = ("null" if value is None else value for value in (then, now))
                raise ValueError(
                    f"start.{key}={now} has no effect: the run goes on from its checkpoints, which began "
                    f"with start.{key}={then}: use that"
                ) from error
        return ModelConfig(**{**own["config"]["model"], "dropout": dropout})
    model = extended_config(model, seq_len, config.positions, config.rotary_base)
    return replace(model, dropout=dropout)


def start_positions(config: StartConfig) -> int:
    """The tokens that the weights themselves have room for; 0 without weights, or if they cannot be read."""
    if config.weights is not None:
        # a run goes on without those that it began from
        with suppress(ValueError):
            return read_model_config(config.weights).max_seq_len
    return 0


def began_from(weights: str, run: Path) -> dict | None:
    """What a checkpoint of the run holds, if the run began from these weights: it no longer needs them."""
    for info in readable_checkpoints(run / "checkpoints").values():
        began = info["config"].get("start", {}).get("weights")
        if spelled_out(began) == spelled_out(weights):
            return info
    return None


def is_hugging_face(source: Path | str) -> bool:
    """Whether a folder holds a Hugging Face model, and no run or checkpoint of ours."""
    return Path(source, "config.json").is_file()


def locate(source: Path | str) -> Path:
    """A Hugging Face folder itself, or a run's newest checkpoint, which may change at any time."""
    return Path(source) if is_hugging_face(source) else _checkpoint(source)


def check_start(config: StartConfig) -> None:
    """Raises ValueError for weights that load_start could not read, without reading them all."""
    source = Path(config.weights)
    if is_hugging_face(source):
        check_pretrained(source)
        return
    # all checkpoints of a run agree on their adapters
    lora = adapters_of(_read_marker(source)["config"])
    if lora is not None:
        try:
            lora.check_installed()
        except ValueError as error:
            raise ValueError(f"start.weights={config.weights}: {error}") from error


def load_start(model: GPT, config: StartConfig) -> None:
    """Loads the weights into a model of the shape that start_model returned."""
    weights = load_model(config.weights, AttentionConfig(implementation="reference"))
    state = extended_state(weights.state_dict(), model.config.max_seq_len, config.positions)
    model.load_state_dict(state)


def read_model_config(source: Path | str) -> ModelConfig:
    """The shape of the model in a Hugging Face folder, a run's folder or a checkpoint."""
    if is_hugging_face(source):
        return read_pretrained_config(source)
    return ModelConfig(**read_checkpoint(_checkpoint(source))["config"]["model"])


def published_folder(start: str | None) -> Path | None:
    """The Hugging Face folder behind start, the weights that a run began from; None without any.

    Each run may have begun from one before it. Where this cannot be followed, it is what is left of start.
    """
    seen = set()
    with suppress(ValueError):
        while start is not None and start not in seen and not is_hugging_face(start):
            seen.add(start)
            start = _read_marker(Path(start))["config"].get("start", {}).get("weights")
    return None if start is None else Path(start)


def weights_mark(place: Path) -> str | None:
    """A text that no other checkpoint has; None for a Hugging Face folder, which may change unnoticed."""
    if is_hugging_face(place):
        return None
    info = read_checkpoint(place)
    checksums = " ".join(f"{shard['crc32']:08x}" for shard in info["shards"].values())
    return f"step {info['step']}, shards {checksums}"


def load_model(source: Path | str, attention: AttentionConfig) -> GPT:
    """The model in a Hugging Face folder, a run's folder (its newest checkpoint) or a checkpoint, on the CPU.

    Adapters are merged into it. Raises ValueError if there is none.
    """
    if is_hugging_face(source):
        return load_pretrained(source, attention)
    checkpoint = _checkpoint(source)
    config = read_checkpoint(checkpoint)["config"]
    model = GPT.empty(ModelConfig(**config["model"]), attention)
    lora = adapters_of(config)
    if lora is not None:
        add_adapters(model, lora)
    load_tensors(checkpoint, model)
    if lora is not None:
        merge_adapters(model)
    return model


def adapters_of(config: dict) -> LoraConfig | None:
    """The adapters of a checkpoint with this configuration, if any; older checkpoints lack the key."""
    return LoraConfig(**config["lora"]) if config.get("lora", {"rank": 0})["rank"] else None


def run_attention(source: Path | str, implementation: str, device: str) -> AttentionConfig:
    """The model's attention, with its patterns of blocks, in this implementation; "": in any that has them.

    A model in a Hugging Face folder is dense. Raises ValueError for an implementation that lacks a pattern,
    or heads of this size.
    """
    trained = {}
    if not is_hugging_face(source):
        trained = read_checkpoint(_checkpoint(source))["config"]["attention"]
    attention = AttentionConfig(**{**trained, "implementation": "reference"})
    reason = why_not_flash(read_model_config(source))
    # sdpa has no block masks
    able = "reference" if attention.sparse else "sdpa"
    if implementation == "flash" and reason is not None:
        raise ValueError(f"attention=flash {reason} in {source}: use attention={able}")
    if device == "cuda" and reason is None:
        able = "flash"
    if implementation == "sdpa" and attention.sparse:
        raise ValueError(
            f"attention=sdpa has no patterns of blocks, and {source} was trained with "
            f"{list(attention.patterns)}: use attention={able}"
        )
    return replace(attention, implementation=implementation or able)


def tokenizer_name(source: Path | str) -> str:
    """The name that load_tokenizer takes for this model's text: its run's, or the Hugging Face folder."""
    if is_hugging_face(source):
        # a folder called gpt2 need not hold the tokenizer of that name
        return os.path.join(os.curdir, source) if str(source) in TOKENIZERS else str(source)
    return read_checkpoint(_checkpoint(source))["config"]["data"]["tokenizer"]


def begin_of_text(source: Path | str, tokenizer: Tokenizer) -> list[int]:
    """The tokens that this model has learned to see before a text. tokenizer: the model's own.

    In a run of ours a text follows the end of the previous one. For a Hugging Face folder they are what its
    tokenizer adds, or else bos_token_id of config.json, or else also the end of text.
    """
    config = Path(source, "config.json")
    if not config.is_file():
        return [tokenizer.end_of_text]
    if tokenizer.begin_of_text:
        return list(tokenizer.begin_of_text)
    begin = read_settings(config).get("bos_token_id")
    if begin is None:
        return [tokenizer.end_of_text]
    if begin not in range(tokenizer.vocab_size):
        raise ValueError(
            f"{config}: bos_token_id must be a token, from 0 to {tokenizer.vocab_size - 1} with tokenizer "
            f"{tokenizer.name}, got {begin}: correct it there, or remove it"
        )
    return [begin]


def ends_of_text(source: Path | str) -> set[int]:
    """All tokens that a Hugging Face folder names as the end of what its model generates.

    transformers takes those of config.json only where there is no generation_config.json.
    """
    ends = []
    for path in (Path(source, "config.json"), Path(source, "generation_config.json")):
        if path.is_file():
            given = read_settings(path).get("eos_token_id")
            ends += given if isinstance(given, list) else [given]
    return {token for token in ends if isinstance(token, int)}


def _read_marker(source: Path) -> dict:
    """What a run's newest checkpoint, or a checkpoint, says of itself; its weights are not read."""
    infos = list(readable_checkpoints(source / "checkpoints").values())
    return infos[-1] if infos else read_checkpoint(source)


def _checkpoint(source: Path | str) -> Path:
    source = Path(source)
    newest = newest_checkpoint(source / "checkpoints")
    if newest is not None:
        return newest
    if not source.exists() and source.parent.name == "checkpoints":
        raise ValueError(f"{source} is not there{REMOVED}")
    if not source.exists():
        raise ValueError(
            f"{source} does not exist: give a run's folder, a checkpoint or a Hugging Face folder, as "
            "hf download NAME --local-dir FOLDER makes of a name on the hub"
        )
    if not (source / MARKER).is_file():
        raise ValueError(
            f"{source} holds neither config.json, as Hugging Face folders do, nor a checkpoint: give "
            "runs/NAME of a run that has saved one, a folder .../step_00000500, or a Hugging Face folder"
        )
    verify_checkpoint(source)
    return source
