"""Heads of 136 to 256 in two parts: the first 128 channels, and the REST, which are 64 or 128.

Triton's tensors have powers of two, so 192 channels are two of them. In shared memory a head has 256. Heads
of up to 192 leave out the last 64, which are neither part of a product nor copied: a copy of zeros alone
takes as long as one of numbers. Of heads that are not wide REST is 0.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from kernels.hopper.primitives import copy_out, thread_barrier
from kernels.hopper.softmax import rescale

# channels of the first part
FIRST = gl.constexpr(128)
# layouts of 64 rows of it, and of a left operand in registers
FIRST_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LEFT_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, FIRST_LAYOUT, 2))


@gluon.jit
def zeros_of_channels(ROWS: gl.constexpr, REST: gl.constexpr):
    """(ROWS, 128) and (ROWS, REST)."""
    REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    first = gl.full([ROWS, FIRST], 0.0, gl.float32, FIRST_LAYOUT)
    return first, gl.full([ROWS, REST], 0.0, gl.float32, REST_LAYOUT)


@gluon.jit
def over_channels(a, b, x, REST: gl.constexpr, use_acc=True):
    """Issues x + a b^T, or a b^T, as two products; a, b: (rows, 256) in shared memory."""
    first_a, rest_a = a.slice(0, FIRST, 1), a.slice(FIRST, REST, 1)
    first_b, rest_b = b.slice(0, FIRST, 1), b.slice(FIRST, REST, 1)
    x = warpgroup_mma(first_a, first_b.permute((1, 0)), x, use_acc=use_acc, is_async=True)
    return warpgroup_mma(rest_a, rest_b.permute((1, 0)), x, is_async=True)


@gluon.jit
def for_channels(a, b, sums):
    """Issues sums + a b as two products; a: in LEFT_LAYOUT; b: (rows, 256) in shared memory."""
    first, rest = sums
    REST: gl.constexpr = rest.shape[1]
    rest_a = gl.convert_layout(a, gl.DotOperandLayout(0, rest.type.layout, 2))
    first = warpgroup_mma(a, b.slice(0, FIRST, 1), first, is_async=True)
    return first, warpgroup_mma(rest_a, b.slice(FIRST, REST, 1), rest, is_async=True)


@gluon.jit
def scale_rows(sums, factor):
    """sums, each row times its factor, (ROWS,)."""
    first, rest = sums
    return rescale(first, factor), rescale(rest, factor)


@gluon.constexpr_function
def copies_of(REST):
    """How many copies bring rows of a head: three of 64 channels, where the last 64 of 256 are left out."""
    return 3 if REST == 64 else 1


@gluon.jit
def copy_in(desc, batch, head, row, full, buffer, REST: gl.constexpr):
    """Copies rows of a head into a buffer (1, 1, rows, D), as many channels at a time as desc has."""
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    for i in gl.static_range(copies_of(REST)):
        part = buffer.slice(i * WIDTH, WIDTH, 3)
        tma.async_copy_global_to_shared(desc, [batch, head, row, i * WIDTH], full, part)


@gluon.jit
def copy_out_part(desc, batch, head, row, x, buffer, CHANNEL: gl.constexpr):
    """Rounds and copies out the channels x of rows of a head, as many at a time as desc's tiles have."""
    if x.shape[1] == desc.block_type.shape[3]:
        copy_out(desc, [batch, head, row, CHANNEL], x, buffer, 0)
    else:
        # a thread holds both halves of its rows
        first, second = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        copy_out_part(desc, batch, head, row, first, buffer, CHANNEL)
        copy_out_part(desc, batch, head, row, second, buffer, CHANNEL + x.shape[1] // 2)


@gluon.jit
def copy_out_channels(desc, batch, head, row, sums, buffer):
    """Rounds and copies out rows of a head through a buffer of fewer channels."""
    copy_out_part(desc, batch, head, row, sums[0], buffer, 0)
    copy_out_part(desc, batch, head, row, sums[1], buffer, FIRST)


@gluon.jit
def copy_out_at_once(desc, batch, head, row, sums, buffer):
    """The same through a buffer of 256 channels."""
    first, rest = sums
    tma.store_wait(0)
    thread_barrier()
    rows = buffer.reshape([first.shape[0], 256])
    rows.slice(0, FIRST, 1).store(first.to(desc.dtype))
    rows.slice(FIRST, rest.shape[1], 1).store(rest.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0], buffer)
