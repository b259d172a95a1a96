"""GPT: pre-norm transformer blocks between a token embedding and a head.

With the defaults of ModelConfig it is GPT-2 (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019); other values make it Llama (arXiv:2407.21783) or Qwen (arXiv:2505.09388).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import epilogue_library, gelu_mlp, swiglu_mlp
from kernels.block_mask import BlockMask
from kernels.cross_entropy import CHUNK, linear_cross_entropy
from model.attention import AttentionConfig, SelfAttention, layer_masks
from model.cache import LayerCache
from model.compiled import compiled
from model.config import ModelConfig
from model.recompute import RECOMPUTE, recomputed
from model.ring import Ring
from model.rope import rotation

# rows of logits that the fused loss holds at a time
LOGIT_ROWS = CHUNK


class MLP(nn.Module):
    """Two linear layers with GELU between, or gated by SiLU, added to the residual stream (B, T, C).

    fused_gelu: in 16-bit training, GELU or the gate, its gradient and the sum run in the epilogues of the
    products beside them.
    """

    def __init__(self, config: ModelConfig, fused_gelu: bool = False):
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        self.fused_gelu = fused_gelu and config.has_fusible_activation
        bias = config.bias == "all"
        self.expand = nn.Linear(config.n_embd, config.mlp_width * (2 if self.is_gated else 1), bias)
        self.projection = nn.Linear(config.mlp_width, config.n_embd, bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + MLP(x); x is the norm of the residual stream."""
        if self._fuses(x):
            return self._fused(x, residual)
        x = self.expand(x)
        if self.is_gated:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = gelu(x)
        return residual + self.residual_dropout(self.projection(x))

    def _fuses(self, x: Tensor) -> bool:
        # without gradients nobody needs the activation's input
        if not (self.fused_gelu and x.is_cuda and torch.is_grad_enabled()):
            return False
        # with adapters, more than a plain product stands beside GELU
        is_plain = all(type(layer) is nn.Linear for layer in (self.expand, self.projection))
        return is_plain and gelu_mlp.fuses(compute_dtype(x), *self.projection.weight.shape)

    def _fused(self, x: Tensor, residual: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        if self.is_gated:
            mlp, parameters = swiglu_mlp.swiglu_mlp, (self.expand.weight, self.projection.weight)
        else:
            mlp = gelu_mlp.gelu_mlp
            parameters = self.expand.weight, self.expand.bias, self.projection.weight, self.projection.bias
        parameters = [None if p is None else p.to(dtype) for p in parameters]
        dropout = self.residual_dropout
        drops = type(dropout) is not nn.Dropout or (dropout.training and dropout.p > 0.0)
        # a stream in float32 would be rounded inside of the product
        if drops or residual.dtype != dtype:
            return residual + dropout(mlp(x.to(dtype), *parameters))
        return mlp(x.to(dtype), *parameters, residual)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form that GPT-2 was trained with, of any shape, in x's dtype.

    When compiled, it is x sigmoid(2u) in place of x (1 + tanh(u)) / 2, which is the same: the compiler
    computes a sigmoid with two instructions, but calls a function for tanh, which takes longer than memory.
    """
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    twice_u = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(twice_u)).to(x.dtype)


def has_fused_gelu(device: torch.device) -> bool:
    """Whether this device has products with GELU or a gate inside.

    Raises ValueError if only the library is missing.
    """
    if not epilogue_library.serves(device):
        return False
    if not epilogue_library.is_installed():
        raise ValueError(
            f"fused_gelu=true needs quack-kernels here: {epilogue_library.INSTALL}, or use fused_gelu=false"
        )
    return True


def lacks_products(device: torch.device) -> bool:
    """Whether this device has products with epilogues of ours, none of which was compiled so far."""
    there = epilogue_library.serves(device) and epilogue_library.is_installed()
    return there and epilogue_library.has_none_compiled()


class Block(nn.Module):
    """One transformer layer: attention, then the MLP, each added to the residual stream (B, T, C)."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, recompute: str, fused_gelu: bool):
        super().__init__()
        self.recompute = recompute
        self.attention_norm = build_norm(config)
        self.attention = SelfAttention(config, attention.implementation)
        self.mlp_norm = build_norm(config)
        # with recomputation, the products would be repeated too
        self.mlp = MLP(config, fused_gelu and recompute == "none")

    def forward(self, x: Tensor, *, ring: Ring | None = None, **attention_inputs) -> Tensor:
        """The stream behind this layer. ring: processes share the sequences, and x is this one's part."""
        if ring is None:
            return recomputed(self._layer, self.recompute)(x, **attention_inputs)
        inputs = x, ring, attention_inputs["rotation"], attention_inputs["block_mask"]
        if self.recompute == "full":
            # a compiler gives up what repeats an exchange of processes, so it is given the parts around it
            repeats = torch.compiler.is_compiling() and torch.is_grad_enabled()
            part = compiled if repeats else partial(recomputed, kind="none")
            return recomputed(self._layer_of_ring, "full")(*inputs, part)
        return self._layer_of_ring(*inputs, partial(recomputed, kind=self.recompute))

    def product(self, x: Tensor) -> Tensor:
        """Queries, keys and values, (B, T, (H + 2 Hkv) D), of the stream in front of this layer."""
        return recomputed(self._product, self.recompute)(x)

    def behind(self, x: Tensor, product: Tensor, **attention_inputs) -> Tensor:
        """The stream behind this layer, of the one in front of it and of its product."""
        return recomputed(self._behind, self.recompute)(x, product, **attention_inputs)

    def to_next(
        self, following: "Block", x: Tensor, product: Tensor, **attention_inputs
    ) -> tuple[Tensor, Tensor]:
        """The stream behind this layer, and the following layer's product."""
        x = self.behind(x, product, **attention_inputs)
        return x, following.product(x)

    def _product(self, x: Tensor) -> Tensor:
        return self.attention.qkv(self.attention_norm(x))

    def _behind(self, x: Tensor, product: Tensor, **attention_inputs) -> Tensor:
        return self._add_heads(x, self.attention.attend(product, **attention_inputs))

    def _layer(self, x: Tensor, **attention_inputs) -> Tensor:
        return self._add(x, self.attention(self.attention_norm(x), **attention_inputs))

    def _layer_of_ring(self, x: Tensor, ring: Ring, rotation, block_mask, part: Callable) -> Tensor:
        parts = part(self._queries_keys_values)(x, rotation)
        return part(self._add_heads)(x, self.attention.attend_over_ring(*parts, ring, block_mask))

    def _queries_keys_values(self, x: Tensor, rotation) -> tuple[Tensor, ...]:
        return self.attention.queries_keys_values(self.attention_norm(x), rotation)

    def _add_heads(self, x: Tensor, out: Tensor) -> Tensor:
        return self._add(x, self.attention.project(out))

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return self.mlp(self.mlp_norm(x), x)


def build_norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.n_embd, eps=config.norm_eps)


