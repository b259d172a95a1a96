"""Hugging Face's model families in our terms: what config.json means, and what their tensors are called."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from model.config import ModelConfig
from model.rope import READS, RotaryConfig

# what transformers calls original_seq_len
ORIGINAL = "original_max_position_embeddings"
# the keys of config.json that hold settings of ours
GPT2_KEYS = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "mlp_width": "n_inner",
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}
ROTARY_KEYS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_embd": "hidden_size",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}
SCALING_KEYS = {"base": "rope_theta", "scaling": "rope_type", "original_seq_len": ORIGINAL}


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of theirs that make up one of ours, stacked along its rows; `rows`: how many each has.

    transposed: theirs are (in, out), as in GPT-2.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: the prefix of its tensors, both directions of its config.json, its tensors' names."""

    prefix: str
    read_config: Callable[[dict], ModelConfig]
    write_config: Callable[[ModelConfig], dict]
    tensors: Callable[[ModelConfig], Iterator[tuple[str, Source]]]
    # ends of the names of tensors that old versions saved and nobody reads
    ignored_endings: tuple[str, ...] = ()


def family_of(config: ModelConfig) -> str:
    """The architecture that can hold such a model. Raises ValueError, saying what does not fit."""
    if config.rotary is None:
        needed = {"norm": "layer", "mlp": "gelu", "bias": "all", "qk_norm": False, "n_kv_head": config.n_head}
        _check_all("GPT2LMHeadModel", config, {**needed, "n_embd": config.n_head * config.head_dim})
        return "GPT2LMHeadModel"
    _check_all("LlamaForCausalLM", config, {"norm": "rms", "mlp": "swiglu"})
    if config.qk_norm:
        _check_all("Qwen3ForCausalLM", config, {"bias": "none"})
        return "Qwen3ForCausalLM"
    if config.bias == "qkv":
        return "Qwen2ForCausalLM"
    # transformers 5 refuses such a config.json, for this family alone
    if config.n_embd % config.n_head:
        raise ValueError(
            "no Hugging Face family that we know holds this model: LlamaForCausalLM needs model.n_embd to be "
            f"a multiple of model.n_head={config.n_head}, it is {config.n_embd}"
        )
    return "LlamaForCausalLM"


def _check_all(family: str, config: ModelConfig, needed: dict) -> None:
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"no Hugging Face family that we know holds this model: {family} needs model.{name}={value}, "
                f"it is {getattr(config, name)}"
            )


def read_gpt2_config(theirs: dict) -> ModelConfig:
    _require(
        theirs,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        reorder_and_upcast_attn=(False,),
        add_cross_attention=(False,),
        is_causal=(True,),
    )
    for ours in ("n_layer", "n_head", "n_embd", "max_seq_len"):
        name, other = GPT2_KEYS[ours], ROTARY_KEYS[ours]
        # to transformers they are two names of one setting
        if theirs.get(other, theirs[name]) != theirs[name]:
            raise ValueError(
                f"config.json: {name}={theirs[name]!r} and {other}={theirs[other]!r} differ: leave out the "
                "one that is wrong"
            )
    defaults = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    return _model(defaults | theirs, GPT2_KEYS)


def write_gpt2_config(config: ModelConfig) -> dict:
    return {
        "model_type": "gpt2",
        **_values(config, GPT2_KEYS),
        "n_ctx": config.max_seq_len,
        "activation_function": "gelu_new",
        # ours has one rate for all three
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
    }


def gpt2_tensors(config: ModelConfig) -> Iterator[tuple[str, Source]]:
    yield "token_embedding.weight", Source(("transformer.wte.weight",))
    yield "position_embedding.weight", Source(("transformer.wpe.weight",))
    layers = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.projection": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.expand": "mlp.c_fc",
        "mlp.projection": "mlp.c_proj",
    }
    for i in range(config.n_layer):
        for ours, theirs in layers.items():
            weight = Source((f"transformer.h.{i}.{theirs}.weight",), transposed="norm" not in ours)
            yield f"blocks.{i}.{ours}.weight", weight
            yield f"blocks.{i}.{ours}.bias", Source((f"transformer.h.{i}.{theirs}.bias",))
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", Source((f"transformer.ln_f.{kind}",))
    if not config.tied_head:
        yield "head.weight", Source(("lm_head.weight",))


