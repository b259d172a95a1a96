"""The shape of a transformer: GPT-2 by default, or Llama, Qwen and what lies between."""

import math
from dataclasses import dataclass
from numbers import Integral

from kernels.checks import check_dropout
from model.rope import RotaryConfig

# the matrix products of the head run fastest when the vocabulary fills whole tiles
VOCAB_MULTIPLE = 128

CHOICES = {"norm": ("layer", "rms"), "mlp": ("gelu", "swiglu"), "bias": ("all", "qkv", "none")}


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Fields without a default are GPT-2's own settings; the others default to what GPT-2 has."""

    n_layer: int
    n_head: int
    # channels of the residual stream, C
    n_embd: int
    # number of distinct tokens, as the tokenizer counts them; padded inside the model
    vocab_size: int
    # the longest sequence; with learned positions, also the number of position embeddings
    max_seq_len: int
    # on embeddings, attention weights and both residual branches; 0 for pretraining on ample data
    dropout: float
    # heads of keys and values, each shared by a group of query heads; null: n_head
    n_kv_head: int | None = None
    # channels of a head; null: n_embd / n_head
    head_dim: int | None = None
    # channels inside the MLP; null: 4 n_embd
    mlp_width: int | None = None
    # null: learned positions
    rotary: RotaryConfig | None = None
    # layer: LayerNorm with bias; rms: RMSNorm (Zhang and Sennrich, arXiv:1910.07467)
    norm: str = "layer"
    norm_eps: float = 1e-5
    # gelu: GELU between two linear layers; swiglu: gated by SiLU (Shazeer, arXiv:2002.05202)
    mlp: str = "gelu"
    # which linear layers add a bias: all, qkv (the one before attention) or none
    bias: str = "all"
    # RMSNorm of each head's queries and keys (Dehghani et al., arXiv:2302.05442)
    qk_norm: bool = False
    # the head shares the token embedding's weights; otherwise it has its own
    tied_head: bool = True

    def __post_init__(self):
        if isinstance(self.rotary, dict):
            # a checkpoint's configuration holds plain values
            self.rotary = RotaryConfig.from_checkpoint(self.rotary)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "max_seq_len"):
            _check_positive(self, name)
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head}: "
                f"n_embd={self.n_embd // self.n_head * self.n_head or self.n_head} would be, "
                "or set model.head_dim"
            )
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.head_dim = self.n_embd // self.n_head if self.head_dim is None else self.head_dim
        self.mlp_width = 4 * self.n_embd if self.mlp_width is None else self.mlp_width
        for name in ("n_kv_head", "head_dim", "mlp_width"):
            _check_positive(self, name)
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"model.n_head={self.n_head} must be a multiple of model.n_kv_head={self.n_kv_head}"
            )
        if self.rotary is not None and self.head_dim % 2:
            raise ValueError(f"model.rotary turns pairs of channels, got model.head_dim={self.head_dim}")
        # a single pair of channels would be the slowest and the fastest at once
        if self.rotary is not None and self.rotary.scaling == "ntk" and self.head_dim == 2:
            raise ValueError(
                "model.rotary.scaling=ntk needs model.head_dim to be at least 4, got 2: use "
                "model.rotary.scaling=linear, or fewer heads"
            )
        check_dropout(self.dropout, "model.dropout")
        # written so that nan fails too
        if not 0.0 <= self.norm_eps < math.inf:
            raise ValueError(f"model.norm_eps must be at least 0 and finite, got {self.norm_eps}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"model.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def has_fusible_activation(self) -> bool:
        """Whether products may take the MLP's activation in: GELU, or a gate without biases.

        No family of models has a gate with biases.
        """
        return self.mlp == "gelu" or self.bias != "all"


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns (input and output channels) of the matrices of one layer."""
    channels, width = config.n_embd, config.n_head * config.head_dim
    return {
        "qkv": (channels, width + 2 * config.n_kv_head * config.head_dim),
        "attention": (width, channels),
        "expand": (channels, config.mlp_width * (2 if config.mlp == "swiglu" else 1)),
        "mlp": (config.mlp_width, channels),
    }


def flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool) -> int:
    """Floating-point operations of one training token, forward and backward, by convention.

    6 N for the matrix products (N: all parameters except position embeddings and, if the head is not tied,
    token embeddings) plus 12 L H D T for attention.
    causal=False counts all T keys for each query (PaLM, arXiv:2204.02311, appendix B; nanoGPT);
    causal=True counts the half that a causal mask keeps. Other masks: model/flops.py.
    """
    matrices, channels = layer_matrices(config), config.n_embd
    biased = {"all": matrices, "qkv": ("qkv",), "none": ()}[config.bias]
    block = sum(rows * columns for rows, columns in matrices.values())
    block += sum(matrices[name][1] for name in biased)
    norm = channels * (2 if config.norm == "layer" else 1)
    block += 2 * norm + (2 * config.head_dim if config.qk_norm else 0)
    n_matmul = config.vocab_size * channels + config.n_layer * block + norm
    attention = 12 * config.n_layer * config.n_head * config.head_dim * seq_len
    return 6 * n_matmul + (attention // 2 if causal else attention)


def _check_positive(config: ModelConfig, name: str) -> None:
    size = getattr(config, name)
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise ValueError(f"model.{name} must be an integer, got {size!r}")
    if size < 1:
        raise ValueError(f"model.{name} must be at least 1, got {size}")
