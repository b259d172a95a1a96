"""Short sequences that stand for long ones: PoSE trains on positions up to a length that it never reads."""

import torch
from torch import Tensor, nn


class SkippedPositions(nn.Module):
    """A model whose training sequences leave out a stretch of positions, of random place and length.

    Evaluation sees the positions as they are. Source: Zhu et al., PoSE, arXiv:2309.10400, with two chunks of
    one text.
    """

    def __init__(self, model: nn.Module, seq_len: int):
        super().__init__()
        self.model = model
        self.seq_len = seq_len

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What the model returns for tokens, targets, (B, T) int64, at positions below seq_len."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if self.training:
            positions = skipped_positions(*tokens.shape, self.seq_len, tokens.device)
        return self.model(tokens, targets, positions=positions)


def skipped_positions(batch: int, n_tokens: int, seq_len: int, device: torch.device) -> Tensor:
    """(B, T) int64: 0 .. i - 1, then i + skip .. T - 1 + skip, i and skip drawn for each sequence.

    0 < i <= T, 0 <= skip <= seq_len - T, from the device's generator, which the loop seeds by step and rank.
    """
    place = torch.randint(1, n_tokens + 1, (batch, 1), device=device)
    skip = torch.randint(seq_len - n_tokens + 1, (batch, 1), device=device)
    positions = torch.arange(n_tokens, device=device)
    return positions + skip * (positions >= place)
