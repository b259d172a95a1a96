"""Packed documents kept apart: no attention across them, and positions that start anew."""

import torch
from torch import Tensor, nn


class SeparateDocuments(nn.Module):
    """A model that is given packed sequences, and sees where the documents in them begin."""

    def __init__(self, model: nn.Module, end_of_text: int):
        super().__init__()
        self.model = model
        self.end_of_text = end_of_text

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (B, T) int64; what the model gives for them, its documents and positions."""
        ids = document_ids(tokens, self.end_of_text)
        return self.model(tokens, targets, document_ids=ids, positions=positions_in_documents(ids))


def document_ids(tokens: Tensor, end_of_text: int) -> Tensor:
    """The number of the document of each token, (B, T) int32; end_of_text begins the one that it precedes.

    So a document's first word is learned from the end of the one before alone, which is what a prompt of
    samples begins with (train.sample.prompt_ids).
    """
    return (tokens == end_of_text).cumsum(dim=1, dtype=torch.int32)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """The place of each token in its document, (B, T) int64, of document_ids (B, T), non-decreasing."""
    ids = document_ids.contiguous()
    return torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(ids, ids)
