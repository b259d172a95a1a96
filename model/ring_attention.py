"""Exact attention over sequences that several processes share: ring attention with the zigzag split.

A sequence of T tokens is cut into 2 n chunks for n ranks; rank r holds the chunks r and 2 n - 1 - r, so that
each rank has the same share of a causal mask. Queries stay, keys and values travel: in step i a rank attends
to the keys of the rank i places before it, while those of step i + 1 are on their way. Partial results are
merged by their lse:

    lse = log(e^lse_a + e^lse_b)        out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

The backward pass walks the same steps: with the lse and out of the whole row, each part's gradients are those
of the whole attention, and the gradients of keys and values go back to the rank that owns them.

The mask of a step is a pair of intervals (kernels/intervals.py), whatever made it: both chunks of a rank are
in the order of the sequence, so the keys that a query sees are one unbroken run of any rank's keys too. Keys
that no query of a rank sees are neither sent to it nor computed.

Source: Liu et al., Ring Attention, arXiv:2310.01889; the zigzag split: Zhu, ring-flash-attention, 2024.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.intervals import document_bounds
from model.block_attention import BLOCK_ATTENTION, Mask


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one step: local queries `rows` attend to the tokens `keys` of rank `source`.

    rows and keys are empty if nothing is visible. `send` are the own tokens whose keys rank `destination`
    needs in the same step.
    """

    source: int
    rows: slice
    keys: slice
    mask: Mask
    destination: int
    send: slice

    @property
    def is_empty(self) -> bool:
        return length(self.rows) == 0


class Ring:
    """One batch of sequences over the ranks of a process group: who holds which tokens, and who needs them.

    group: its ranks share each sequence. seq_len: T, a multiple of 2 n. document_ids: (B, T) int32 of the
    whole sequences, non-decreasing, on the CPU; a token sees its own document only, a negative id is
    padding. device: where the masks go. All ranks must agree on the arguments.
    Raises ValueError for a length that does not divide.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        seq_len: int,
        document_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
    ):
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.seq_len = seq_len
        self.device = device
        if seq_len % (2 * self.size):
            above = -(-seq_len // (2 * self.size)) * 2 * self.size
            raise ValueError(
                f"seq_len={seq_len} must be a multiple of 2 * {self.size} ranks to be shared: use {above}"
            )
        if document_ids is not None and (document_ids.shape[1] != seq_len or document_ids.is_cuda):
            raise ValueError(
                f"document_ids must be (B, {seq_len}) on the CPU, one for each token of the whole sequence, "
                f"got {tuple(document_ids.shape)} on {document_ids.device}"
            )
        self.document_ids = document_ids
        self.positions = [zigzag_positions(seq_len, rank, self.size) for rank in range(self.size)]
        self._steps: dict[int | None, list[Step]] = {}

    def split(self, x: Tensor) -> Tensor:
        """This rank's part (B, T / n, ...) of x (B, T, ...)."""
        return x[:, self.positions[self.rank].to(x.device)]

    def steps(self, window: int | None = None) -> list[Step]:
        """The n steps of this rank, the own keys first; the same for every layer with this window."""
        if window not in self._steps:
            bounds = self._bounds(window)
            self._steps[window] = [self._step(distance, *bounds) for distance in range(self.size)]
        return self._steps[window]

    def tokens_sent(self, window: int | None = None) -> int:
        """Tokens whose keys and values this rank sends in one forward pass of one layer."""
        return sum(length(step.send) for step in self.steps(window)[1:])

    def _bounds(self, window: int | None) -> tuple[Tensor, Tensor]:
        ids = self.document_ids
        if ids is None:
            ids = torch.zeros(1, self.seq_len, dtype=torch.int32)
        return document_bounds(ids, self.seq_len, causal=True, window=window)

    def _step(self, distance: int, key_bounds: Tensor, query_bounds: Tensor) -> Step:
        source, destination = (self.rank - distance) % self.size, (self.rank + distance) % self.size
        ours, theirs = self.positions[self.rank], self.positions[source]
        seen = local_bounds(key_bounds, ours, theirs)  # (B, 2, T / n) into their keys, for our queries
        seeing = local_bounds(query_bounds, theirs, ours)  # (B, 2, T / n) into our queries, for their keys
        rows, keys = hull(seeing), hull(seen)
        mask = Mask.of(
            seen[:, :, rows].sub(keys.start).clamp(0, length(keys)),
            seeing[:, :, keys].sub(rows.start).clamp(0, length(rows)),
            self.device,
        )
        send = hull(local_bounds(key_bounds, self.positions[destination], ours))
        return Step(source, rows, keys, mask, destination, send)


