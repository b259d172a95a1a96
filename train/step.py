"""One training step: the gradients of its loss, and the update of the weights."""

from contextlib import nullcontext

import torch

from train.parallel import set_gradient_sync, whole
from train.passes import Passes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def forward_backward(passes: Passes, tokens, targets, processes) -> tuple[float, float]:
    """Accumulates a step's gradients; returns the step's loss on this rank and its mean over the ranks.

    tokens, targets: this rank's rows of the step, (passes.accumulation * microbatch, T) int64.
    """
    accumulation = passes.accumulation
    total = torch.zeros((), device=tokens.device)
    microbatches = list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True))
    for index, (inputs, labels) in enumerate(microbatches):
        is_last = index == accumulation - 1
        set_gradient_sync(passes.model, is_last)
        total += passes.forward(inputs, labels)
        if is_last:
            losses = torch.stack((total, processes.mean(total.clone())))
            losses = losses.to("cpu", non_blocking=True)
            losses_arrived = record_event(tokens.device)
        passes.backward()
        # a step of many micro-batches may take longer than the watchdog waits
        processes.mark()
    losses_arrived()
    own_loss, mean_loss = losses.tolist()
    return own_loss, mean_loss


def update(optimizer, scaler, rate: float, gradient_clip: float, norm_limit: float) -> torch.Tensor:
    """One optimizer step at this learning rate; returns the gradients' global norm before clipping, ().

    Weights and optimizer state change only if the norm is below norm_limit, which NaN never is.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    # for shards torch combines found_inf over the processes (found_inf_reduce_handler), so that either all of
    # them halve the scale or none does
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(parameters, gradient_clip or float("inf")))
    # the fused optimizers read this flag on the device: the host need not wait for the norm
    optimizer.found_inf = 1.0 - (grad_norm < norm_limit).float()
    optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def autocast_context(device_type: str, precision: str):
    """A context for matrix products in the run's precision; a null one for fp32 (TF32 products on a GPU)."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[precision])


def record_event(device: torch.device):
    """A function that waits until the work queued so far is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
