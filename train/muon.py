"""Muon for the matrices of a model's layers and AdamW for everything else, as one optimizer.

Muon (Jordan et al., kellerjordan.github.io/posts/muon) makes the momentum of a matrix orthogonal before it is
added. Scaled to the size of AdamW's updates it takes AdamW's learning rate and weight decay (Liu et al.,
arXiv:2502.16982). Both optimizers are torch's own.
"""

from collections import defaultdict

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"


class MuonAdamW:
    """Both optimizers behind the interface that the training step and checkpoints use.

    matrices: Muon's parameter group, "params" with "lr", "weight_decay" and "momentum"; others: AdamW's
    groups; adamw: its options. found_inf: () on the device, not 0 if step() must change nothing.
    """

    def __init__(self, matrices: dict, others: list[dict], **adamw):
        self._matrices = matrices
        self._adamw = torch.optim.AdamW(others, **adamw)
        self.param_groups = [matrices, *self._adamw.param_groups]
        # one place for the state of every parameter
        self.state = self._adamw.state = defaultdict(dict)
        for p in matrices["params"]:
            self.state[p][MOMENTUM] = torch.zeros_like(p, requires_grad=False)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.found_inf = self.found_inf
        self._adamw.step()
        for p in self._matrices["params"]:
            self._update(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._matrices["params"]:
            p.grad = None
        self._adamw.zero_grad(set_to_none)

    def _update(self, p: Tensor) -> None:
        """Updates one matrix. torch's Muon neither reads found_inf nor joins shards: it gets whole copies."""
        momentum = self.state[p][MOMENTUM]
        copy = torch.nn.Parameter(_whole_copy(p))
        copy.grad = _whole_copy(p.grad)
        options = {key: value for key, value in self._matrices.items() if key != "params"}
        muon = torch.optim.Muon([copy], adjust_lr_fn="match_rms_adamw", **options)
        muon.state[copy][MOMENTUM] = _whole_copy(momentum)
        muon.step()
        for old, new in ((p, copy), (momentum, muon.state[copy][MOMENTUM])):
            if hasattr(old, "full_tensor"):
                # each process has computed the same matrix
                old, new = old.to_local(), _own_rows(new, old)
            if self.found_inf is not None:
                new = torch.where(self.found_inf.bool(), old, new)
            old.copy_(new)


def _whole_copy(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a matrix, which is sharded as `like` is."""
    # takes a second: a refused command should not wait for it
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
