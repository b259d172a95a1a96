"""Builds what the training loop runs: the text as batches, and the model in the form this launch needs."""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data.loader import TokenLoader
from data.tokenizer import load_tokenizer
from model import GPT
from model.compiled import CompiledModel
from model.gpt import has_fused_gelu
from train.config import Config
from train.context_parallel import ContextGroups, SharedSequences
from train.distributed import Processes
from train.documents import SeparateDocuments
from train.lora import add_adapters
from train.parallel import is_sharded
from train.passes import GraphedPasses, Passes, on_capture_stream, supports_graphs
from train.skipped_positions import SkippedPositions
from train.weights import load_start


def open_text(
    config: Config, text: Path, rank: int = 0, world_size: int = 1
) -> tuple[TokenLoader, TokenLoader, int]:
    """The loaders of training and validation text, and how many validation sequences an evaluation reads.

    rank, world_size: among the ranks that read different sequences. Raises ValueError for too little text.
    """
    load = partial(
        TokenLoader,
        text,
        seq_len=config.seq_len,
        tokenizer=config.data.tokenizer,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )
    train_data = load(split="train", sequences_per_step=config.tokens_per_step // config.seq_len)
    sequences_at_once = config.microbatch * world_size
    val_data = load(split="val", sequences_per_step=sequences_at_once, shuffle=False)
    wanted = max(1, config.evaluation.tokens // config.seq_len)
    return train_data, val_data, min(wanted, val_data.sequences_per_epoch)


def set_arithmetic(config: Config) -> None:
    """Sets PyTorch's process-wide switches, and the seed: the same initial weights on every rank."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    # attention reads this switch too (model/attention.py)
    torch.use_deterministic_algorithms(config.deterministic)
    # a debugging aid that would fill every new tensor with NaN
    torch.utils.deterministic.fill_uninitialized_memory = False
    if config.deterministic:
        # cuBLAS repeats its sums bit for bit only with a workspace set like this
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def build_weights(
    config: Config, device: torch.device, start: str | None = None, *, empty: bool = False
) -> GPT:
    """A model with random weights from PyTorch's generator, or those of start, and with its adapters.

    empty: without values, which are loaded afterwards.
    """
    build = GPT if start is None and not empty else GPT.empty
    weights = build(
        config.model,
        config.attention,
        fused_loss=config.fused_loss,
        fused_gelu=config.fused_gelu and has_fused_gelu(device),
        low_precision_residual=config.low_precision_residual,
        recompute=config.recompute,
    )
    if start is not None:
        load_start(weights, replace(config.start, weights=start))
    if config.lora.rank:
        add_adapters(weights, config.lora)
    return weights.to(device)


def build_step_model(weights: GPT, config: Config, processes: Processes, context: ContextGroups) -> nn.Module:
    """The module that maps this rank's tokens, targets (B, T) to the loss: compiled, averaging gradients.

    Of sharded weights the blocks are compiled already (train.parallel.shard), and FSDP exchanges gradients.
    """
    shares_weights = is_sharded(weights)
    model = weights
    if config.compile and not shares_weights:
        model = CompiledModel(weights, whole=is_compiled_whole(config, processes.world_size))
    if context.group is not None:
        model = SharedSequences(model, context.group)
    if config.pose_seq_len is not None:
        model = SkippedPositions(model, config.pose_seq_len)
    if config.separate_documents:
        model = SeparateDocuments(model, load_tokenizer(config.data.tokenizer).end_of_text)
    if processes.world_size > 1 and not shares_weights:
        # a compiled graph split at DDP's buckets exchanges gradients during the backward pass, but every
        # micro-batch pays for the splits, and only the last one exchanges gradients
        torch._dynamo.config.optimize_ddp = config.accumulation(processes.world_size) == 1
        with on_capture_stream() if has_graphs(config, processes) else nullcontext():
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    return model


def is_compiled_whole(config: Config, world_size: int) -> bool:
    """Whether training is compiled as one graph: where no CUDA graphs replay all of its passes.

    Python calls the parts one by one, and small micro-batches would wait for it (docs/training_speed.md).
    """
    return world_size > 1 or not asks_for_graphs(config, world_size)


def build_passes(model: nn.Module, config: Config, processes: Processes, autocast, scaler) -> Passes:
    """What runs the model on a micro-batch, with CUDA graphs where has_graphs allows them."""
    given = model, config.accumulation(processes.world_size), autocast, scaler
    return GraphedPasses(*given, rank=processes.rank) if has_graphs(config, processes) else Passes(*given)


def has_graphs(config: Config, processes: Processes) -> bool:
    """Whether micro-batches are replayed as CUDA graphs."""
    return supports_graphs(processes.device) and asks_for_graphs(config, processes.world_size)


def asks_for_graphs(config: Config, world_size: int) -> bool:
    """Whether GPUs replay micro-batches as CUDA graphs: those in which processes exchange nothing."""
    # a profile names operators and their allocations, which a graph hides
    if not config.cuda_graphs or config.profile:
        return False
    # recomputed layers set the generator back to where the forward pass began, which a graph of a backward
    # pass alone does not do; and the reference reads its seed on the host
    draws_again = config.recompute != "none" or config.attention.implementation == "reference"
    if config.model.dropout > 0.0 and draws_again:
        return False
    if world_size == 1:
        return True
    shares = config.distributed == "fsdp" or config.context_parallel > 1
    return not shares and config.accumulation(world_size) > 1
