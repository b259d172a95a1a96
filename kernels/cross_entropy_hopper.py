"""The loss of a row of logits and its gradient, in Gluon: the row stays in shared memory between passes."""

import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

LOG2E = gl.constexpr(1.4426950408889634)
NUM_WARPS = 8
# elements that all threads copy by one instruction, 16 bytes each
BLOCK = NUM_WARPS * 32 * 8
# shared memory of a thread block: two fit on a multiprocessor, one loads while the other computes
MOST_BYTES = 113 * 1024


@gluon.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, n_columns, vocab_size,
    N_BLOCKS: gl.constexpr, BLOCK: gl.constexpr, WITH_GRADIENT: gl.constexpr,
):  # fmt: skip
    """One row; columns from vocab_size on, all in the last BLOCK, get no probability and no gradient."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    dtype: gl.constexpr = logits_ptr.dtype.element_ty
    logits_ptr += gl.program_id(0).to(gl.int64) * n_columns
    offs = gl.arange(0, BLOCK, layout=LAYOUT)
    row = gl.allocate_shared_memory(dtype, [N_BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(N_BLOCKS):
        columns = i * BLOCK + offs
        async_copy.async_copy_global_to_shared(row.index(i), logits_ptr + columns, mask=columns < n_columns)
        async_copy.commit_group()
    target = gl.load(targets_ptr + gl.program_id(0))
    target_logit = gl.load(logits_ptr + target).to(gl.float32)

    m_i = gl.full([BLOCK], float("-inf"), gl.float32, LAYOUT)
    for i in gl.static_range(N_BLOCKS):
        async_copy.wait_group(N_BLOCKS - 1 - i)
        x = row.index(i).load(LAYOUT).to(gl.float32)
        if i == N_BLOCKS - 1:
            x = gl.where(i * BLOCK + offs < vocab_size, x, float("-inf"))
        m_i = gl.maximum(m_i, x)
    m_i = gl.max(m_i, 0) * LOG2E
    l_i = gl.full([BLOCK], 0.0, gl.float32, LAYOUT)
    for i in gl.static_range(N_BLOCKS):
        x = row.index(i).load(LAYOUT).to(gl.float32)
        if i == N_BLOCKS - 1:
            x = gl.where(i * BLOCK + offs < vocab_size, x, float("-inf"))
        l_i += gl.exp2(x * LOG2E - m_i)
    lse_log2 = m_i + gl.log2(gl.sum(l_i, 0))
    gl.store(losses_ptr + gl.program_id(0), lse_log2 / LOG2E - target_logit)

    if WITH_GRADIENT:
        for i in gl.static_range(N_BLOCKS):
            columns = i * BLOCK + offs
            x = row.index(i).load(LAYOUT).to(gl.float32)
            dx = gl.exp2(x * LOG2E - lse_log2) - gl.where(columns == target, 1.0, 0.0)
            if i == N_BLOCKS - 1:
                dx = gl.where(columns < vocab_size, dx, 0.0)
            gl.store(logits_ptr + columns, dx.to(dtype), mask=columns < n_columns)


def fits(n_columns: int, vocab_size: int) -> bool:
    """Whether 16-bit rows fit, start at multiples of 16 bytes, and are padded in their last BLOCK only."""
    n_blocks = triton.cdiv(n_columns, BLOCK)
    return n_blocks * BLOCK * 2 <= MOST_BYTES and n_columns % 8 == 0 and vocab_size > (n_blocks - 1) * BLOCK


def cross_entropy_in_shared_memory(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab_size: int, with_gradient: bool
) -> None:
    """As cross_entropy.cross_entropy_, for rows that `fits` takes."""
    n_rows, n_columns = logits.shape
    cross_entropy_kernel[(n_rows,)](
        logits, targets, losses, n_columns, vocab_size,
        N_BLOCKS=triton.cdiv(n_columns, BLOCK), BLOCK=BLOCK, WITH_GRADIENT=with_gradient, num_warps=NUM_WARPS,
    )  # fmt: skip