# processes talk to each other inside: nothing for a compiler to trace
@torch.compiler.disable
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    implementation: str,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence.

    q: (B, T / n, H, D); k, v: (B, T / n, Hkv, D): this rank's tokens, as `Ring.split` gives them.
    Returns (B, T / n, H, D) in q's dtype. implementation: "flash" or "reference". window: keys up to its own
    position that a query sees.
    """
    if implementation not in BLOCK_ATTENTION:
        raise ValueError(
            f"attention.implementation={implementation!r} does not run over several processes: "
            f"use one of {', '.join(BLOCK_ATTENTION)}"
        )
    if q.shape[1] != ring.seq_len // ring.size:
        raise ValueError(
            f"q must hold this rank's {ring.seq_len // ring.size} of {ring.seq_len} tokens, got {q.shape[1]}"
        )
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return RingAttention.apply(q, k, v, ring, implementation, softmax_scale, window)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, implementation, softmax_scale, window):
        attention_forward, _ = BLOCK_ATTENTION[implementation]
        batch, n_query, n_head, _ = q.shape
        accurate = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=accurate)
        lse = q.new_full((batch, n_head, n_query), float("-inf"), dtype=accurate)
        kv = torch.stack((k, v))  # (2, B, T / n, Hkv, D)
        steps = ring.steps(window)
        visiting = kv[:, :, steps[0].keys]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            arriving = fetch_keys(kv, following, ring.group)
            if not step.is_empty:
                part, part_lse = attention_forward(q[:, step.rows], *visiting, step.mask, softmax_scale)
                merge(out[:, step.rows], lse[:, :, step.rows], part, part_lse)
            visiting = arriving.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.options = ring, implementation, softmax_scale, window
        return out

    @staticmethod
    def backward(ctx, dout):
        q, kv, out, lse = ctx.saved_tensors
        ring, implementation, softmax_scale, window = ctx.options
        _, attention_backward = BLOCK_ATTENTION[implementation]
        dq, dkv = torch.zeros_like(out, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        steps = ring.steps(window)
        visiting, returning = kv[:, :, steps[0].keys], None
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            arriving = fetch_keys(kv, following, ring.group)
            part = None
            if not step.is_empty:
                rows = step.rows
                row_data = q[:, rows], *visiting, out[:, rows], lse[:, :, rows].contiguous()
                dq_part, *part = attention_backward(dout[:, rows], *row_data, step.mask, softmax_scale)
                dq[:, rows] += dq_part
                part = torch.stack(part)  # (2, B, keys, Hkv, D)
            # the last step's gradients have travelled while this one was computed
            if returning is not None:
                collect(dkv, *returning)
            if step.source == ring.rank:
                returning = step.send, Exchange([], part)
            else:
                returning = step.send, return_gradients(kv, part, step, ring.group)
            visiting = arriving.wait()
        collect(dkv, *returning)
        dk, dv = dkv.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


@dataclass(slots=True)
class Exchange:
    """Messages on their way; `wait` gives the tensor that arrives, or None if none was to come."""

    works: list[dist.Work]
    received: Tensor | None
    # keeps the memory until the message is out
    sent: Tensor | None = None

    def wait(self) -> Tensor | None:
        for work in self.works:
            work.wait()
        return self.received


def fetch_keys(kv: Tensor, step: Step | None, group: dist.ProcessGroup) -> Exchange:
    """Starts to send the keys and values that another rank needs in `step`, and to receive one's own."""
    if step is None:
        return Exchange([], None)
    sent = kv[:, :, step.send] if length(step.send) else None
    return exchange(sent, step.destination, new_part(kv, step.keys), step.source, group)


def return_gradients(kv: Tensor, part: Tensor | None, step: Step, group: dist.ProcessGroup) -> Exchange:
    """Starts to send gradients back to the rank whose keys were visiting, and to receive one's own."""
    return exchange(part, step.source, new_part(kv, step.send), step.destination, group)


def exchange(
    sent: Tensor | None, to: int, received: Tensor | None, source: int, group: dist.ProcessGroup
) -> Exchange:
    operations = []
    if sent is not None:
        sent = sent.contiguous()
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to))
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Exchange(works, received, sent)


def new_part(kv: Tensor, tokens: slice) -> Tensor | None:
    """Room for the keys and values of so many tokens."""
    if length(tokens) == 0:
        return None
    two, batch, _, n_head, head_dim = kv.shape
    return kv.new_empty(two, batch, length(tokens), n_head, head_dim)


def collect(dkv: Tensor, tokens: slice, arriving: Exchange) -> None:
    """Adds the gradients of own tokens that another rank has computed."""
    part = arriving.wait()
    if part is not None:
        dkv[:, :, tokens] += part


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Takes the attention to more keys into out (B, T, H, D) and lse (B, H, T), in place."""
    total = torch.logaddexp(lse, part_lse)
    # -inf - (-inf) is nan: rows that have seen nothing keep their zeros
    reference = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_(weights(lse, reference)).add_(part * weights(part_lse, reference))
    lse.copy_(total)


def weights(lse: Tensor, reference: Tensor) -> Tensor:
    return (lse - reference).exp().transpose(1, 2)[..., None]  # (B, T, H, 1)


def zigzag_positions(seq_len: int, rank: int, size: int) -> Tensor:
    """The places in the sequence of a rank's tokens, (T / n,) int32, ascending."""
    positions = torch.arange(seq_len, dtype=torch.int32).view(2 * size, -1)
    return positions[[rank, 2 * size - 1 - rank]].flatten()


def local_bounds(bounds: Tensor, lines: Tensor, columns: Tensor) -> Tensor:
    """Bounds of some lines of the mask, counted in the columns that a rank holds, (B, 2, lines) int32."""
    wanted = bounds[:, :, lines].contiguous()  # (B, 2, lines)
    return torch.searchsorted(columns, wanted.flatten(), out_int32=True).view_as(wanted)


def hull(bounds: Tensor) -> slice:
    """The columns from the first to the last that any line sees; bounds (B, 2, lines)."""
    first, end = bounds.unbind(1)
    seen = first < end
    if not bool(seen.any()):
        return slice(0, 0)
    return slice(int(first[seen].min()), int(end[seen].max()))


def length(tokens: slice) -> int:
    return tokens.stop - tokens.start
