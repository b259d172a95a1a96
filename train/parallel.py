"""One model on many processes: copies that average their gradients (DDP), shards of one (FSDP2), or both."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from train.distributed import Processes

# its successor is unknown to torch 2.11
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")

STRATEGIES = ("ddp", "fsdp")


def shard(
    weights: GPT,
    processes: Processes,
    shard_processes: int | None,
    *,
    compiled: bool,
    reshard_after_forward: bool,
) -> None:
    """Shards the weights over the processes, block by block; build the optimizer afterwards.

    reshard_after_forward: a block's weights are gathered for its forward pass and again for its backward
    pass; False: once per step, and kept until the last backward pass (ZeRO-2). shard_processes: this many
    neighbouring processes share one copy of the weights (hybrid sharding), which keeps the gathering of
    weights inside a node; None: all of them. It divides the processes (Config.check_processes). Sources:
    ZeRO, arXiv:1910.02054; hybrid, arXiv:2304.11277.
    """
    # this import takes a second: a refused command should not wait for it
    from torch.distributed.fsdp import fully_shard

    size = shard_processes or processes.world_size
    # without a mesh FSDP would take the GPU of a machine that has one, whatever device was asked for
    if size == processes.world_size:
        mesh = init_device_mesh(processes.device.type, (size,), mesh_dim_names=("shards",))
    else:
        copies = processes.world_size // size
        mesh = init_device_mesh(processes.device.type, (copies, size), mesh_dim_names=("copies", "shards"))
    for block in weights.blocks:
        if compiled:
            # one by one: the weights are gathered between the blocks, outside any compiled graph
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(weights, mesh=mesh)
    # read by set_gradient_sync
    weights.reshards = reshard_after_forward


def set_gradient_sync(model: nn.Module, is_last: bool) -> None:
    """Sets whether the next backward pass exchanges gradients: once per step, in its last micro-batch."""
    for module in model.modules():
        if is_sharded(module):
            # both calls also reach the blocks inside
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last or module.reshards)
            return
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = is_last
            return


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded the module, recognized by a method that only such modules have."""
    return hasattr(module, "set_requires_gradient_sync")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; every process must call it."""
    # only a DTensor has this method
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather(weights: GPT, build: Callable[[], GPT], *, is_main: bool) -> GPT | None:
    """The weights as one model that a single process can run, on rank 0; every process must call it.

    build: makes a model of the same kind, into which the sharded weights are gathered.
    """
    if not is_sharded(weights):
        return weights
    model = build() if is_main else None
    state = model.state_dict() if is_main else {}
    # one by one: all of them twice may not fit
    for name, value in weights.state_dict().items():
        tensor = whole(value)
        if is_main:
            state[name].copy_(tensor)
    return model
