"""Loading and storing (ROWS, BLOCK_D) tiles of one head of a (B, T, H, D) tensor, by strides."""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(ptr, first_row, stride_t, stride_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows first_row ... first_row + ROWS - 1 of the head that ptr points to."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    # only the start of a tile can lie beyond 2**31 elements
    return (
        ptr + tl.cast(first_row, tl.int64) * stride_t + rows * stride_t + columns * stride_d
    )  # (ROWS, BLOCK_D)


@triton.jit
def load_tile(
    ptr,
    first_row,
    n_rows,
    stride_t,
    stride_d,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Rows of a head; zeros outside of the tensor."""
    pointers = tile_pointers(ptr, first_row, stride_t, stride_d, ROWS, BLOCK_D)
    inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if CHECK_ROWS:
        inside = inside & (first_row + tl.arange(0, ROWS) < n_rows)[:, None]
    if CHECK_ROWS or HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=inside, other=0.0)  # (ROWS, BLOCK_D)
    else:
        tile = tl.load(pointers)  # (ROWS, BLOCK_D)
    return tile


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
