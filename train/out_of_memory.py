"""Out of memory: tells every process what fits instead, and ends the run without a hang."""

import os
from dataclasses import replace
from typing import NoReturn

import torch

from model.gpt import has_fused_gelu
from model.recompute import RECOMPUTE
from train.build import asks_for_graphs
from train.config import Config
from train.distributed import Processes
from train.memory import gathered_in_turn, lacks, largest_microbatch, microbatches, peak_bytes
from train.restarts import tell
from train.watchdog import VERDICT

# as for a refused configuration
EXIT_OUT_OF_MEMORY = 2


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch ran out of memory, on a GPU or on a CPU, whose error has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def end_out_of_memory(config: Config, processes: Processes) -> NoReturn:
    """Raises MemoryError with the way out; with several processes, ends this one and tells the others.

    The others may be waiting for this one in a collective, so an exception, which cleans up together with
    them, could hang. Their watchdogs end them, or torchrun, which notices first.
    """
    memory = None
    if processes.device.type == "cuda":
        memory = torch.cuda.get_device_properties(processes.device).total_memory
        # predicted as it ran
        config = replace(config, fused_gelu=config.fused_gelu and has_fused_gelu(processes.device))
    message = f"out of memory on rank {processes.rank}: {way_out(config, memory, processes.world_size)}"
    if processes.world_size == 1:
        raise MemoryError(message)
    processes.store.set(VERDICT, message)
    tell(f"error: {message}", is_ours=True, again=True)
    os._exit(EXIT_OUT_OF_MEMORY)


def way_out(config: Config, memory: int | None, world_size: int) -> str:
    """Which configurations fit where this one did not, as overrides. memory: the card's, in bytes."""
    now = config.tokens_per_microbatch
    given = f"tokens_per_microbatch={now} with recompute={config.recompute} does not fit"
    smaller = [tokens for tokens in microbatches(config, world_size) if tokens < now]
    found = []
    more = ""
    in_turn = gathered_in_turn(config, world_size)
    if memory is None or lacks(config):
        if in_turn:
            found.append("reshard_after_forward=true")
        # the largest that is at most half
        found += [f"tokens_per_microbatch={tokens}" for tokens in smaller if tokens <= now // 2][:1]
    else:
        tried = [("reshard_after_forward=true ", in_turn, now)] if in_turn else []
        for kind in RECOMPUTE[RECOMPUTE.index(config.recompute) :]:
            most = now - 1 if kind == config.recompute else now
            tried.append((f"recompute={kind} ", replace(config, recompute=kind), most))
        for change, candidate, most in tried:
            fitting = largest_microbatch(candidate, memory, world_size, most)
            if fitting:
                gib = peak_bytes(fitting, world_size) / 2**30
                tokens = f"tokens_per_microbatch={fitting.tokens_per_microbatch}"
                found.append(f"{change}{tokens} (predicted {gib:.1f} GiB)")
        more = "; python -m scripts.plan with the same arguments lists more"
    if not found:
        predicted = ", and by prediction nor does one sequence" if more else ""
        return (
            f"{given}{predicted}: use recompute=full, distributed=fsdp or "
            "context_parallel on more GPUs, or a shorter seq_len"
        )
    if memory is not None and asks_for_graphs(config, world_size):
        # from the third step on graphs keep their activations
        found.append("cuda_graphs=false if the first two steps fitted")
    return f"{given}. For the same steps in less memory use {', or '.join(found)}{more}"
