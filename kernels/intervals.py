"""Masks as intervals: under document, window and varlen masks a query sees one unbroken run of keys.

Query i sees key j exactly when key_bounds[b, 0, i] <= j < key_bounds[b, 1, i], and exactly when
query_bounds[b, 0, j] <= i < query_bounds[b, 1, j]: the same mask, seen from its rows and from its columns.
None of the four bounds ever decreases from one row or column to the next, so the first and the last one of a
tile bound all of it. The forward and dq kernels use the rows, the dk and dv kernel the columns. No kernel
knows what a document is, and a new mask never recompiles one.
"""

import math

import torch
from torch import Tensor


def document_bounds(
    document_ids: Tensor, seq_q: int, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """key_bounds (B, 2, Tq) and query_bounds (B, 2, Tk), int32, of document_ids (B, Tk), non-decreasing.

    The queries are the last Tq of the Tk tokens. A negative id is padding, which neither sees nor is seen.
    """
    seq_k = document_ids.shape[1]
    offset = seq_k - seq_q
    ids = document_ids.contiguous()
    first = torch.searchsorted(ids, ids, out_int32=True)
    end = torch.searchsorted(ids, ids, right=True, out_int32=True)
    bounds = torch.stack([first, end], dim=1).masked_fill_((ids < 0)[:, None], 0)
    if offset == 0 and not causal and window is None:
        # the mask is symmetric
        return bounds, bounds
    position = torch.arange(seq_k, dtype=torch.int32, device=ids.device)

    key_first, key_end = bounds[..., offset:].unbind(1)
    query_first, query_end = (bounds - offset).clamp(min=0).unbind(1)
    return narrow(
        key_first, key_end, query_first, query_end, position[offset:], position - offset, causal, window
    )


def mean_length(document_ids: Tensor) -> float:
    """The length of a token's document, averaged over all tokens, 0 for padding; waits for the values."""
    ids = document_ids.contiguous()
    first, end = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    return (end - first).masked_fill_(ids < 0, 0).double().mean().item()


def mean_keys(length: float | None, *, causal: bool, window: int | None) -> float | None:
    """How many keys a query sees on average, for documents or sequences of this mean length.

    length: from mean_length, None if it is not known. Unequal documents count as equal ones of that length,
    which take the same work. Rounded by up to 3%: batches whose documents are about as long are of one kind
    (repeats.py).
    """
    if length is None:
        return None
    keys = (length + 1) / 2 if causal else length
    mantissa, exponent = math.frexp(keys)
    rounded = math.ldexp(round(32 * mantissa) / 32, exponent)
    return rounded if window is None else min(rounded, float(window))


def varlen_bounds(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seq_q: int, seq_k: int, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """key_bounds (1, 2, Tq) and query_bounds (1, 2, Tk), int32, of packed sequences."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    rows = torch.arange(seq_q, dtype=torch.int32, device=cu_seqlens_q.device)
    columns = torch.arange(seq_k, dtype=torch.int32, device=cu_seqlens_q.device)
    of_row = torch.searchsorted(cu_seqlens_q, rows, right=True).clamp(max=cu_seqlens_q.shape[0] - 1)
    of_column = torch.searchsorted(cu_seqlens_k, columns, right=True).clamp(max=cu_seqlens_k.shape[0] - 1)

    # within a sequence the last query is at the last key
    key_of_row = rows + cu_seqlens_k[of_row] - cu_seqlens_q[of_row]
    row_of_key = columns + cu_seqlens_q[of_column] - cu_seqlens_k[of_column]
    return narrow(
        cu_seqlens_k[of_row - 1][None],
        cu_seqlens_k[of_row][None],
        cu_seqlens_q[of_column - 1][None],
        cu_seqlens_q[of_column][None],
        key_of_row,
        row_of_key,
        causal,
        window,
    )


def narrow(
    key_first: Tensor,
    key_end: Tensor,
    query_first: Tensor,
    query_end: Tensor,
    key_of_row: Tensor,
    row_of_key: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Restricts the intervals of rows and of columns alike to the causal and window masks."""
    if causal:
        # clamped, so that an empty interval stays in place and the bounds never decrease
        key_end = torch.minimum(key_end, key_of_row + 1).maximum(key_first)
        query_first = torch.maximum(query_first, row_of_key).minimum(query_end)
    if window is not None:
        key_first = torch.maximum(key_first, key_of_row + 1 - window).minimum(key_end)
        query_end = torch.minimum(query_end, row_of_key + window).maximum(query_first)
    return (
        torch.stack([key_first, key_end], dim=1).int(),
        torch.stack([query_first, query_end], dim=1).int(),
    )
