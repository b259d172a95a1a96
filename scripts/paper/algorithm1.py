"""The paper's Algorithm 1 as it is printed: blocks of keys outside, blocks of queries inside.

A teaching kernel, forward only. For each block of keys it reads every block of queries with its partial
output, and writes that back updated, so that out, l and m travel to memory and back once for each block of
keys; larger blocks mean fewer journeys (Figure 2, middle). Our own kernels, like FlashAttention-2, exchange
the two loops and write out once.

    s = tau q k^T        m~ = max_j s_j        p~ = e^(s - m~)        l~ = sum_j p~_j
    m' = max(m, m~)      l' = e^(m - m') l + e^(m~ - m') l~
    out' = (l e^(m - m') out + e^(m~ - m') p~ v) / l'

One program owns a head. Source: arXiv:2205.14135v2, Algorithm 1, with powers of two in place of those of e.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# the paper's B_r = min(B_c, d), at head_dim 64
BLOCK_M = 64
# warps by the keys of a block; larger blocks of scores do not fit into the registers
NUM_WARPS = {32: 4, 64: 4, 128: 4, 256: 8}


@triton.jit
def algorithm1_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, l_ptr, m_ptr, seq_len, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * seq_len
    offs_d = tl.arange(0, HEAD_DIM)
    for n in range(0, seq_len, BLOCK_N):
        keys = (first_row + n + tl.arange(0, BLOCK_N))[:, None] * HEAD_DIM + offs_d
        k = tl.load(k_ptr + keys)  # (BLOCK_N, D)
        v = tl.load(v_ptr + keys)  # (BLOCK_N, D)
        for m in range(0, seq_len, BLOCK_M):
            rows = first_row + m + tl.arange(0, BLOCK_M)
            queries = rows[:, None] * HEAD_DIM + offs_d
            # .cg bypasses the L1 cache, which the algorithm does not count on
            q = tl.load(q_ptr + queries, cache_modifier=".cg")  # (BLOCK_M, D)
            # before the first block of keys nothing is known, and nothing is read
            known = n > 0
            m_i = tl.load(m_ptr + rows, mask=known, other=float("-inf"), cache_modifier=".cg")
            l_i = tl.load(l_ptr + rows, mask=known, other=0.0, cache_modifier=".cg")
            out = tl.load(out_ptr + queries, mask=known, other=0.0, cache_modifier=".cg")
            out = out.to(tl.float32)  # (BLOCK_M, D)
            scores = tl.dot(q, tl.trans(k)) * scale_log2  # (BLOCK_M, BLOCK_N)
            m_block = tl.max(scores, 1)
            p = tl.exp2(scores - m_block[:, None])  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m_i, m_block)
            alpha, beta = tl.exp2(m_i - m_new), tl.exp2(m_block - m_new)
            l_new = alpha * l_i + beta * tl.sum(p, 1)
            block_out = tl.dot(p.to(v.dtype), v)  # (BLOCK_M, D)
            out = ((l_i * alpha)[:, None] * out + beta[:, None] * block_out) / l_new[:, None]
            tl.store(out_ptr + queries, out.to(out_ptr.dtype.element_ty))
            tl.store(l_ptr + rows, l_new)
            tl.store(m_ptr + rows, m_new)
        # another thread may read what this one wrote
        tl.debug_barrier()


def algorithm1(q: Tensor, k: Tensor, v: Tensor, block_n: int) -> Tensor:
    """Full attention (B, T, H, D) by Algorithm 1 with blocks of block_n keys; q, k, v of one shape, 16 bits.

    Raises ValueError for lengths that the blocks do not divide.
    """
    batch, seq_len, heads, _ = q.shape
    if block_n not in NUM_WARPS:
        raise ValueError(f"block_n must be one of {', '.join(map(str, NUM_WARPS))}, got {block_n}")
    if seq_len % max(BLOCK_M, block_n):
        raise ValueError(f"T must be a multiple of {max(BLOCK_M, block_n)}, got {seq_len}")
    # the kernel expects the rows of a head one after the other in memory
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    l_i = torch.empty(batch, heads, seq_len, dtype=torch.float32, device=q.device)
    launch(q, k, v, out, l_i, torch.empty_like(l_i), block_n)
    return out.transpose(1, 2)


def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, l_i: Tensor, m_i: Tensor, block_n: int) -> None:
    """The kernel alone, on contiguous (B, H, T, D) and (B, H, T)."""
    batch, heads, seq_len, head_dim = q.shape
    algorithm1_kernel[batch * heads,](
        q, k, v, out, l_i, m_i, seq_len, head_dim**-0.5 * math.log2(math.e),
        HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=block_n, num_warps=NUM_WARPS[block_n], num_stages=2,
    )  # fmt: skip
