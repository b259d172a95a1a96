"""The ledger of floating-point operations: what a training token costs, by each convention in use."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import block_masks
from kernels.bit_tiles import unpack
from kernels.block_mask import BlockMask
from model.attention import DENSE, AttentionConfig, layer_masks
from model.config import ModelConfig, flops_per_token, layer_matrices

# side of the tiles that causal kernels compute whole at the diagonal, about
TILE = 128
# products, D long, that each visible pair takes part in: q k and p v forward; dv, dp, dq, dk backward
USEFUL_PRODUCTS = 6
# backward products that run: flash attention recomputes the scores, plain PyTorch has stored them
BACKWARD_PRODUCTS = {"flash": 5, "sdpa": 5, "reference": 4}

# how many blocks of a mask are unpacked at a time, to count their pairs one by one
BLOCKS_AT_ONCE = 256
# a position past every key
NOWHERE = 2**40


def flops_ledger(
    model: ModelConfig,
    attention: AttentionConfig,
    seq_len: int,
    *,
    recompute: str = "none",
    lora_rank: int = 0,
    lora_head: bool = False,
    document_ids: Tensor | None = None,
) -> dict[str, float]:
    """FLOPs of one training token, forward and backward, by convention.

    palm: 6 N + 12 L H D T, every pair of tokens (PaLM, arXiv:2204.02311; nanoGPT). causal: half of the pairs
    (llm.c, Megatron-LM). mask: exactly the pairs that the layers' masks and documents leave. kept: palm, but
    of its pairs only the share that these leave of the causal ones. executed: the matrix products that run,
    including whole tiles, the padded vocabulary, recomputed scores and what recompute=full repeats.
    lora_rank: of adapters beside the layers' matrices, which are then frozen, as is the head unless
    lora_head; frozen matrices get no gradients, which leaves 4 N of 6 N.
    document_ids: (B, T) int32 on the CPU, of the sequences counted, a negative id is padding; None: each
    sequence is one document.
    """
    width = model.n_head * model.head_dim
    matrices = layer_matrices(model).values()
    layers = model.n_layer * sum(rows * columns for rows, columns in matrices)
    adapters = model.n_layer * lora_rank * sum(rows + columns for rows, columns in matrices)
    head = model.padded_vocab_size * model.n_embd
    visible, computed = _pairs_of_a_token(attention, model.n_layer, seq_len, document_ids)
    products = 2 + BACKWARD_PRODUCTS[attention.implementation]
    executed = 6 * (layers + head)
    if lora_rank:
        executed -= 2 * layers - 6 * adapters
        if not lora_head:
            # the first layer's input is frozen too: no gradient flows back past its first matrices
            rows, columns = layer_matrices(model)["qkv"]
            executed -= 2 * head + 2 * rows * (columns + lora_rank)
    if recompute == "full":
        products += 2
        # the layer's last product is not repeated; with adapters, that is the adapter's
        last = lora_rank * model.n_embd if lora_rank else model.mlp_width * model.n_embd
        executed += 2 * (layers + adapters - model.n_layer * last)
    plain, palm = (flops_per_token(model, length, causal=False) for length in (0, seq_len))
    causal = flops_per_token(model, seq_len, causal=True)
    if lora_rank:
        trained_head = model.vocab_size * model.n_embd if lora_head else 0
        fewer = plain / 3 - 2 * trained_head - 6 * adapters
        plain, palm, causal = plain - fewer, palm - fewer, causal - fewer
    return {
        "palm": palm,
        "causal": causal,
        "mask": plain + 2 * USEFUL_PRODUCTS * width * visible,
        "kept": plain + (palm - plain) * visible / (model.n_layer * (seq_len + 1) / 2),
        "executed": executed + 2 * products * width * computed,
    }


def _pairs_of_a_token(
    attention: AttentionConfig, n_layer: int, seq_len: int, document_ids: Tensor | None
) -> tuple[float, float]:
    """Pairs that a token sees, and those computed for it, in one head, summed over the layers."""
    # PyTorch's attention computes every pair under a mask that it is given
    masked = attention.implementation == "sdpa" and document_ids is not None
    whole = attention.implementation == "reference" or masked
    masks = [None] * n_layer
    if attention.sparse:
        masks = layer_masks(attention, n_layer, seq_len, torch.device("cpu"), warns=False)
    visible = computed = 0.0
    for mask in set(masks):
        count = masks.count(mask)
        visible += count * visible_pairs(seq_len, mask, document_ids) / seq_len
        pairs = seq_len**2 if whole else computed_pairs(seq_len, mask, document_ids)
        computed += count * pairs / seq_len
    return visible, computed


def window_pairs(seq_len: int, window: int | None) -> int:
    """Pairs of a query and a key it sees: its own and up to window - 1 before it; None: all before it."""
    window = seq_len if window is None else min(window, seq_len)
    return window * (window + 1) // 2 + (seq_len - window) * window


def visible_pairs(seq_len: int, mask: BlockMask | None, document_ids: Tensor | None = None) -> float:
    """Pairs of a query and a key it sees, in one sequence and head, averaged over both."""
    if document_ids is None:
        if mask is None:
            return seq_len * (seq_len + 1) / 2
        words = (mask.bits.long() & 0xFFFFFFFF).flatten().tolist()
        kept = torch.tensor([word.bit_count() for word in words], device="cpu")
        return int(kept.view(len(mask.bits), -1).sum(1)[mask.tiles.cpu()].sum()) / (
            mask.n_batch * mask.n_head
        )
    starts = _document_starts(document_ids)  # (B, T)
    if mask is None:
        seen = (torch.arange(1, seq_len + 1, device="cpu") - starts).clamp(min=0)
        return seen.sum().item() / len(document_ids)
    # a mask of the configuration serves all sequences
    _, row, column = mask.coordinates()
    lane = torch.arange(mask.block_size, device="cpu")
    starts = F.pad(starts, (0, mask.n_rows * mask.block_size - seq_len))
    total = 0
    for blocks in torch.arange(len(mask.keys), device="cpu").split(BLOCKS_AT_ONCE):
        seen = unpack(mask.bits[mask.tiles[blocks]])  # (n, block_size, block_size)
        query, key = row[blocks, None] * mask.block_size + lane, column[blocks, None] * mask.block_size + lane
        inside = key[:, None] >= starts[:, query][..., None]  # (B, n, block_size, block_size)
        total += (seen & inside).sum().item()
    return total / (mask.n_head * len(document_ids))


def computed_pairs(seq_len: int, mask: BlockMask | None, document_ids: Tensor | None = None) -> float:
    """The same, with each tile that may hold a visible pair counted whole: the mask's blocks, else TILE's.

    Of a mask's blocks those count that end behind the beginning of some query's document.
    """
    size = TILE if mask is None else mask.block_size
    n_rows = -(-seq_len // size)
    # the first tile that each row of tiles sees, (B, n_rows)
    first = torch.zeros(1, n_rows, dtype=torch.int64, device="cpu")
    if document_ids is not None:
        starts = F.pad(_document_starts(document_ids), (0, -seq_len % size), value=NOWHERE)
        first = starts.unflatten(1, (-1, size)).amin(2) // size
    if mask is None:
        tiles = (torch.arange(1, n_rows + 1, device="cpu") - first).clamp(min=0).sum()
    else:
        _, row, column = mask.coordinates()
        tiles = (column >= first[:, row]).sum() / (mask.n_batch * mask.n_head)
    return tiles.item() / len(first) * size**2


def attended_pairs(attention: AttentionConfig, n_layer: int, seq_len: int) -> float:
    """Pairs that cost a kernel time, in one sequence and head, summed over the layers.

    The visible pairs of a dense layer, the whole blocks of a pattern: docs/training_speed.md compares them.
    """
    return sum(
        _pattern_pairs(attention.patterns[layer % len(attention.patterns)], seq_len, attention.block_size)
        for layer in range(n_layer)
    )


@lru_cache
def _pattern_pairs(pattern: str, seq_len: int, block_size: int) -> float:
    if pattern == DENSE:
        return visible_pairs(seq_len, None)
    return computed_pairs(seq_len, block_masks.parse(pattern, seq_len, block_size=block_size))


def _document_starts(document_ids: Tensor) -> Tensor:
    """Where the document of each token begins, (B, T) int64; NOWHERE for padding, a negative id."""
    ids = document_ids.contiguous()
    return torch.searchsorted(ids, ids).masked_fill(ids < 0, NOWHERE)
