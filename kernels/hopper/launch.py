"""Launches the Hopper kernels: descriptors, grids, buffers; the kernels themselves import no torch."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.dropout import least_line
from kernels.hopper.arguments import (
    dropout_arguments,
    gradient_scale,
    keys_per_query,
    list_arguments,
    mask_kind,
)
from kernels.hopper.backward_64 import backward_64_kernel
from kernels.hopper.backward_128 import backward_128_kernel
from kernels.hopper.backward_256 import backward_256_kernel
from kernels.hopper.cut_lists import without_intervals
from kernels.hopper.descriptors import float32_descriptor, head_descriptor, rest_width, tile_width
from kernels.hopper.dq import dq_kernel
from kernels.hopper.forward import forward_kernel
from kernels.hopper.key_tiles import BLOCK_N, CONSUMERS
from kernels.hopper.key_tiles import ROWS as BACKWARD_ROWS
from kernels.hopper.order import division, order_arguments
from kernels.hopper.overflow import MOST
from kernels.hopper.prepare_and_round import prepare_kernel, round_kernel
from kernels.hopper.query_tiles import ROWS
from kernels.hopper.sums import COUNTS, PART, SLOTS, STRETCH
from kernels.hopper.tiles import (
    backward_section_heads,
    backward_tile,
    cdiv,
    dq_tile,
    forward_tile,
    keeps_maximum,
    section_heads,
    sum_pays,
    turn_heads,
    turns_pay,
)
from kernels.launches import launch
from kernels.layouts import bulk_strides
from kernels.problem import Problem

LOG2E = 1.4426950408889634
# rows per program of prepare_kernel and round_kernel; lse, delta and dq's sums are padded to a multiple of it
PREPARE_ROWS = STRETCH.value


def registers(consumers: int, blocks: int = 1) -> int:
    """Registers of a thread at kernel start: 65536 over the threads of the consumers and the producer."""
    return 65536 // blocks // ((consumers + 1) * 128) // 8 * 8


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_room(problem: Problem, dtype: torch.dtype) -> bool:
    """Whether probabilities may be as large as overflow.MOST: in float16 they may not.

    Dropout takes the minimum of a probability and of its line, which is lower at rates close to a half.
    """
    return dtype == torch.bfloat16 and (
        problem.dropout_p == 0.0 or least_line(problem.dropout_p) >= MOST.value
    )


@cache
def memory_bandwidth(device: torch.device) -> float:
    """The nominal memory bandwidth, GB/s."""
    return triton.testing.get_dram_gbps(device.index)


def attention_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, Tq, H, D) in q's dtype and lse (B, H, Tq) float32.

    In one launch, preceded by one that clears a counter if there are more tiles than are dealt out.
    """
    batch, seq_q, n_head, head_dim = q.shape
    seq_k, n_kv_head = k.shape[1:3]
    width = tile_width(head_dim)
    drops, keys = problem.dropout_p > 0.0, keys_per_query(problem, seq_q, seq_k)
    room = has_room(problem, q.dtype)
    tile = forward_tile(width, mask_kind(problem), keys, drops, room)
    problem = without_intervals(problem, batch, seq_q, seq_k, rows=True, columns=False)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, n_head, seq_q, dtype=torch.float32, device=q.device)
    group = n_head // n_kv_head
    n_tiles = cdiv(seq_q, tile.consumers * ROWS.value)
    section = section_heads(seq_k, head_dim, mask_kind(problem), group, batch * n_head)
    n_sm = multiprocessors(q.device)
    n_blocks = min(batch * n_head * n_tiles, n_sm * tile.blocks)
    # where all tiles are dealt, any tensor stands in for the counter
    counter = lse.view(torch.int32)
    if batch * n_head * n_tiles > tile.dealt * n_blocks:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    keeps = room and keeps_maximum(tile, mask_kind(problem), drops)
    notes = counter
    if keeps:
        n_notes = (n_blocks + batch * n_head * n_tiles) * tile.consumers
        notes = torch.empty(n_notes, dtype=torch.int32, device=q.device)
    launch(
        forward_kernel,
        (n_blocks,),
        head_descriptor(q, ROWS.value),
        head_descriptor(k, tile.block_n),
        head_descriptor(v, tile.block_n),
        head_descriptor(out, ROWS.value, rest_width(head_dim) or width),
        lse,
        notes,
        counter,
        lse if problem.key_bounds is None else problem.key_bounds,
        *list_arguments(problem.row_lists, lse),
        *dropout_arguments(problem, lse),
        batch,
        n_head,
        group,
        seq_q,
        seq_k,
        problem.window or 0,
        *order_arguments(batch * n_head, n_tiles, section),
        division(n_head),
        problem.softmax_scale * LOG2E,
        MASK=mask_kind(problem),
        DROPOUT=drops,
        BLOCK_N=tile.block_n,
        HEAD_DIM=width,
        REST=rest_width(head_dim),
        CONSUMERS=tile.consumers,
        Q_STAGES=tile.q_stages,
        STAGES=tile.stages,
        BLOCKS=tile.blocks,
        DEALT=tile.dealt,
        KEEPS_MAXIMUM=keeps,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
        maxnreg=registers(tile.consumers, tile.blocks),
    )
    return out, lse