def read_llama_config(theirs: dict) -> ModelConfig:
    both_biases = theirs.get("attention_bias", False), theirs.get("mlp_bias", False)
    if both_biases[0] != both_biases[1]:
        raise ValueError(
            f"config.json: attention_bias={both_biases[0]} with mlp_bias={both_biases[1]} is not supported: "
            "both or none"
        )
    return _read_rotary_family(theirs, bias="all" if both_biases[0] else "none")


def read_qwen2_config(theirs: dict) -> ModelConfig:
    _require(theirs, use_sliding_window=(False,))
    return _read_rotary_family(theirs, bias="qkv")


def read_qwen3_config(theirs: dict) -> ModelConfig:
    _require(theirs, use_sliding_window=(False,), attention_bias=(False,))
    return _read_rotary_family({"head_dim": 128, **theirs}, bias="none", qk_norm=True)


def _read_rotary_family(theirs: dict, *, bias: str, qk_norm: bool = False) -> ModelConfig:
    # text-embedding models also see later tokens: "is_causal": false
    _require(theirs, hidden_act=("silu",), pretraining_tp=(1,), is_causal=(True,))
    for kind in theirs.get("layer_types") or ():
        _require({"layer_types": kind}, layer_types=("full_attention",))
    defaults = {"num_key_value_heads": None, "head_dim": None}
    defaults |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    own = {"norm": "rms", "mlp": "swiglu", "bias": bias, "qk_norm": qk_norm}
    return _model(defaults | theirs, ROTARY_KEYS, rotary=read_rotary(theirs), **own)


def read_rotary(theirs: dict) -> RotaryConfig:
    """Rotary settings, from rope_parameters, or from rope_theta and rope_scaling as before transformers 5."""
    new, old = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
    # transformers 5 would read the old values and ignore the new ones, the base included
    if new and not old.items() <= new.items():
        raise ValueError(
            "config.json: rope_scaling and rope_parameters differ: put all into rope_parameters, and leave "
            "rope_scaling out"
        )
    rope = new or old
    base = rope.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    base = _number("rope_theta", base, "write the model's, or leave it out for 10000")
    _require(rope, partial_rotary_factor=(1.0,), truncate=(True,))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        with _told_in_their_words(SCALING_KEYS):
            return RotaryConfig(base=base)
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported: default, linear, yarn and llama3 are"
        )
    way_out = f"rope_type={kind!r} needs how many times longer than in pretraining sequences may be"
    scaling = {"base": base, "scaling": kind, "factor": _number("factor", rope["factor"], way_out)}
    # transformers, too, takes the first of these, and does without for linear
    scaling["original_seq_len"] = (
        theirs.get(ORIGINAL)
        or rope.get(ORIGINAL)
        or (None if kind == "linear" else theirs["max_position_embeddings"])
    )
    # a config.json may hold more than its scaling reads
    for name in READS[kind]:
        if name not in scaling and rope.get(name) is not None:
            scaling[name] = float(rope[name])
    mscales = kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim")
    if mscales and "attention_factor" not in scaling:
        over, under = (
            0.1 * rope[name] * math.log(rope["factor"]) + 1 for name in ("mscale", "mscale_all_dim")
        )
        scaling["attention_factor"] = over / under
    with _told_in_their_words(SCALING_KEYS):
        return RotaryConfig(**scaling)


def write_rotary_family_config(config: ModelConfig) -> dict:
    architecture = family_of(config)
    model_types = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
    theirs = {
        "model_type": model_types[architecture],
        **_values(config, ROTARY_KEYS),
        "hidden_act": "silu",
        **write_rotary(config.rotary, config.head_dim),
    }
    if architecture == "LlamaForCausalLM":
        theirs["attention_bias"] = theirs["mlp_bias"] = config.bias == "all"
    return theirs


