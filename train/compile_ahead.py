"""Compiles what a run calls before it calls it, so that the first step comes sooner.

A model is compiled while its text is prepared, which other processes do (data/background.py). Matrix products
with epilogues are compiled by quack-kernels, one after another when they are first called; a process of its
own calls them from the launch on.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import current_process
from multiprocessing.connection import Connection

import torch

from data.child import start_child
from data.prepare import is_new
from model import AttentionConfig
from model.gpt import lacks_products
from model.modes import evaluating
from train.build import build_step_model, build_weights, set_arithmetic
from train.config import Config
from train.context_parallel import join_context_groups
from train.distributed import Processes
from train.out_of_memory import is_out_of_memory
from train.passes import Passes
from train.restarts import is_first_here
from train.step import autocast_context
from train.throughput import reset_peak_memory

# of the model whose products are compiled: quack compiles the same for any number of rows and channels
ROWS, CHANNELS = 128, 64


def is_compiled_ahead(config: Config, processes: Processes) -> bool:
    """Whether there is text to prepare meanwhile, and what compile_ahead makes is what the run calls.

    Of several processes it is not: they exchange gradients in between. And a daemon may start no process.
    """
    alone = processes.world_size == 1 and not current_process().daemon
    return config.compile and alone and is_new(config.data)


def compile_ahead(config: Config, processes: Processes) -> None:
    """Runs one micro-batch of no text through a model of its own, of whatever weights, and drops both.

    PyTorch keeps whatever torch.compile has made, for all models that are alike. Nothing that the run
    computes depends on it; what does not fit into memory is for the first step to report.
    """
    print("compiling the model while the text is prepared: up to a minute on an H200", flush=True)
    try:
        _run_once(config, processes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    torch.cuda.empty_cache()
    reset_peak_memory(processes.device)


def _run_once(config: Config, processes: Processes) -> None:
    # before anything is compiled, since PyTorch compiles again where these have changed
    set_arithmetic(config)
    weights = build_weights(config, processes.device, empty=True)
    model = build_step_model(weights, config, processes, join_context_groups(processes, 1))
    autocast = partial(autocast_context, processes.device.type, config.precision)
    shape = config.microbatch, config.seq_len
    # two tensors: PyTorch compiles anew where these are no longer one
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=processes.device) for _ in range(2))
    with torch.no_grad(), evaluating(model), autocast():
        model(tokens, targets)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=False)
    passes = Passes(model, 1, autocast, scaler)
    passes.forward(tokens, targets)
    passes.backward()


@contextmanager
def products_compiled_beside(config: Config, device: torch.device) -> Iterator[None]:
    """Has a process compile the products with epilogues during the body, unless some were compiled before.

    quack-kernels keeps them on disk, and whoever needs one that is being compiled waits for it.
    """
    may_start = is_first_here() and not current_process().daemon
    if not (may_start and may_call_products(config) and lacks_products(device)):
        yield
        return
    process, pipe = start_child(compile_products, config, device, daemon=True)
    try:
        yield
    finally:
        process.kill()
        process.join()
        pipe.close()


def may_call_products(config: Config) -> bool:
    """Whether the run calls products with epilogues where the device has them."""
    return config.precision != "fp32" and (config.fused_gelu or config.fused_loss)


def compile_products(pipe: Connection | None, config: Config, device: torch.device) -> None:
    """Trains a small model of one layer for a step. Ends the process, and says nothing if it fails.

    The run would then fail alike, and say so.
    """
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        train_small(config, device)
    finally:
        os._exit(0)


def train_small(config: Config, device: torch.device) -> None:
    """Runs a layer and a head with the products that this configuration calls, forward and backward."""
    sizes = {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "n_embd": CHANNELS, "head_dim": CHANNELS}
    model = replace(config.model, **sizes, mlp_width=4 * CHANNELS)
    small = replace(config, model=model, attention=AttentionConfig(implementation="sdpa"))
    tokens = torch.zeros((1, min(ROWS, config.seq_len)), dtype=torch.int64, device=device)
    with autocast_context(device.type, config.precision):
        loss = build_weights(small, device)(tokens, tokens)
    loss.backward()
