"""GPT-2: pre-norm transformer blocks, learned positions, a head tied to the token embedding.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import AttentionConfig, LayerCache, SelfAttention

# the matrix products of the head run fastest when the vocabulary fills whole tiles
VOCAB_MULTIPLE = 128


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    n_layer: int
    n_head: int
    # channels of the residual stream, C
    n_embd: int
    # number of distinct tokens, as the tokenizer counts them; padded inside the model
    vocab_size: int
    # positions that have an embedding: the longest sequence
    max_seq_len: int
    # on embeddings, attention weights and both residual branches; 0 for pretraining on ample data
    dropout: float

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head}: "
                f"n_embd={self.n_embd // self.n_head * self.n_head or self.n_head} would be"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class MLP(nn.Module):
    """Two linear layers with GELU between, (B, T, C) -> (B, T, C), four times wider inside."""

    def __init__(self, n_embd: int, dropout: float):
        super().__init__()
        self.expand = nn.Linear(n_embd, 4 * n_embd)
        self.projection = nn.Linear(4 * n_embd, n_embd)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # GPT-2 was trained with the tanh form
        return self.residual_dropout(self.projection(F.gelu(self.expand(x), approximate="tanh")))


class Block(nn.Module):
    """One transformer layer: attention, then the MLP, each added to the residual stream (B, T, C)."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.n_embd)
        self.attention = SelfAttention(config.n_embd, config.n_head, config.dropout, attention.implementation)
        self.mlp_norm = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config.n_embd, config.dropout)

    def forward(
        self, x: Tensor, document_ids: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), document_ids, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A GPT-2 language model over B sequences of T tokens.

    Parameters are float32; lower precision is autocast's business (see train/loop.py).
    """

    def __init__(self, config: ModelConfig, attention: AttentionConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.n_embd)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.n_embd)
        padding_bias = torch.zeros(config.padded_vocab_size)
        padding_bias[config.vocab_size :] = float("-inf")
        self.register_buffer("padding_bias", padding_bias, persistent=False)
        self._initialize()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy in nats, (), if targets are given, else the logits, (B, T, V).

        tokens, targets: (B, T) int64; document_ids: (B, T) int32, non-decreasing, a token sees only its
        own document; positions: (B, T) or (T,) int64, 0 .. T-1 if not given.
        Raises ValueError if T exceeds max_seq_len.
        """
        hidden = self.hidden_states(tokens, document_ids, positions)
        if targets is None:
            return self._logits(hidden)
        # the padding takes no probability, at no cost: cutting it off as below would copy the logits
        logits = F.linear(hidden, self.token_embedding.weight, self.padding_bias)  # (B, T, padded V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def hidden_states(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        caches: list[LayerCache] | None = None,
    ) -> Tensor:
        """The residual stream after the final norm, (B, T, C): what the head reads."""
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"tokens: {tokens.shape[1]} positions, but model.max_seq_len={self.config.max_seq_len}"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for index, block in enumerate(self.blocks):
            x = block(x, document_ids, None if caches is None else caches[index])
        return self.final_norm(x)

    def next_token_logits(self, tokens: Tensor, positions: Tensor, caches: list[LayerCache]) -> Tensor:
        """The logits (B, V) after the last of these (B, T) tokens, extending one cache a layer."""
        return self._logits(self.hidden_states(tokens, None, positions, caches)[:, -1])

    def n_parameters(self) -> int:
        """Distinct parameters as published: the tied head once, without the vocabulary's padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    def _logits(self, hidden: Tensor) -> Tensor:
        # the rows that pad the vocabulary belong to no token
        return F.linear(hidden, self.token_embedding.weight)[..., : self.config.vocab_size]

    def _initialize(self) -> None:
        """GPT-2's initialization, but for the embeddings, which start at half its deviation.

        The head is tied to them: at GPT-2's 0.02 the first logits have a variance of up to 0.6 and lean
        towards repeating the last token, which puts the first loss 0.1 to 0.4 nats away from ln V.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)
        # 2 n_layer branches add up in the residual stream: keep its variance at depth
        for block in self.blocks:
            for branch in (block.attention, block.mlp):
                nn.init.normal_(branch.projection.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))


def flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool) -> int:
    """Floating-point operations of one training token, forward and backward, by convention.

    6 N for the matrix products (N: parameters but position embeddings) plus 12 L C T for attention.
    causal=False counts all T keys for each query (PaLM, arXiv:2204.02311, appendix B; nanoGPT);
    causal=True counts the half that a causal mask keeps.
    """
    channels = config.n_embd
    block = 12 * channels**2 + 13 * channels
    n_matmul = config.vocab_size * channels + config.n_layer * block + 2 * channels
    attention = 12 * config.n_layer * channels * seq_len
    return 6 * n_matmul + (attention // 2 if causal else attention)