class GPT(nn.Module):
    """A language model over B sequences of T tokens.

    Parameters are float32; lower precision is left to autocast (see train/step.py).
    fused_loss: the loss comes from kernels/cross_entropy.py, on a GPU, and never holds all logits in memory.
    fused_gelu: GELU, or a gate without biases, runs inside the matrix products beside it, on a GPU that
    has_fused_gelu, if `recompute` is none.
    low_precision_residual: under autocast the residual stream between blocks, and its gradient, have
    autocast's dtype, which halves what every norm and every sum reads and writes; else they are float32.
    recompute: what the backward pass computes again of each block instead of keeping it: none, selective
    (all but matrix products and attention) or full.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionConfig,
        *,
        fused_loss: bool = False,
        fused_gelu: bool = False,
        low_precision_residual: bool = False,
        recompute: str = "none",
    ):
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        self.config, self.attention = config, attention
        self.fused_loss, self.recompute = fused_loss, recompute
        self.low_precision_residual = low_precision_residual
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.rotary is None:
            self.position_embedding = nn.Embedding(config.max_seq_len, config.n_embd)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, attention, recompute, fused_gelu) for _ in range(config.n_layer)
        )
        self.final_norm = build_norm(config)
        if not config.tied_head:
            self.head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.register_buffer("padding_bias", torch.empty(config.padded_vocab_size), persistent=False)
        fill_padding_bias(self)
        # a buffer that is not saved has no value in a model that was built on the meta device
        self.register_load_state_dict_post_hook(fill_padding_bias)
        self._initialize()

    @classmethod
    def empty(cls, *arguments, **options) -> "GPT":
        """A model on the CPU whose weights are yet to be loaded: to draw them takes 12 s for 1558M.

        They are float32 whatever PyTorch's default dtype.
        """
        with torch.device("meta"):
            model = cls(*arguments, **options)
        model.float().to_empty(device="cpu")
        fill_padding_bias(model)
        return model

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        ring: Ring | None = None,
    ) -> Tensor:
        """The mean cross-entropy in nats, (), if targets are given, else the logits, (B, T, V).

        tokens, targets: (B, T) int64; document_ids: (B, T) int32, non-decreasing, a token sees only its
        own document; positions: (B, T) or (T,) int64, 0 .. T-1 if not given. ring: several processes share
        the sequences, tokens are those of this process, positions must be given, and the documents are the
        ring's. Raises ValueError if the sequences exceed max_seq_len, and for what does not go with a ring.
        """
        hidden = self.hidden_states(tokens, document_ids, positions, ring=ring)
        return self.logits(hidden) if targets is None else self.loss(hidden, targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats, (), of hidden states (B, T, C); targets: (B, T) int64."""
        if self.fused_loss:
            rows = hidden.to(compute_dtype(hidden)).flatten(0, 1)  # (B T, C)
            return linear_cross_entropy(rows, self.head_weight, targets.flatten(), self.config.vocab_size)
        # the bias gives the padding no probability, at no cost: slicing as in `logits` would copy the logits
        logits = F.linear(hidden, self.head_weight, self.padding_bias)  # (B, T, padded V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def hidden_states(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        caches: list[LayerCache] | None = None,
        ring: Ring | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The residual stream after the final norm, (B, T, C): what the head reads.

        caches: one per layer, extended by the tokens: by whole prompts while empty, then by one token (B, 1)
        at a time, which sees all of them: there are no documents behind prompts. turn: rope.rotation at the
        positions, if known. The other arguments are those of forward.
        """
        # the caches know what one new token sees
        sees_all = caches is not None and tokens.shape[1] == 1
        if sees_all and document_ids is not None:
            raise ValueError("document_ids: a token behind cached ones sees all of them, give it none")
        if ring is not None:
            self._check_length(ring.seq_len)
            if positions is None or document_ids is not None:
                raise ValueError(
                    "with a ring, positions must be given and document_ids not: ring.split(positions) gives "
                    "this process's, and ring.with_documents(document_ids) takes those of whole sequences"
                )
        x, turn = self.embed(tokens, positions, turn)
        masks = [None] * len(self.blocks) if sees_all else self.masks(tokens, ring)
        for index, block in enumerate(self.blocks):
            cache = None if caches is None else caches[index]
            inputs = {"document_ids": document_ids, "cache": cache, "block_mask": masks[index]}
            x = block(x, **inputs, rotation=turn, ring=ring)
        return self.final_norm(x)

    def embed(
        self, tokens: Tensor, positions: Tensor | None = None, turn: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The stream in front of the first layer, and the turn of all layers' queries and keys, if any."""
        self._check_length(tokens.shape[1])
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens)
        if self.config.rotary is None:
            x = x + self.position_embedding(positions)
        elif turn is None:
            turn = rotation(self.config.rotary, self.config.head_dim, positions)
        x = self.embedding_dropout(x)
        if self.low_precision_residual:
            x = x.to(compute_dtype(x))
        return x, turn

    def to_first(self, tokens: Tensor, positions: Tensor | None) -> tuple:
        """What `embed` returns, and the first layer's product."""
        x, turn = self.embed(tokens, positions)
        return x, turn, self.blocks[0].product(x)

    def from_last(self, x: Tensor, product: Tensor, targets: Tensor, **attention_inputs) -> Tensor:
        """The loss, of the stream in front of the last layer and of that layer's product."""
        return self.end(self.blocks[-1].behind(x, product, **attention_inputs), targets)

    def end(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, of the stream behind the last layer."""
        return self.loss(self.final_norm(x), targets)

    def masks(self, tokens: Tensor, ring: Ring | None = None) -> list[BlockMask | None]:
        """The block mask of every layer, None where it is dense."""
        if not self.attention.sparse:
            return [None] * len(self.blocks)
        seq_len = tokens.shape[1] if ring is None else ring.seq_len
        return layer_masks(self.attention, len(self.blocks), seq_len, tokens.device)

    def _check_length(self, seq_len: int) -> None:
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"tokens: {seq_len} positions, but model.max_seq_len={self.config.max_seq_len}: use shorter "
                "sequences"
            )

    def n_parameters(self) -> int:
        """Distinct parameters as published: a tied head once, without the vocabulary's padding."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        n_tables = 1 if self.config.tied_head else 2
        return sum(p.numel() for p in self.parameters()) - n_tables * padding

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (padded V, C)."""
        return self.token_embedding.weight if self.config.tied_head else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (..., V) of hidden states (..., C)."""
        # the rows that pad the vocabulary belong to no token
        return F.linear(hidden, self.head_weight)[..., : self.config.vocab_size]

    def _initialize(self) -> None:
        """GPT-2's initialization, but embeddings start at half its standard deviation.

        The head is tied to them: at GPT-2's 0.02 the first logits have a variance of up to 0.6 and lean
        towards repeating the last token, which puts the first loss 0.1 to 0.4 nats away from ln V.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)
        if not self.config.tied_head:
            nn.init.normal_(self.head.weight, std=0.01)
        # 2 n_layer branches add up in the residual stream: keep its variance at depth
        for block in self.blocks:
            for branch in (block.attention, block.mlp):
                nn.init.normal_(branch.projection.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))


def fill_padding_bias(model: GPT, *_) -> None:
    """Sets the bias of the logits, (padded V,): 0 for tokens, minus infinity for the padding."""
    bias = torch.zeros_like(model.padding_bias, device=model.head_weight.device)
    bias[model.config.vocab_size :] = float("-inf")
    model.padding_bias = bias


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product of x runs in: autocast's where it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
