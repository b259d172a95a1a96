"""Longer sequences for a model that was trained on shorter ones: what changes before training continues."""

from dataclasses import replace

from torch import Tensor

from model.config import ModelConfig
from model.rope import EXTENSIONS, extend_learned_positions

# what a model with rotary positions can do: keep its frequencies, or scale them (model/rope.py)
ROTARY_METHODS = ("none", "linear", "ntk", "yarn")


def extended_config(
    config: ModelConfig, max_seq_len: int, method: str, rotary_base: float | None = None
) -> ModelConfig:
    """The model's configuration with room for max_seq_len tokens; unchanged if it has the room already.

    method: one of ROTARY_METHODS for rotary positions, repeat or interpolate for learned ones. rotary_base:
    replaces the model's own, None keeps it (raising it, with method "none", is a method too). A model whose
    positions are scaled already is scaled further by the same method, as if it were extended at once.
    Raises ValueError, with the names of train/weights.py, for arguments that do not fit the model.
    """
    if max_seq_len <= config.max_seq_len and rotary_base is None:
        return config
    if config.rotary is None:
        if rotary_base is not None:
            raise ValueError(
                f"start.rotary_base={rotary_base}: the model has learned positions, leave it out"
            )
        if method not in EXTENSIONS:
            raise ValueError(
                f"start.positions={method} is for rotary positions, the model has learned ones: use "
                f"start.positions={' or '.join(EXTENSIONS)}"
            )
        return replace(config, max_seq_len=max_seq_len)
    if method not in ROTARY_METHODS:
        raise ValueError(
            f"start.positions={method} is for learned positions, the model has rotary ones: use "
            f"start.positions={' or '.join(ROTARY_METHODS)}"
        )
    if rotary_base == 1.0 and "yarn" in (method, config.rotary.scaling):
        raise ValueError(f"start.rotary_base must be above 1 for positions scaled by yarn, got {rotary_base}")
    longest = max(max_seq_len, config.max_seq_len)
    rotary = replace(config.rotary, base=config.rotary.base if rotary_base is None else rotary_base)
    if method != "none":
        original = _original_seq_len(config, longest, method)
        rotary = replace(rotary, scaling=method, factor=longest / original, original_seq_len=original)
    return replace(config, rotary=rotary, max_seq_len=longest)


def _original_seq_len(config: ModelConfig, longest: int, method: str) -> int:
    """The positions from which the factor of longest ones counts: those of before any extension.

    Raises ValueError if the model's positions are scaled in a way that this method does not go on with.
    """
    rotary = config.rotary
    if rotary.scaling == "none":
        return config.max_seq_len
    original, more = rotary.original_seq_len, ""
    if rotary.scaling not in ROTARY_METHODS:
        reason = f"in bands of its own (low_freq_factor, high_freq_factor), which {method} lacks"
        more = ", with a larger start.rotary_base to reach further"
    elif rotary.scaling != method:
        reason = "and two scalings do not mix"
        more = f", or start.positions={rotary.scaling} to extend it"
    elif rotary.attention_factor is not None:
        reason = f"with an attention factor of its own, {rotary.attention_factor}, for that factor alone"
    elif original is None:
        reason = "from an unknown number of positions"
        more = ", or add original_max_position_embeddings to its config.json"
    elif longest / original < rotary.factor:
        reason = f"from {original} positions, which reaches {rotary.factor * original:.0f}"
    else:
        return original
    raise ValueError(
        f"start.positions={method}: the model's positions are scaled already ({rotary.scaling}, "
        f"factor {rotary.factor}) {reason}: use start.positions=none to go on with that{more}"
    )


def extended_state(state: dict[str, Tensor], max_seq_len: int, method: str) -> dict[str, Tensor]:
    """A GPT's parameters by name, for a model with max_seq_len positions; only learned ones grow."""
    name = "position_embedding.weight"
    if name not in state or state[name].shape[0] >= max_seq_len:
        return state
    return {**state, name: extend_learned_positions(state[name], max_seq_len, method)}
