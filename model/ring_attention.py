"""Exact attention over sequences that several processes share: ring attention.

Queries stay, keys and values travel: in step i a rank attends to the keys of the rank i places before it,
while those of step i + 1 are on their way. ring.py decides who holds and needs what. Partial results are
merged by their lse:

    lse = log(e^lse_a + e^lse_b)        out = out_a + sigmoid(lse_b - lse_a) (out_b - out_a)

The backward pass walks the same steps: with the lse and out of the whole row, each part's gradients are those
of the whole attention, and the gradients of keys and values go back to the rank that owns them.

Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import checks
from kernels.block_mask import BlockMask
from model.block_attention import BLOCK_ATTENTION
from model.ring import Ring, Step, length


# processes communicate inside, which a compiler cannot trace. The same as torch.compiler.disable, which would
# import the compiler here: a second that a refused command need not wait
@torch._disable_dynamo
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    implementation: str,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    block_mask: BlockMask | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence.

    q: (B, T / n, H, D); k, v: (B, T / n, Hkv, D): this rank's tokens, as `Ring.split` gives them.
    Returns (B, T / n, H, D) in q's dtype. implementation: "flash" or "reference". window: how many keys a
    query sees, up to its own position. block_mask: causal, of the whole sequence. Raises ValueError for
    arguments that flash_attention refuses, but "reference" takes any dtype and head_dim.
    """
    if implementation not in BLOCK_ATTENTION:
        raise ValueError(
            f"attention.implementation={implementation!r} does not run over several processes: "
            f"use one of {', '.join(BLOCK_ATTENTION)}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_is_tensor(name, x)
    # "reference" also takes other dtypes and head sizes
    check = checks.check_tensors if implementation == "flash" else checks.check_together
    check(q, k, v, n_dims=4)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != ring.seq_len // ring.size:
            raise ValueError(
                f"{name} must hold this rank's {ring.seq_len // ring.size} of {ring.seq_len} tokens, got "
                f"{x.shape[1]}: ring.split(x) gives them"
            )
    if torch.device(ring.device).type != q.device.type:
        raise ValueError(
            f"ring must have its masks on {q.device}, as q, got {ring.device}: give Ring device={q.device}"
        )
    checks.check_options(q, True, softmax_scale, window, 0.0, None)
    if block_mask is not None:
        checks.check_is_block_mask(block_mask)
        checks.check_block_mask_serves(block_mask, q)
    n_rows = 1 if ring.document_ids is None else len(ring.document_ids)
    if n_rows not in (1, q.shape[0]):
        raise ValueError(
            f"document_ids must have 1 or {q.shape[0]} rows, as q, got {n_rows}: use ring.with_documents"
        )
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    steps = ring.steps(window, block_mask)
    # "reference" multiplies in float32 whatever it is given, as does its backward pass, outside of autocast
    with torch.autocast(q.device.type, enabled=False):
        return RingAttention.apply(q, k, v, ring, implementation, softmax_scale, steps)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, implementation, softmax_scale, steps):
        attention_forward, _ = BLOCK_ATTENTION[implementation]
        batch, n_query, n_head, _ = q.shape
        accurate = torch.promote_types(q.dtype, torch.float32)
        kv = torch.stack((k, v))  # (2, B, T / n, Hkv, D)
        # kept for the backward pass: a view of the qkv product would keep all of it, k and v a second time
        q = q.contiguous()
        visiting, upcoming = kv[:, :, steps[0].keys], [*steps[1:], None, None]
        # an exchange must have started before an attention kernel does, whose thread blocks keep all
        # multiprocessors until it ends: otherwise the exchange waits for them, and the neighbours' ends of it
        # wait for this one, on multiprocessors that attention lacks there. So small kernels (zeros, merging)
        # stand between, unless a step sees nothing. While one part is merged, two more are in memory, one of
        # them still arriving
        arriving = fetch_keys(kv, upcoming[0], ring.group)
        out = q.new_zeros(q.shape, dtype=accurate)
        lse = q.new_full((batch, n_head, n_query), float("-inf"), dtype=accurate)
        for step, following in zip(steps, upcoming[1:], strict=True):
            part = None
            if not step.is_empty:
                part = attention_forward(q[:, step.rows], *visiting, step.mask, softmax_scale)
            visiting = arriving.wait()
            arriving = fetch_keys(kv, following, ring.group)
            if part is not None:
                merge(out[:, step.rows], lse[:, :, step.rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.options = ring, implementation, softmax_scale, steps
        return out

    @staticmethod
    def backward(ctx, dout):
        # gradients are enabled here only with create_graph=True
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ring_attention has no second derivative: use attention_reference, on whole sequences, where "
                "you need one (double backward, gradient penalties), or leave out create_graph=True"
            )
        q, kv, out, lse = ctx.saved_tensors
        ring, implementation, softmax_scale, steps = ctx.options
        _, attention_backward = BLOCK_ATTENTION[implementation]
        dq, dkv = torch.zeros_like(out, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
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
            # the previous step's gradients have travelled while this one was computed
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
    """Messages in flight; `wait` returns the tensor that arrives, or None if none is expected."""

    works: list[dist.Work]
    received: Tensor | None
    # keeps the memory alive until the message is sent
    sent: Tensor | None = None

    def wait(self) -> Tensor | None:
        for work in self.works:
            work.wait()
        return self.received


def fetch_keys(kv: Tensor, step: Step | None, group: dist.ProcessGroup) -> Exchange:
    """Starts sending the keys and values that another rank needs in `step`, and receiving this rank's."""
    if step is None:
        return Exchange([], None)
    sent = kv[:, :, step.send] if length(step.send) else None
    return exchange(sent, step.destination, new_part(kv, step.keys), step.source, group)


def return_gradients(kv: Tensor, part: Tensor | None, step: Step, group: dist.ProcessGroup) -> Exchange:
    """Starts sending gradients back to the rank whose keys were visiting, and receiving this rank's."""
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


def new_part(kv: Tensor, tokens: slice | Tensor) -> Tensor | None:
    """An empty tensor for the keys and values of `tokens`, or None if there are none."""
    if length(tokens) == 0:
        return None
    two, batch, _, n_head, head_dim = kv.shape
    return kv.new_empty(two, batch, length(tokens), n_head, head_dim)


def collect(dkv: Tensor, tokens: slice | Tensor, arriving: Exchange) -> None:
    """Adds the gradients of this rank's tokens that another rank has computed."""
    part = arriving.wait()
    if part is not None:
        dkv[:, :, tokens] += part


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the attention to more keys into out (B, T, H, D) and lse (B, H, T), in place."""
    # where neither has seen a key, -inf - (-inf) is nan, but any share of two zeros will do
    share = torch.sigmoid((part_lse - lse).nan_to_num(nan=0.0))
    out.lerp_(part.to(out.dtype), share.transpose(1, 2)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))
