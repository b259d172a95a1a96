"""Training steps of GPT-2 with different attentions, and of the models that the paper compares with.

All share the loop's own step (train/step.py), its optimizer and precision; only the model differs. Here a
model is anything that takes tokens and targets, both (B, T) int64, and returns the mean cross-entropy, ().
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from model import GPT
from scripts.paper import baselines
from scripts.paper.memory import free_memory
from scripts.peers import Transformers
from train.config import Config, parse
from train.distributed import join_processes
from train.optim import build_optimizer
from train.overrides import compose_conf
from train.passes import Passes
from train.step import autocast_context, forward_backward, update
from train.throughput import between, mark, peak_memory_bytes


class OtherAttention(nn.Module):
    """An attention layer of our GPT with another function in place of its attention.

    attention: takes q, k, v (B, T, H, D) and dropout_p, returns (B, T, H, D).
    """

    def __init__(self, layer: nn.Module, attention: Callable):
        super().__init__()
        self.layer, self.attention = layer, attention

    def forward(self, x: Tensor, *others, **options) -> Tensor:
        # documents, caches and the like are not part of the paper's experiments
        assert all(value is None for value in (*others, *options.values()))
        layer = self.layer
        qkv = layer.qkv(x).unflatten(-1, (-1, layer.head_dim))
        q, k, v = qkv.split(layer.n_heads, dim=2)  # (B, T, H, D) each
        out = self.attention(q, k, v, dropout_p=layer.dropout if self.training else 0.0)
        return layer.residual_dropout(layer.projection(out.flatten(2)))


def configure(*overrides: str) -> Config:
    """The configuration that `python -m train` makes of these overrides, fitted to this machine."""
    machine = [] if torch.cuda.is_available() else ["device=cpu", "fused_loss=false"]
    return parse(compose_conf([*machine, *overrides]))


def our_gpt(config: Config) -> GPT:
    return GPT(
        config.model,
        config.attention,
        fused_loss=config.fused_loss,
        low_precision_residual=config.low_precision_residual,
        recompute=config.recompute,
    )


def gpt_with(attention: Callable, config: Config) -> GPT:
    """Our GPT with another function in place of its attention, see OtherAttention."""
    model = our_gpt(config)
    for block in model.blocks:
        block.attention = OtherAttention(block.attention, attention)
    return model


def hugging_face(config: Config, attention: str) -> nn.Module:
    """attention: eager, sdpa, nanoflash, or 2022 for the operations that transformers had then."""
    if attention == "nanoflash":
        from kernels.hugging_face import register

        register()
    if attention == "2022":
        register_2022()
    return Transformers(config.model, attention)


def register_2022() -> None:
    """Makes "2022" an attention implementation of transformers."""
    from transformers import AttentionInterface

    def attention(module, query, key, value, attention_mask, dropout=0.0, **kwargs):
        out = baselines.hugging_face_2022(*(x.transpose(1, 2) for x in (query, key, value)), dropout)
        return out, None

    AttentionInterface.register("2022", attention)


def megatron_gpt(config: Config) -> nn.Module:
    """Our GPT with Megatron's attention, and its MLPs compiled: Megatron fuses their element-wise operations.

    The residual stream is float32 and the loss PyTorch's, as they were in 2022.
    """
    config = replace(config, fused_loss=False, low_precision_residual=False)
    model = gpt_with(partial(baselines.megatron, causal=True), config)
    if config.compile:
        for block in model.blocks:
            block.mlp.compile()
    return model


def compiled_gpt(config: Config) -> nn.Module:
    model = our_gpt(config)
    if config.compile:
        model.compile()
    return model


# name -> how to build it and, for our own model, which attention
MODELS = {
    "Hugging Face, attention of 2022": (partial(hugging_face, attention="2022"), "reference"),
    "Hugging Face eager": (partial(hugging_face, attention="eager"), "reference"),
    "Hugging Face SDPA": (partial(hugging_face, attention="sdpa"), "reference"),
    "Hugging Face, our attention": (partial(hugging_face, attention="nanoflash"), "reference"),
    "Megatron-like": (megatron_gpt, "reference"),
    "ours, eager attention": (partial(gpt_with, baselines.hugging_face_2022), "reference"),
    "ours, compiled, SDPA": (compiled_gpt, "sdpa"),
    "ours, not compiled": (our_gpt, "flash"),
    "ours": (compiled_gpt, "flash"),
}


def time_training(name: str, config: Config, warmup_steps: int, steps: int) -> dict:
    """Tokens per second, the median milliseconds of a step, and peak memory, on random tokens."""
    build, attention = MODELS[name]
    config.attention.implementation = attention
    with join_processes(config.device) as processes:
        device = processes.device
        on_gpu = device.type == "cuda"
        free_memory()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        sequences = config.tokens_per_step // config.seq_len
        text = torch.randint(config.model.vocab_size, (sequences, config.seq_len + 1), device=device)
        model = build(config).to(device)
        optimizer = build_optimizer(model, config.optim)
        scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        autocast = partial(autocast_context, device.type, config.precision)
        passes = Passes(model, config.accumulation(1), autocast, scaler)

        def step() -> float:
            _, loss = forward_backward(passes, text[:, :-1], text[:, 1:], processes)
            update(optimizer, scaler, config.optim.learning_rate, config.optim.gradient_clip, float("inf"))
            return loss

        for _ in range(warmup_steps):
            step()
        marks = [mark(on_gpu)]
        for _ in range(steps):
            loss = step()
            marks.append(mark(on_gpu))
        row = {"model": name, "final_loss": loss, "step_ms": None, "tokens_per_second": None}
        if on_gpu:
            row["step_ms"] = 1000 * median(between(start, end) for start, end in pairwise(marks))
            row["tokens_per_second"] = config.tokens_per_step / row["step_ms"] * 1000
            row["peak_memory_bytes"] = peak_memory_bytes(device)[0]
        return row
