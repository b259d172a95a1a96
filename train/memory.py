"""Predicts how much memory a training step takes, and which micro-batch fits.

The prediction sums what is alive at the moments that can be a step's peak: the loss, the start and the end of
the backward pass, the update. Its terms follow from what a compiled model keeps; docs/training_speed.md
compares them with measurements.
"""

from dataclasses import replace

from model.config import ModelConfig, flops_per_token, layer_matrices
from model.gpt import LOGIT_ROWS
from train.config import Config

# share of a card's memory: the rest is the CUDA context, libraries' workspaces and fragmentation
USABLE = 0.94


def lacks(config: Config) -> list[str]:
    """The words that a run lacks whose memory is known: compiled, with our attention, all weights trained."""
    known = {
        "compile=true": config.compile,
        "attention.implementation=flash": config.attention.implementation == "flash",
        "lora.rank=0": config.lora.rank == 0,
    }
    return [word for word, is_given in known.items() if not is_given]


def peak_bytes(config: Config, world_size: int = 1, chunk: int = LOGIT_ROWS) -> int:
    """The peak of each process's allocated memory, in bytes; chunk: rows of logits that the fused loss holds.

    Raises ValueError for what is not predicted.
    """
    if lacking := lacks(config):
        raise ValueError(
            "memory is predicted of compiled runs with flash that train all weights: give "
            f"{' '.join(lacking)} too, to plan such a run"
        )
    model, n = config.model, config.tokens_per_microbatch
    small = 4 if config.precision == "fp32" else 2
    stream = small if config.low_precision_residual else 4
    channels, layers = model.n_embd, model.n_layer
    matrices = sum(rows * columns for rows, columns in layer_matrices(model).values())  # of one layer
    table = model.padded_vocab_size * channels
    n_weights = count_weights(model)

    shards = shard_count(config, world_size)
    is_sharded = shards > 1
    moments = 8 * n_weights - (4 * layers * matrices if config.optim.algorithm == "muon" else 0)
    persistent = (4 * n_weights + moments) / shards
    gradients = 4 * n_weights / shards
    accumulates = config.accumulation(world_size) > 1
    # under FSDP the gradients of all but the last micro-batch are unsharded; DDP's buckets stay
    held = 4 * n_weights if accumulates else 0
    if world_size > 1 and not is_sharded:
        held = gradients
    gathered = 4 * n_weights if is_sharded else 0
    if is_sharded and config.reshard_after_forward:
        # at a time, only two layers and what is outside the layers are gathered
        gathered -= 4 * max(0, layers - 2) * matrices

    kept_layer, casts = kept_bytes(config, small, stream), small * layers * matrices if small < 4 else 0
    backward = n * backward_bytes(config, small, stream)
    if config.recompute == "full":
        casts /= layers
    activations = n * layers * kept_layer + casts
    # the last layer's output; what the head reads, its gradient, and one more of that size
    ends = n * channels * (stream + 3 * small)
    if config.fused_loss:
        head = min(n, chunk) * model.padded_vocab_size * small + 4 * table * (2 if n > chunk else 1)
    else:
        head = n * model.padded_vocab_size * small
    head += small * table
    return int(
        persistent
        + gathered
        + max(
            held + activations + ends + head,
            held + activations + 4 * table + backward,
            max(held, gradients) + backward + casts / layers,
            gradients,
        )
    )


def kept_bytes(config: Config, small: int, stream: int) -> float:
    """Bytes that one layer keeps per token for its backward pass.

    small, stream: bytes of a value in the run's precision, and in the residual stream.
    """
    model = config.model
    channels, width = model.n_embd, model.n_head * model.head_dim
    if config.recompute == "full":
        return stream * channels
    qkv, expanded = (layer_matrices(model)[name][1] for name in ("qkv", "expand"))
    # products, attention's output and lse, and the input
    products = small * (qkv + width + expanded) + 4 * model.n_head + stream * channels
    if config.recompute == "selective":
        # the output of the projection after attention, from which the stream is recomputed
        return products + small * channels
    # over several processes attention keeps copies in place of the product, rotated or not
    is_rotated = model.rotary is not None and config.context_parallel == 1
    rotated = small * (width + model.n_kv_head * model.head_dim) if is_rotated else 0
    statistics = 16 if model.norm == "layer" else 8
    # inside of the products, what a gate lets through is computed again
    hidden = 0 if model.mlp == "swiglu" and fuses_activation(config) else model.mlp_width
    # the stream between attention and MLP, both norms' outputs, the activation's output
    return products + stream * channels + small * (2 * channels + hidden) + statistics + rotated


def fuses_activation(config: Config) -> bool:
    """Whether the MLP's activation runs inside of its products, on a GPU that has these (model/gpt.py)."""
    asked = config.fused_gelu and config.recompute == "none" and config.precision != "fp32"
    return asked and config.model.has_fusible_activation


def backward_bytes(config: Config, small: int, stream: int) -> float:
    """Bytes per token that a layer's backward pass takes beside what all layers keep.

    small, stream: as in kept_bytes.
    """
    model = config.model
    activation = small * model.mlp_width
    # of both sides of the MLP's activation, and of the stream
    gradients = 2 * activation + 3 * small * model.n_embd
    everything = kept_bytes(replace(config, recompute="none", fused_gelu=False), small, stream)
    recomputed = everything - kept_bytes(config, small, stream)
    if config.context_parallel == 1:
        return gradients + recomputed
    # what is behind the exchange of keys is a graph of its own. It needs one of the activation's gradients at
    # a time, and of what selective recomputation makes again only the activation
    if config.recompute == "selective":
        recomputed = activation
    return gradients - activation + recomputed


def count_weights(model: ModelConfig) -> int:
    """The number of parameters, with the padding of the vocabulary, without building the model."""
    in_products = flops_per_token(model, 0, causal=False) // 6
    tables = model.padded_vocab_size * (1 if model.tied_head else 2) - model.vocab_size
    positions = 0 if model.rotary is not None else model.max_seq_len
    return in_products + (tables + positions) * model.n_embd


def shard_count(config: Config, world_size: int) -> int:
    """The number of shards in which the processes hold weights, gradients and optimizer state."""
    return (config.shard_processes or world_size) if config.distributed == "fsdp" and world_size > 1 else 1


def microbatches(config: Config, world_size: int = 1) -> list[int]:
    """Every tokens_per_microbatch that divides the step of each process, the largest first."""
    sequence, tokens = config.seq_len // config.context_parallel, config.tokens_per_step // world_size
    counts = range(tokens // sequence, 0, -1)
    return [count * sequence for count in counts if tokens % (count * sequence) == 0]


def gathered_in_turn(config: Config, world_size: int) -> Config | None:
    """The configuration with weights gathered block by block, if that takes less memory; else None."""
    if config.reshard_after_forward or world_size == 1:
        return None
    return replace(config, reshard_after_forward=True)


def largest_microbatch(
    config: Config, memory: int, world_size: int = 1, at_most: int | None = None
) -> Config | None:
    """The configuration with the largest tokens_per_microbatch that fits into a card's memory.

    memory: in bytes. at_most: the largest tokens_per_microbatch to try. None if not even one sequence fits.
    """
    for tokens in microbatches(config, world_size):
        candidate = replace(config, tokens_per_microbatch=tokens)
        if (at_most is None or tokens <= at_most) and peak_bytes(candidate, world_size) <= USABLE * memory:
            return candidate
    return None