class Plan(NamedTuple):
    """The sizes of a backward pass, and how it computes dq; n_q_heads, n_kv_heads: of all batches."""

    batch: int
    seq_q: int
    seq_k: int
    n_head: int
    n_kv_head: int
    head_dim: int
    # channels of a head in shared memory
    width: int
    # heads of q that share keys
    group: int
    n_q_heads: int
    n_kv_heads: int
    # tiles of keys of each head, and the keys of a tile
    n_tiles: int
    tile_keys: int
    # multiprocessors of the GPU
    n_sm: int
    # whether dq is summed beside dk and dv, or computed by dq.py
    sums_dq: bool
    # rows of each head in minus_lse, minus_delta and dq_sum: whole blocks
    padded: int
    # heads of k and v in a section, see sums.py
    section: int
    n_sections: int
    # sections whose dq is rounded beside dk and dv
    rounded_sections: int
    # heads of q whose sums exist at a time
    n_sums: int


class Tensors(NamedTuple):
    """What a backward pass reads, what it writes, and what its launches hand to the next."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    # (B * H * padded,) float32, see prepare_kernel
    minus_lse: Tensor
    minus_delta: Tensor
    # (n_sums * padded, width) float32; where nothing is summed, any tensor stands in
    dq_sum: Tensor
    # of tiles taken, and the counts of sums.py: (n_sections, COUNTS) int32
    counts: Tensor


def attention_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous or in `gradients`.

    In three launches: lse and delta; the gradients; rounding what is left of dq. Or in two: lse, delta and
    dq; dk and dv. Heads of more than 128 take three again: lse and delta; dq; dk and dv. Heads that share
    keys but not masks get copies of the keys, see backward_apart.
    """
    if problem.blocks and problem.blocks[0].shape[1] > k.shape[2]:
        return backward_apart(problem, dout, dlse, q, k, v, out, lse, gradients)
    plan, device = plan_backward(problem, q, k), q.device
    problem = without_intervals(
        problem, plan.batch, plan.seq_q, plan.seq_k, rows=not plan.sums_dq, columns=True
    )
    n_rows = plan.n_q_heads * plan.padded
    minus_lse, minus_delta = torch.empty(2, n_rows, dtype=torch.float32, device=device).unbind()
    # where nothing is summed, any tensor stands in for the sums
    dq_sum = minus_delta
    if plan.sums_dq:
        dq_sum = torch.empty(plan.n_sums * plan.padded, plan.width, dtype=torch.float32, device=device)
    counts = torch.empty(plan.n_sections, COUNTS.value, dtype=torch.int32, device=device)
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv = gradients or (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    tensors = Tensors(dout, dlse, q, k, v, out, lse, dq, dk, dv, minus_lse, minus_delta, dq_sum, counts)
    if plan.sums_dq or plan.width == 256:
        launch_prepare(problem, plan, tensors)
    if not plan.sums_dq:
        launch_dq(problem, plan, tensors)
    launch_gradients(problem, plan, tensors)
    if plan.sums_dq:
        launch_round(problem, plan, tensors)
    return dq, dk, dv


def backward_apart(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """attention_backward as if the heads shared no keys, since a tile of keys has only one list of queries.

    Allocates a copy of k, of v and of each of their gradients, with as many heads as q; dk and dv of each
    head are rounded before they are added up, as in kernels/portable.
    """
    n_kv_head = k.shape[2]
    group = q.shape[2] // n_kv_head
    dq, dk, dv = gradients or (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    own_k, own_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    own_dk, own_dv = torch.empty_like(own_k), torch.empty_like(own_v)
    own = dq, own_dk, own_dv
    attention_backward(problem, dout, dlse, q, own_k, own_v, out, lse, own)
    for total, part in ((dk, own_dk), (dv, own_dv)):
        torch.sum(part.unflatten(2, (n_kv_head, group)), 3, out=total)
    return dq, dk, dv


def plan_backward(problem: Problem, q: Tensor, k: Tensor) -> Plan:
    batch, seq_q, n_head, head_dim = q.shape
    seq_k, n_kv_head = k.shape[1:3]
    width, group = tile_width(head_dim), n_head // n_kv_head
    n_q_heads, n_kv_heads = batch * n_head, batch * n_kv_head
    tile_keys = BACKWARD_ROWS.value if width == 256 else BLOCK_N.value
    n_tiles = cdiv(seq_k, tile_keys)
    if problem.blocks:
        n_tiles = cdiv(seq_k, BLOCK_N.value) * (BLOCK_N.value // tile_keys)
    n_sm = multiprocessors(q.device)
    keys = keys_per_query(problem, seq_q, seq_k)
    # otherwise dq.py computes dq: the same bits in every run, and faster where rows are short or heads wide
    sums_dq = (
        width < 256
        and not problem.deterministic
        and sum_pays(width, mask_kind(problem), keys, memory_bandwidth(q.device))
    )
    # lse and delta come in whole blocks: of 128 rows from prepare_kernel and for lists, else of 64 from dq.py
    prepares = sums_dq or width == 256
    rows = PREPARE_ROWS if prepares or problem.blocks else ROWS.value
    padded = cdiv(seq_q, rows) * rows
    section = backward_section_heads(seq_q, width, group, n_kv_heads)
    rounded_sections, n_sums = 0, n_q_heads if sums_dq else 0
    # sums.py rounds only rows of 64 channels
    if sums_dq and head_dim == 64 and turns_pay(n_tiles * n_q_heads, n_sm, keys):
        section = turn_heads(n_tiles, n_kv_heads, n_sm)
        rounded_sections = cdiv(n_kv_heads, section) - 1
        n_sums = min(SLOTS.value * section * group, n_sums)
    n_sections = cdiv(n_kv_heads, section)
    return Plan(
        batch, seq_q, seq_k, n_head, n_kv_head, head_dim, width, group, n_q_heads, n_kv_heads, n_tiles,
        tile_keys, n_sm, sums_dq, padded, section, n_sections, rounded_sections, n_sums,
    )  # fmt: skip


def launch_prepare(problem: Problem, plan: Plan, tensors: Tensors) -> None:
    """Writes minus_lse and minus_delta, and clears the counts and the first sums of dq."""
    out, dout, lse, dlse = tensors.out, tensors.dout, tensors.lse, tensors.dlse
    launch(
        prepare_kernel,
        (plan.padded // PREPARE_ROWS, plan.n_q_heads),
        out,
        dout,
        lse,
        lse if dlse is None else dlse,
        tensors.minus_lse,
        tensors.minus_delta,
        tensors.dq_sum,
        tensors.counts,
        *out.stride()[:3],
        *dout.stride()[:3],
        plan.n_head,
        plan.seq_q,
        plan.padded,
        plan.n_sums,
        plan.n_sections,
        problem.softmax_scale,
        1.0 / problem.keep_scale,
        HEAD_DIM=plan.head_dim,
        WIDTH=plan.width,
        BLOCK_M=PREPARE_ROWS,
        COUNTS=COUNTS.value,
        HAS_DLSE=dlse is not None,
        num_warps=16 if plan.width == 256 else 4,
    )


def launch_dq(problem: Problem, plan: Plan, tensors: Tensors) -> None:
    """Writes dq, and but for wide heads minus_lse and minus_delta, and clears the count of tiles."""
    lse, dlse, minus_lse = tensors.lse, tensors.dlse, tensors.minus_lse
    tile = dq_tile(plan.width, mask_kind(problem), problem.dropout_p > 0.0)
    n_tiles = cdiv(plan.seq_q, tile.consumers * ROWS.value)
    section = section_heads(plan.seq_k, plan.head_dim, mask_kind(problem), plan.group, plan.n_q_heads)
    launch(
        dq_kernel,
        (min(plan.n_q_heads * n_tiles, plan.n_sm),),
        head_descriptor(tensors.q, ROWS.value),
        head_descriptor(tensors.dout, ROWS.value),
        head_descriptor(tensors.out, ROWS.value),
        head_descriptor(tensors.k, tile.block_n),
        head_descriptor(tensors.v, tile.block_n),
        head_descriptor(tensors.dq, ROWS.value, plan.width),
        lse,
        lse if dlse is None else dlse,
        minus_lse,
        tensors.minus_delta,
        tensors.counts,
        minus_lse if problem.key_bounds is None else problem.key_bounds,
        *list_arguments(problem.row_lists, minus_lse),
        *dropout_arguments(problem, minus_lse),
        plan.n_q_heads,
        n_tiles,
        plan.n_head,
        plan.group,
        plan.seq_q,
        plan.seq_k,
        problem.window or 0,
        *order_arguments(plan.n_q_heads, n_tiles, section),
        division(plan.n_head),
        plan.padded,
        problem.softmax_scale * LOG2E,
        problem.softmax_scale,
        MASK=mask_kind(problem),
        DROPOUT=problem.dropout_p > 0.0,
        HAS_DLSE=dlse is not None,
        BLOCK_N=tile.block_n,
        HEAD_DIM=plan.width,
        REST=rest_width(plan.head_dim),
        CONSUMERS=tile.consumers,
        Q_STAGES=tile.q_stages,
        STAGES=tile.stages,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
        maxnreg=registers(tile.consumers),
    )


def launch_gradients(problem: Problem, plan: Plan, tensors: Tensors) -> None:
    """Writes dk and dv and, where dq is summed, its sums and dq of the rounded sections."""
    width, lse, dq = plan.width, tensors.lse, tensors.dq
    tile = backward_tile(width, plan.sums_dq)
    side = BACKWARD_ROWS.value
    squares = tensors.dq_sum.view(-1, side)
    # dk and dv of heads of 128 leave through the buffers of k and v, the others 64 x 64 at a time
    rows_out, width_out = (BLOCK_N.value, 128) if width == 128 else (side, 64)
    inputs = (
        head_descriptor(tensors.q, side),
        head_descriptor(tensors.dout, side),
        head_descriptor(tensors.k, plan.tile_keys),
        head_descriptor(tensors.v, plan.tile_keys),
        float32_descriptor(tensors.minus_lse, (side,)),
        float32_descriptor(tensors.minus_delta, (side,)),
    )
    outputs = (
        head_descriptor(tensors.dk, rows_out, width_out),
        head_descriptor(tensors.dv, rows_out, width_out),
    )
    work = (
        lse if problem.query_bounds is None else problem.query_bounds,
        *list_arguments(problem.transposed_column_lists, lse),
        *dropout_arguments(problem, lse),
        tensors.counts,
    )
    sizes = {}
    if width == 256:
        kernel, arguments = backward_256_kernel, inputs + outputs + work
        sizes |= {"REST": rest_width(plan.head_dim), "P_STAGES": tile.ds_stages}
    else:
        kernel = backward_64_kernel if width == 64 else backward_128_kernel
        arguments = (*inputs, float32_descriptor(squares, (side, side)), *outputs, *work)
        sizes |= {"SUMS_DQ": plan.sums_dq, "KV_STAGES": tile.kv_stages, "DS_STAGES": tile.ds_stages}
        sizes["REDUCER_REGISTERS"] = tile.reducer_registers
    if width == 64:
        sizes["DQ_STAGES"] = tile.dq_stages
        arguments += (
            float32_descriptor(squares, (PART.value, side)),
            dq,
            *bulk_strides(dq),
            plan.rounded_sections,
        )
    launch(
        kernel,
        (min(plan.n_kv_heads * plan.n_tiles, plan.n_sm),),
        *arguments,
        plan.group,
        plan.seq_q,
        plan.seq_k,
        problem.window or 0,
        plan.padded,
        plan.n_kv_heads,
        plan.n_tiles,
        plan.n_kv_head,
        *order_arguments(plan.n_kv_heads, plan.n_tiles, plan.section),
        division(plan.n_kv_head),
        problem.softmax_scale * LOG2E,
        gradient_scale(problem),
        MASK=mask_kind(problem),
        DROPOUT=problem.dropout_p > 0.0,
        STAGES=tile.stages,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
        maxnreg=registers(CONSUMERS.value + plan.sums_dq),
        **sizes,
    )


def launch_round(problem: Problem, plan: Plan, tensors: Tensors) -> None:
    """Writes dq of the heads whose sums are not rounded yet."""
    heads_of_section = plan.section * plan.group
    rounded_heads = plan.rounded_sections * heads_of_section
    launch(
        round_kernel,
        (plan.padded // PREPARE_ROWS, plan.n_q_heads - rounded_heads),
        tensors.dq_sum,
        tensors.dq,
        *tensors.dq.stride()[:3],
        plan.n_head,
        rounded_heads,
        # where the last section's slot begins
        rounded_heads % (SLOTS.value * heads_of_section),
        plan.seq_q,
        plan.padded,
        gradient_scale(problem),
        HEAD_DIM=plan.head_dim,
        WIDTH=plan.width,
        BLOCK_M=PREPARE_ROWS,
        num_warps=4,
    )
