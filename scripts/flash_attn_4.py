"""FlashAttention 4 (the package flash-attn-4) as the benchmarks measure it, where it is installed."""

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor


def leave_out_if_missing(implementations: list[str]) -> None:
    """Removes fa4 from the list, with a message, if its package is not installed."""
    # flash-attn 2 installs a package of the same name, without the module cute
    if "fa4" in implementations and not (find_spec("flash_attn") and find_spec("flash_attn.cute")):
        print("fa4 is left out: flash-attn-4 is not installed")
        implementations.remove("fa4")


def flash_attn_4(causal: bool, window: int | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k, v (B, T, H, D). window: how many tokens a token sees, including itself."""
    from flash_attn.cute import flash_attn_func

    window_size = (None, None) if window is None else (window - 1, 0)
    return lambda q, k, v: flash_attn_func(q, k, v, causal=causal, window_size=window_size)[0]
