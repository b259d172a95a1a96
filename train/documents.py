"""Keeps packed documents apart: no attention across them, and positions that restart in each."""

import torch
from torch import Tensor, nn


class SeparateDocuments(nn.Module):
    """A model for packed sequences, which is given where the documents in them begin."""

    def __init__(self, model: nn.Module, end_of_text: int):
        super().__init__()
        self.model = model
        self.end_of_text = end_of_text

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What the model returns for tokens, targets, (B, T) int64, their documents and positions."""
        ids = document_ids(tokens, self.end_of_text)
        return self.model(tokens, targets, document_ids=ids, positions=positions_in_documents(ids))


def document_ids(tokens: Tensor, end_of_text: int) -> Tensor:
    """The document number of each token, (B, T) int32; end_of_text belongs to the document that follows it.

    So a document's first word is predicted from the end of text alone, with which the prompt of a sample
    begins too (train.sample.prompt_ids).
    """
    return (tokens == end_of_text).cumsum(dim=1, dtype=torch.int32)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """The position of each token in its document, (B, T) int64; document_ids: (B, T), non-decreasing."""
    ids = document_ids.contiguous()
    return torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(ids, ids)
