"""Standard JSON: numbers that are not finite, which it cannot express, are null."""

import json
import math


def to_json(value, indent: int | None = None) -> str:
    """The text of plain values, dictionaries and lists, which every JSON parser reads."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def from_json(text: str):
    """What a text holds; NaN and Infinity, which older files contain, become None, as null does.

    Raises json.JSONDecodeError, a ValueError.
    """
    return json.loads(text, parse_constant=lambda name: None)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