def write_rotary(rotary: RotaryConfig, head_dim: int) -> dict:
    """The rotary settings, under the keys that every version of transformers reads."""
    if rotary.scaling == "none":
        return {"rope_theta": rotary.base}
    if rotary.scaling == "ntk":
        # ntk is nothing but a larger base
        return {"rope_theta": rotary.base * rotary.factor ** (head_dim / (head_dim - 2))}
    scaling = {"rope_type": rotary.scaling}
    for name in READS[rotary.scaling]:
        if getattr(rotary, name) is not None:
            scaling[SCALING_KEYS.get(name, name)] = getattr(rotary, name)
    written = {"rope_theta": rotary.base, "rope_scaling": scaling}
    if rotary.scaling == "linear" and rotary.original_seq_len is not None:
        # among the scaling transformers would warn of it
        written[ORIGINAL] = rotary.original_seq_len
    return written


def rotary_family_tensors(config: ModelConfig) -> Iterator[tuple[str, Source]]:
    yield "token_embedding.weight", Source(("model.embed_tokens.weight",))
    q_rows, kv_rows = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield f"{ours}.attention_norm.weight", Source((f"{theirs}.input_layernorm.weight",))
        yield f"{ours}.mlp_norm.weight", Source((f"{theirs}.post_attention_layernorm.weight",))
        if config.qk_norm:
            for x in "qk":
                yield f"{ours}.attention.{x}_norm.weight", Source((f"{theirs}.self_attn.{x}_norm.weight",))
        linears = {
            "attention.qkv": (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                (q_rows, kv_rows, kv_rows),
            ),
            "attention.projection": (("self_attn.o_proj",), None),
            "mlp.expand": (("mlp.gate_proj", "mlp.up_proj"), (config.mlp_width, config.mlp_width)),
            "mlp.projection": (("mlp.down_proj",), None),
        }
        for name, (parts, rows) in linears.items():
            is_biased = config.bias == "all" or (config.bias == "qkv" and name == "attention.qkv")
            for kind in ("weight", "bias") if is_biased else ("weight",):
                yield (
                    f"{ours}.{name}.{kind}",
                    Source(tuple(f"{theirs}.{part}.{kind}" for part in parts), rows),
                )
    yield "final_norm.weight", Source(("model.norm.weight",))
    if not config.tied_head:
        yield "head.weight", Source(("lm_head.weight",))


def _model(theirs: dict, keys: dict[str, str], **others) -> ModelConfig:
    with _told_in_their_words(keys):
        return ModelConfig(**{ours: theirs[name] for ours, name in keys.items()}, dropout=0.0, **others)


def _values(config: ModelConfig, keys: dict[str, str]) -> dict:
    return {name: getattr(config, ours) for ours, name in keys.items()}


@contextmanager
def _told_in_their_words(keys: dict[str, str]) -> Iterator[None]:
    """Has an error about a setting of ours name the key of config.json that it was read from."""
    try:
        yield
    except ValueError as error:
        # behind the rule comes what to change of a configuration of ours
        rule = str(error).partition(": ")[0]
        rule = re.sub(r"model\.(?:rotary\.)?(\w+)", lambda found: keys.get(found[1], found[1]), rule)
        raise ValueError(f"config.json: {rule}: copy it again from its model") from None


def _require(theirs: dict, **allowed: tuple) -> None:
    """Raises ValueError for a key of config.json whose value changes the model in a way we do not support."""
    for name, values in allowed.items():
        if name in theirs and theirs[name] not in values:
            raise ValueError(
                f"config.json: {name}={theirs[name]!r} is not supported: "
                f"{' or '.join(repr(value) for value in values)} is"
            )


def _number(name: str, value: float | None, way_out: str) -> float:
    """A number of config.json. Raises ValueError if it is null, as it may be where nothing reads it."""
    if value is None:
        raise ValueError(f"config.json: {name} must be a number, got {value}: {way_out}")
    return float(value)


def _rotary_family(read_config: Callable[[dict], ModelConfig]) -> Family:
    ignored = ("rotary_emb.inv_freq",)
    return Family("model.", read_config, write_rotary_family_config, rotary_family_tensors, ignored)


FAMILIES = {
    "GPT2LMHeadModel": Family(
        "transformer.", read_gpt2_config, write_gpt2_config, gpt2_tensors, (".attn.bias", ".attn.masked_bias")
    ),
    # Llama 2 and 3, SmolLM 1 and 2
    "LlamaForCausalLM": _rotary_family(read_llama_config),
    # Qwen 2 and 2.5
    "Qwen2ForCausalLM": _rotary_family(read_qwen2_config),
    "Qwen3ForCausalLM": _rotary_family(read_qwen3_config),
}
