"""PyTorch's attention as the benchmarks measure it: by one of its backends, on tensors laid out as ours."""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None, **options) -> Tensor:
    """scaled_dot_product_attention of q, k, v (B, T, H, D); options: its own.

    backend: None leaves the choice to PyTorch. Raises RuntimeError if this backend cannot run the problem.
    """
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)
