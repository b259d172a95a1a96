"""Attention of a few new queries to a long cache of keys: the keys of each query are split over the GPU.

A few queries are too few rows to fill the GPU, so their keys are split: program (b, kv head, split) takes
the queries of all heads that share the kv head, and walks the keys of its split by the recurrence of
forward.py. A second kernel merges the splits by their lse:

    lse = log sum_s e^lse_s        out = sum_s e^(lse_s - lse) out_s

The number of keys of a sequence, and the blocks that a pattern keeps, are read from GPU memory: so the launch
is the same for every token, and its CUDA graph can be replayed. A token takes a hundred small kernels: each
may be launched before the previous one has ended (programmatic dependent launch), and then waits.

Source: Dao et al., Flash-Decoding for long-context inference, 2023 (crfm.stanford.edu/2023/10/12).
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.problem import dot_precision
from kernels.tiles import Tile, choose_tile, padded_head_dim

LN2 = tl.constexpr(0.6931471805599453)
# programs per multiprocessor: enough loads in flight to fill its share of the bandwidth
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 128
# queries times heads that share a kv head: more rows than this are flash_attention's work
MAX_ROWS = 128
# rows of a matrix unit's product
MIN_ROWS = 16
# channels of a program that merges: few, so that more programs share one short kernel
MERGED_CHANNELS = 16


@triton.jit
def wait_and_let_the_next_start():
    """Waits for what the previous kernel has written; from here on the next one may be launched."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_turned(row_ptrs, channels, mask, cos, sin, TURNS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows in their dtype; with TURNS, by rotary embedding: channels i and i + D / 2 are rotated as a pair.

    sin has the sign of its channel.
    """
    x = tl.load(row_ptrs + channels, mask=mask, other=0.0)
    if TURNS:
        other_of_pair = (channels + HEAD_DIM // 2) % HEAD_DIM
        y = tl.load(row_ptrs + other_of_pair, mask=mask, other=0.0)
        x = (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["capacity"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, lengths_ptr, parts_ptr, lse_ptr,
    spans_ptr, entries_ptr, bits_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_new_b, stride_new_h,
    n_kv_head, capacity, scale_log2,
    N_QUERY: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    APPENDS: tl.constexpr, TURNS: tl.constexpr, OVERLAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row r of the tile is query r // GROUP of head kv_head * GROUP + r % GROUP.

    With APPENDS the newest key and value are not in the cache yet: the first split stores them, and the split
    that their place belongs to leaves it out of its loop and adds them at the end. With TURNS every program
    rotates the query and the newest key itself: a kernel for these few numbers would take longer.
    """
    split, n_splits = tl.program_id(0), tl.num_programs(0)
    batch = (tl.program_id(1) // n_kv_head).to(tl.int64)
    kv_head = (tl.program_id(1) % n_kv_head).to(tl.int64)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    if OVERLAPS:
        wait_and_let_the_next_start()
    # a cache that is a ring has seen more than it holds
    seen = tl.load(lengths_ptr + batch)
    length = tl.minimum(seen, capacity).to(tl.int32)

    rows = tl.arange(0, BLOCK_M)
    is_row = rows < N_QUERY * GROUP
    offs_d = tl.arange(0, BLOCK_D)
    is_channel = (offs_d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + rows % GROUP
    q_ptrs = q_ptr + batch * stride_qb + (rows // GROUP).to(tl.int64) * stride_qt + head * stride_qh
    # not used without TURNS
    cos, sin = offs_d, offs_d
    if TURNS:
        pair = batch * (HEAD_DIM // 2) + offs_d % (HEAD_DIM // 2)
        cos, sin = tl.load(cos_ptr + pair), tl.load(sin_ptr + pair)
        sin = tl.where(offs_d < HEAD_DIM // 2, -sin, sin)
    q = load_turned(
        q_ptrs[:, None], offs_d[None, :], is_row[:, None] & is_channel, cos[None, :], sin[None, :],
        TURNS, HEAD_DIM,
    )  # fmt: skip
    # the last query is at the last key
    end_key = length - (N_QUERY - 1) + rows // GROUP

    tiles_in_block: tl.constexpr = BLOCK_SIZE // BLOCK_N if BLOCK_SIZE != 0 else 1
    first_entry, n_entries, words_of_row = 0, tl.cdiv(length, BLOCK_N), bits_ptr
    if BLOCK_SIZE != 0:
        line = tl.maximum(length - 1, 0)
        first_entry = tl.load(spans_ptr + 8 * (line // BLOCK_SIZE))
        n_entries = tl.load(spans_ptr + 8 * (line // BLOCK_SIZE) + 2) - first_entry
        words_of_row = bits_ptr + line % BLOCK_SIZE * (BLOCK_SIZE // 32)
    n_tiles = n_entries * tiles_in_block
    tiles_of_split = tl.cdiv(n_tiles, n_splits)
    first_tile = split * tiles_of_split

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if APPENDS:
        new_place = (seen.to(tl.int64) - 1) % capacity
        meets_new = tl.zeros([BLOCK_N], tl.int1)
        new_k_row = new_k_ptr + batch * stride_new_b + kv_head * stride_new_h
        new_v_ptrs = new_v_ptr + batch * stride_new_b + kv_head * stride_new_h + offs_d
        new_k = load_turned(new_k_row, offs_d, offs_d < HEAD_DIM, cos, sin, TURNS, HEAD_DIM)
        new_v = tl.load(new_v_ptrs, mask=offs_d < HEAD_DIM, other=0.0)
        # an empty sequence has no place for the new key
        stores = (offs_d < HEAD_DIM) & (split == 0) & (seen > 0)
        tl.store(k_ptr + new_place * stride_kt + offs_d, new_k, mask=stores)
        tl.store(v_ptr + new_place * stride_vt + offs_d, new_v, mask=stores)
        new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale_log2
    for i in tl.range(first_tile, tl.minimum(first_tile + tiles_of_split, n_tiles)):
        if BLOCK_SIZE == 0:
            columns = i * BLOCK_N + tl.arange(0, BLOCK_N)
            is_kept = columns < length
        else:
            entry = entries_ptr + 2 * (first_entry + i // tiles_in_block)
            in_block = i % tiles_in_block * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = tl.load(entry) * BLOCK_SIZE + in_block
            tile = tl.load(entry + 1).to(tl.int64) * (BLOCK_SIZE * BLOCK_SIZE // 32)
            bits = tl.load(words_of_row + tile + in_block // 32) >> (in_block % 32)
            is_kept = (columns < length) & (bits & 1 != 0)
        if APPENDS:
            meets_new |= is_kept & (columns == new_place)
            is_kept &= columns != new_place
        visible = (columns[None, :] < end_key[:, None]) & is_kept[None, :]
        inside = is_kept[:, None] & is_channel
        offs_n = columns.to(tl.int64)[:, None]
        k = tl.load(k_ptr + offs_n * stride_kt + offs_d[None, :], mask=inside, other=0.0)  # (BLOCK_N, D)
        v = tl.load(v_ptr + offs_n * stride_vt + offs_d[None, :], mask=inside, other=0.0)  # (BLOCK_N, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # (BLOCK_M, BLOCK_N)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # -inf - (-inf) is nan: a row that has seen nothing adds zeros
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)  # (BLOCK_M, D)
        m_i = m_new

    if APPENDS:
        score = tl.where(tl.max(meets_new.to(tl.int32), 0) > 0, new_score, float("-inf"))
        m_new = tl.maximum(m_i, score)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(score - m_safe)
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + p
        acc = acc * alpha[:, None] + p[:, None] * new_v.to(tl.float32)[None, :]
        m_i = m_new

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    row_of_part = (tl.program_id(1).to(tl.int64) * n_splits + split) * (N_QUERY * GROUP) + rows
    parts_ptrs = parts_ptr + row_of_part[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(parts_ptrs, acc / l_safe[:, None], mask=is_row[:, None] & is_channel)
    tl.store(lse_ptr + row_of_part, (m_i + tl.log2(l_safe)) * LN2, mask=is_row)


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(
    parts_ptr, lse_ptr, out_ptr, n_splits, n_kv_head,
    N_QUERY: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C channels of one query of one head.

    Program (((b n_kv_head + kv_head) N_QUERY + query) GROUP + head in the group, part of the channels).
    """
    if OVERLAPS:
        wait_and_let_the_next_start()
    program = tl.program_id(0).to(tl.int64)
    row, kv_head_of_batch = program % (N_QUERY * GROUP), program // (N_QUERY * GROUP)
    splits, offs_d = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = (kv_head_of_batch * n_splits + splits) * (N_QUERY * GROUP) + row
    lse = tl.load(lse_ptr + rows, mask=splits < n_splits, other=float("-inf"))
    # loaded together with lse, not after it
    inside = (splits < n_splits)[:, None] & (offs_d < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
    largest = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    batch, kv_head = kv_head_of_batch // n_kv_head, kv_head_of_batch % n_kv_head
    head = kv_head * GROUP + row % GROUP
    out_row = (batch * N_QUERY + row // GROUP) * (n_kv_head * GROUP) + head
    tl.store(out_ptr + out_row * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def launch_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new: tuple[Tensor | None, ...],
    lengths: Tensor,
    blocks: list[Tensor],
    softmax_scale: float,
) -> Tensor:
    """out (B, Tq, H, D). new: the newest key and value, cos and sin, each None if there is none."""
    batch, n_query, n_head, head_dim = q.shape
    capacity, n_kv_head = k.shape[1:3]
    group = n_head // n_kv_head
    block_size = blocks[2].shape[1] if blocks else 0
    n_rows = n_query * group
    tile = with_rows(choose_tile("decode", head_dim, q.dtype, q.device, block_size=block_size), n_rows)
    n_splits = choose_splits(batch * n_kv_head, triton.cdiv(capacity, tile.block_n), q.device)
    # contiguous, as the kernel reads them
    lengths = lengths.contiguous()
    parts = torch.empty(batch * n_kv_head, n_splits, n_rows, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch * n_kv_head, n_splits, n_rows, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = {"N_QUERY": n_query, "GROUP": group, "HEAD_DIM": head_dim}
    overlaps = can_overlap(q.device)
    # other compilers do not know this option
    launch = {"OVERLAPS": overlaps} | ({"launch_pdl": True} if overlaps else {})
    new_k, _, cos, _ = new
    new_strides = (0, 0) if new_k is None else (new_k.stride(0), new_k.stride(2))
    decode_kernel[n_splits, batch * n_kv_head](
        q, k, v, *new, lengths, parts, lse, *(blocks or (None, None, None)),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *new_strides,
        n_kv_head, capacity, softmax_scale * math.log2(math.e),
        BLOCK_SIZE=block_size, PRECISION=dot_precision(q), APPENDS=new_k is not None, TURNS=cos is not None,
        BLOCK_D=padded_head_dim(head_dim), **launch, **shape, **tile.options(),
    )  # fmt: skip
    merge_kernel[batch * n_kv_head * n_rows, triton.cdiv(head_dim, MERGED_CHANNELS)](
        parts, lse, out, n_splits, n_kv_head,
        BLOCK_S=triton.next_power_of_2(n_splits), BLOCK_C=MERGED_CHANNELS, **launch, **shape,
    )  # fmt: skip
    return out


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched before the previous one has ended: on NVIDIA's GPUs since Hopper."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def choose_splits(n_heads: int, n_tiles: int, device: torch.device) -> int:
    """The number of splits for each of n_heads (over all batches), so that together they fill the GPU."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR
    if device.type == "cuda":
        wanted *= torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // n_heads, n_tiles, MAX_SPLITS))


def with_rows(tile: Tile, n_rows: int) -> Tile:
    """The tile for this many rows; more than one matrix unit's rows need more registers than a warp has."""
    block_m = max(MIN_ROWS, triton.next_power_of_2(n_rows))
    least = 1 if block_m == MIN_ROWS else 8 if block_m == MAX_ROWS else 4
    return tile._replace(block_m=block_m, num_warps=max(tile.num_warps, least))
