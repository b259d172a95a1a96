"""Sequences too long for one GPU: the ranks of a group share each of them (model/ring_attention.py).

The world is a grid of data and context: neighbouring ranks form a context group and read the same sequences;
different groups read different ones. Each rank runs its part of every sequence through the whole model; only
keys, values and their gradients are exchanged, inside attention. All parts are equally long, so the loss is
the mean of all ranks' losses, and the gradient that of their gradients, which data parallelism takes anyway.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from model.ring import Ring
from train.distributed import Processes


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """This process's place: it reads part data_rank of data_size, with the ranks of its group."""

    data_rank: int
    data_size: int
    # None if each process has whole sequences
    group: dist.ProcessGroup | None


def join_context_groups(processes: Processes, size: int) -> ContextGroups:
    """Forms groups of `size` neighbouring ranks; size divides the processes (Config.check_processes)."""
    data_rank, data_size = processes.rank // size, processes.world_size // size
    if size == 1:
        return ContextGroups(data_rank, data_size, None)
    names = ("data", "context")
    mesh = init_device_mesh(processes.device.type, (data_size, size), mesh_dim_names=names)
    group = mesh["context"].get_group()
    # NCCL needs every rank of a group in its first call, in which a rank may have nothing to send
    dist.barrier(group)
    return ContextGroups(data_rank, data_size, group)


class SharedSequences(nn.Module):
    """A GPT that takes whole sequences, runs this rank's part of them, and returns that part's loss."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.model = model
        self.group = group
        self.rings: dict[int, Ring] = {}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy of this rank's tokens, ().

        Takes the arguments of GPT.forward for whole sequences, (B, T), the same on every rank of the group.
        """
        ring = self._ring(tokens.shape[1], document_ids, tokens.device)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        inputs, labels, positions = (ring.split(x).contiguous() for x in (tokens, targets, positions))
        return self.model(inputs, labels, positions=positions, ring=ring)

    def _ring(self, seq_len: int, document_ids: Tensor | None, device: torch.device) -> Ring:
        # one per length: its masks are made once, and a compiled model sees the same object again
        if seq_len not in self.rings:
            self.rings[seq_len] = Ring(self.group, seq_len, None, device)
        ring = self.rings[seq_len]
        return ring if document_ids is None else ring.with_documents(document_ids.cpu())
