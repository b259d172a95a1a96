"""Positions that can grow: rotary embeddings with the scalings in use, and learned ones made longer.

Pair i of the D / 2 pairs of channels of a head turns by position * f_i, f_i = base^(-2 i / D). To reach
`factor` times further than pretraining did:

    linear   f_i / factor: all positions squeezed into the old range
    ntk      base * factor^(D / (D - 2)): the slowest pair squeezed as in linear, the fastest left alone
    yarn     linear for pairs that turned less than beta_slow times in pretraining, untouched for those that
             turned more than beta_fast times, a ramp between; and larger logits, see attention_factor
    llama3   the same idea over wavelengths, as Llama 3.1 was trained

Sources: Su et al., RoFormer, arXiv:2104.09864; Chen et al., position interpolation, arXiv:2306.15595; Peng et
al., YaRN, arXiv:2309.00071; Llama 3, arXiv:2407.21783. The numbers are those of transformers.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

# which values of RotaryConfig each scaling reads, besides the base
READS = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "original_seq_len", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_seq_len", "low_freq_factor", "high_freq_factor"),
}
EXTENSIONS = ("repeat", "interpolate")


@dataclass(kw_only=True, slots=True)
class RotaryConfig:
    # the slowest pair of channels turns once in about 2 pi base tokens
    base: float
    # a key of READS
    scaling: str = "none"
    # how many times longer than in pretraining sequences may be
    factor: float = 1.0
    # the longest sequence of pretraining; yarn and llama3 need it, linear and ntk to be extended again
    original_seq_len: int | None = None
    # yarn: pairs that turn more than beta_fast times in original_seq_len are kept, below beta_slow squeezed
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # yarn: what cos and sin are multiplied by; null for the paper's 0.1 ln(factor) + 1
    attention_factor: float | None = None
    # llama3: the same bounds, as original_seq_len / wavelength
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if self.scaling not in READS:
            raise ValueError(f"model.rotary.scaling must be one of {', '.join(READS)}, got {self.scaling!r}")
        # written so that nan fails too
        for name in ("base", "factor"):
            if not 1.0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.rotary.{name} must be at least 1 and finite, got {getattr(self, name)}"
                )
        for name in ("beta_fast", "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"model.rotary.{name} must be above 0 and finite, got {value}")
        if self.original_seq_len is not None and self.original_seq_len < 1:
            raise ValueError(
                f"model.rotary.original_seq_len must be at least 1 or null, got {self.original_seq_len}"
            )
        # yarn looks for the pair that turns a given number of times: with base 1 all pairs turn alike
        if self.scaling == "yarn" and self.base == 1.0:
            raise ValueError(
                f"model.rotary.base must be above 1 with model.rotary.scaling=yarn, got {self.base}"
            )
        if self.scaling in ("yarn", "llama3") and self.original_seq_len is None:
            raise ValueError(
                f"model.rotary.scaling={self.scaling} needs model.rotary.original_seq_len: "
                "give the longest sequence of pretraining"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rotary.low_freq_factor={self.low_freq_factor} must be below "
                f"model.rotary.high_freq_factor={self.high_freq_factor}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and not _is_read(field.name, self.scaling):
                reader = "yarn" if field.name in READS["yarn"] else "llama3"
                raise ValueError(
                    f"model.rotary.{field.name}={value} has no effect with model.rotary.scaling="
                    f"{self.scaling}: add model.rotary.scaling={reader}, or leave it out"
                )

    @classmethod
    def from_checkpoint(cls, values: dict) -> "RotaryConfig":
        """From plain values; older checkpoints may hold some that their scaling did not read."""
        scaling = values.get("scaling", "none")
        return cls(**{name: value for name, value in values.items() if _is_read(name, scaling)})


def _is_read(name: str, scaling: str) -> bool:
    """Whether a scaling reads a value of RotaryConfig, or accepts it."""
    if name == "original_seq_len":
        return scaling != "none"
    return name in ("base", "scaling") or name in READS.get(scaling, ())


def frequencies(
    config: RotaryConfig, head_dim: int, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """The angle that each pair of channels turns per token, (D / 2,) float64, and a factor of cos and sin."""
    base, factor = config.base, config.factor
    if config.scaling == "ntk":
        base *= factor ** (head_dim / (head_dim - 2))
    kept = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    if config.scaling in ("none", "ntk"):
        return kept, 1.0
    squeezed = kept / factor
    if config.scaling == "linear":
        return squeezed, 1.0
    if config.scaling == "yarn":
        share, attention_factor = yarn_share(config, head_dim, device), config.attention_factor
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0
    else:
        turns = config.original_seq_len * kept / (2.0 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        share, attention_factor = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0), 1.0
    return squeezed * (1.0 - share) + kept * share, attention_factor


def yarn_share(config: RotaryConfig, head_dim: int, device: torch.device | None) -> Tensor:
    """How much of its own frequency each pair keeps, (D / 2,), 1 to 0."""

    def pair_that_turns(times: float) -> float:
        wavelength = config.original_seq_len / (times * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(config.base))

    # whole pairs, as in transformers and the authors' code
    first = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(config.beta_slow)), head_dim - 1)
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    # with a very small base the ramp may begin behind its end, and is not widened then
    return 1.0 - ((pair - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)


def rotation(config: RotaryConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at positions (..., T), (..., T, 1, D / 2) float32."""
    return cos_and_sin(positions, *frequencies(config, head_dim, positions.device))


# an operator, because a compiler would recompute the angles, in float64, in every layer that uses them
@torch.library.custom_op("nanoflash::cos_and_sin", mutates_args=())
def cos_and_sin(positions: Tensor, frequency: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    # float32 angles are off by 0.06 at position 1M
    angles = (positions[..., None].double() * frequency)[..., None, :]
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


@cos_and_sin.register_fake
def _(positions, frequency, factor):
    shape = *positions.shape, 1, frequency.shape[0]
    return tuple(positions.new_empty(shape, dtype=torch.float32) for _ in range(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) with channels i and i + D / 2 turned as a pair, in x's dtype."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def extend_learned_positions(weight: Tensor, n_positions: int, method: str) -> Tensor:
    """Learned positions (T, C) made longer, (n_positions, C), to be trained on.

    repeat: the table repeated (Longformer, arXiv:2004.05150), so that near positions stay exact;
    interpolate: the table stretched, its ends kept. Raises ValueError for a shorter table.
    """
    if method not in EXTENSIONS:
        raise ValueError(f"method must be one of {', '.join(EXTENSIONS)}, got {method!r}")
    old = weight.shape[0]
    if n_positions < old:
        raise ValueError(f"n_positions={n_positions} must be at least the {old} that there are")
    if method == "repeat":
        return weight.repeat(math.ceil(n_positions / old), 1)[:n_positions]
    stretched = F.interpolate(weight.T[None], size=n_positions, mode="linear", align_corners=True)
    return stretched[0].T.contiguous()
