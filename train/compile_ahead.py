"""Compiles what the first evaluation and the first step run, before there is text."""

import gc
from functools import partial

import torch

from data.prepare import is_new
from model.modes import evaluating
from train.build import build_step_model, build_weights, set_arithmetic
from train.config import Config
from train.context_parallel import join_context_groups
from train.distributed import Processes
from train.out_of_memory import is_out_of_memory
from train.passes import Passes
from train.step import autocast_context
from train.throughput import reset_peak_memory


def is_compiled_ahead(config: Config, processes: Processes) -> bool:
    """Whether there is text to prepare meanwhile, and what compile_ahead makes is what the run calls.

    Of several processes it is not: they exchange gradients in between.
    """
    return config.compile and processes.world_size == 1 and is_new(config.data)


def compile_ahead(config: Config, processes: Processes) -> None:
    """Runs one micro-batch of no text through a model of its own, with random weights, and drops both.

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
    weights = build_weights(config, processes.device)
    model = build_step_model(weights, config, processes, join_context_groups(processes, 1))
    autocast = partial(autocast_context, processes.device.type, config.precision)
    nothing = torch.zeros((config.microbatch, config.seq_len), dtype=torch.int64, device=processes.device)
    with torch.no_grad(), evaluating(model), autocast():
        model(nothing, nothing)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=False)
    passes = Passes(model, 1, autocast, scaler)
    passes.forward(nothing, nothing)
    passes.backward()
