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
    replaces the model's own, None keeps it (raising it, with method "none", is a method too).
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
    rotary = replace(config.rotary, base=config.rotary.base if rotary_base is None else rotary_base)
    if method != "none":
        if rotary.scaling != "none":
            raise ValueError(
                f"start.positions={method}: the model's positions are scaled already ({rotary.scaling}, "
                f"factor {rotary.factor}), use start.positions=none to go on with that"
            )
        factor = max(1.0, max_seq_len / config.max_seq_len)
        rotary = replace(rotary, scaling=method, factor=factor, original_seq_len=config.max_seq_len)
    return replace(config, rotary=rotary, max_seq_len=max(max_seq_len, config.max_seq_len))


def extended_state(state: dict[str, Tensor], max_seq_len: int, method: str) -> dict[str, Tensor]:
    """A GPT's parameters by name, for a model with max_seq_len positions; only learned ones grow."""
    name = "position_embedding.weight"
    if name not in state or state[name].shape[0] >= max_seq_len:
        return state
    return {**state, name: extend_learned_positions(state[name], max_seq_len, method)}
