"""Loading and storing (ROWS, BLOCK_D) tiles of one head of a (B, T, H, D) tensor.

A source is a pointer to the head, read by strides, or, where TMA is True, a tensor descriptor of the whole
tensor: then one thread asks the copy engine of an NVIDIA GPU (sm_90 and later) for the tile, which costs no
registers for addresses, and what lies outside of the tensor arrives as zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import Descriptor
from kernels.layouts import bulk_strides

# most rows, and most channels, of a tile
MAX_EXTENT = 256


@triton.jit
def tile_pointers(ptr, first_row, stride_t, stride_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows first_row ... first_row + ROWS - 1 of the head that ptr points to."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    # only the start of a tile can lie beyond 2**31 elements, see in_reach
    return (
        ptr + tl.cast(first_row, tl.int64) * stride_t + rows * stride_t + columns * stride_d
    )  # (ROWS, BLOCK_D)


@triton.jit
def load_tile(
    source, batch, head, first_row, n_rows, stride_t, stride_d,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS:
    tl.constexpr,
):  # fmt: skip
    """Rows of a head; zeros outside of the tensor."""
    if TMA:
        tile = source.load(
            [tl.cast(batch, tl.int32), tl.cast(head, tl.int32), tl.cast(first_row, tl.int32), 0]
        )
        tile = tl.reshape(tile, (ROWS, BLOCK_D))
    else:
        pointers = tile_pointers(source, first_row, stride_t, stride_d, ROWS, BLOCK_D)
        inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        if CHECK_ROWS:
            inside = inside & (first_row + tl.arange(0, ROWS) < n_rows)[:, None]
        if CHECK_ROWS or HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=inside, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile  # (ROWS, BLOCK_D)


@triton.jit
def in_registers(tile, first_row, n_rows, ROWS: tl.constexpr):
    """A loaded tile as a computed value: the rows after the last one are set to zero once more.

    Triton leaves a loaded tile in shared memory. A computed left operand stays in registers, and the product
    then reads half as much shared memory.
    """
    rows = first_row + tl.arange(0, ROWS)
    return tl.where(rows[:, None] < n_rows, tile, 0.0)


@triton.jit
def anew(x, line):
    """x, as a sum that the compiler cannot simplify to x.

    line: not negative, and different in each iteration of a loop. What depends on x is then recomputed in
    each iteration, where computing it once would take registers that the loop lacks.
    """
    return x + (line >> 31)


@triton.jit
def store_tile(
    ptr,
    tile,
    first_row,
    n_rows,
    stride_t,
    stride_d,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes the rows of a head that exist."""
    pointers = tile_pointers(ptr, first_row, stride_t, stride_d, ROWS, BLOCK_D)
    inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :] & (first_row + tl.arange(0, ROWS) < n_rows)[:, None]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=inside)


def in_reach(x: Tensor) -> Tensor:
    """x (B, T, H, D), or a copy if its strides are so large that offsets within a tile would pass 2**31."""
    return x if max(x.stride(1), x.stride(3)) < 2**31 // MAX_EXTENT else x.contiguous()


def head_descriptor(x: Tensor, rows: int, block_d: int) -> Descriptor:
    """Describes (B, T, H, D) as (B, H, T, D), to be read in tiles of `rows` rows of one head."""
    batch, seq, n_head, head_dim = x.shape
    stride_b, stride_t, stride_h = bulk_strides(x)
    shape, block = (batch, n_head, seq, head_dim), (1, 1, rows, block_d)
    return Descriptor(x, shape, (stride_b, stride_h, stride_t, 1), block)
