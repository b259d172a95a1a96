"""What the Hopper kernels need beyond Gluon's API: rings, barriers, bulk reduce-add, renamed functions."""

import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate

# gl.thread_barrier until Triton 3.6, gl.barrier from 3.7
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def reduce_add_to_global(desc, coordinates, source, _semantic=None):
    """Adds a tile in shared memory to global memory: so far only Triton's C++ exposes this."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, handles, source.handle
    )


@gluon.jit
def copy_out(desc, coordinates, x, buffer, PENDING: gl.constexpr):
    """Rounds a tile into a buffer and copies it out, once at most PENDING earlier copies are unread."""
    tma.store_wait(PENDING)
    thread_barrier()
    buffer.reshape([x.shape[0], x.shape[1]]).store(x.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(desc, coordinates, buffer)


@gluon.jit
def fragments(x):
    """The 64 x 64 result of a product, reordered so that each thread holds four adjacent elements.

    So a thread stores 16 bytes at once, without bank conflicts. Rounding the sum of dq restores the order.
    """
    x = gl.reshape(x, [4, 2, 8, 8, 4, 2])  # rows: warp, half, eighth; columns: eight, pair, one
    return gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), [64, 64])


@gluon.constexpr_function
def line_layout(layout, dim, rank):
    """The layout of dimension `dim` alone."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def index_of(N: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to N - 1 along dimension DIM of a tensor of rank RANK."""
    x = gl.arange(0, N, layout=line_layout(LAYOUT, DIM, RANK))
    for other in gl.static_range(RANK):
        if other != DIM:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def settle(x):
    """x, float32, put into registers of its own here, as the accumulator that a later product starts from."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def opaque(x):
    """x, int32, hidden from the compiler, so that it cannot hoist what depends on x out of a loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def peek(ptr):
    """The current value of an int32 that others change. Unlike `acquire`, this does not invalidate L1."""
    address = ptr.to(gl.int64)
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquire(ptr):
    """The same; what the others wrote before they released it is visible from here on."""
    address = ptr.to(gl.int64)
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def with_a_result(instructions, *numbers):
    return instructions.format(*numbers) + " mov.u32 $0, $1;"


@gluon.jit
def issue(token, ASM: gl.constexpr):
    """Runs instructions that have no result; token is any scalar, here and below."""
    gl.inline_asm_elementwise(ASM, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pause(token):
    """Sleeps for a while, so that other warps can issue."""
    issue(token, with_a_result("nanosleep.u32 100;"))


@gluon.jit
def fence_proxies(token):
    """Orders earlier stores, own or acquired, before later bulk copies."""
    issue(token, with_a_result("fence.proxy.async;"))


@gluon.jit
def copies_arrived(token, PENDING: gl.constexpr):
    """Waits until all but the last PENDING copies to global memory have arrived, and fences the proxies.

    tma.store_wait only waits until they have read shared memory.
    """
    issue(token, with_a_result("cp.async.bulk.wait_group {}; fence.proxy.async;", PENDING))


@gluon.constexpr_function
def pack_asm(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def pack_pairs(x, dtype: gl.constexpr):
    """(M, N) float32 rounded to 16 bits, adjacent columns packed into one int32: (M, N // 2).

    A 16-bit tensor carried through a loop would be unpacked and repacked in each step.
    """
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return pack(low, high, dtype)


@gluon.jit
def pack(low, high, dtype: gl.constexpr):
    """Two float32 tensors, rounded to 16 bits and packed into one of int32."""
    ASM: gl.constexpr = pack_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def not_negative_asm(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return "{.reg .b32 zero; mov.b32 zero, 0; max.NaN." + kind + " $0, $1, zero;}"


@gluon.jit
def not_negative(pairs, dtype: gl.constexpr):
    """The numbers that pack_pairs packed, with 0 in place of negative ones."""
    ASM: gl.constexpr = not_negative_asm(dtype)
    return gl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The (M, N) 16-bit tensor that pack_pairs packed."""
    low, high = x.to(gl.int16), (x >> 16).to(gl.int16)
    pairs = gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(pairs.to(dtype, bitcast=True), layout)


@gluon.constexpr_function
def widen_asm(dtype):
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"


@gluon.jit
def widen_pairs(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The (M, N) numbers that pack_pairs packed, float32 again: packed, they took half the registers."""
    # not pure: otherwise the compiler moves it up to the packing, and they take all the registers
    ASM: gl.constexpr = widen_asm(dtype)
    low, high = gl.inline_asm_elementwise(
        ASM, "=f,=f,r", [x], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2]), layout)


@gluon.jit
def named_barrier_sync(token, ID: gl.constexpr, THREADS: gl.constexpr):
    """Waits until THREADS threads have reached barrier ID. Triton itself uses 0 to 5."""
    issue(token, with_a_result("bar.sync {}, {};", ID, THREADS))


@gluon.jit
def named_barrier_arrive(token, ID: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at barrier ID without waiting."""
    issue(token, with_a_result("bar.arrive {}, {};", ID, THREADS))


@gluon.constexpr_function
def any_exceeds_asm(limit, barrier):
    return (
        f"{{.reg .pred p, q; setp.gtu.f32 p, $2, {limit}; setp.gtu.or.f32 p, $3, {limit}, p; "
        f"bar.red.or.pred q, {barrier}, 128, p; selp.b32 $0, 1, 0, q; mov.b32 $1, $0;}}"
    )


@gluon.jit
def any_exceeds(x, LIMIT: gl.constexpr, BARRIER: gl.constexpr):
    """1 for all if any number of x (64,) exceeds LIMIT or is nan, else 0; x is a row's value of a product."""
    # two numbers a thread
    ASM: gl.constexpr = any_exceeds_asm(LIMIT, BARRIER)
    return gl.inline_asm_elementwise(ASM, "=r,=r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2)


def record(cls):
    """Turns a class into a Triton aggregate, constructed from its fields in their order."""
    names = tuple(cls.__annotations__)
    constants = tuple(kind is gl.constexpr for kind in cls.__annotations__.values())

    @gluon.constexpr_function
    def __init__(self, *values):  # noqa: N807
        for i in range(len(names)):
            setattr(self, names[i], gl.constexpr(values[i]) if constants[i] else values[i])

    cls.__init__ = __init__
    return _aggregate(cls)


@record
class Ring:
    """The full and empty barriers of STAGES buffers in a ring: use i has buffer i % STAGES."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def fill(self, i):
        """The buffer of use i and its full barrier, once every consumer has released use i - STAGES."""
        stage = i % self.STAGES
        mbarrier.wait(self.empty.index(stage), ((i // self.STAGES) & 1) ^ 1)
        return stage, self.full.index(stage)

    @gluon.jit
    def take(self, i, wanted=True):
        """The buffer of use i, once its bytes have arrived; if not `wanted`, at once, whatever it holds."""
        stage = i % self.STAGES
        mbarrier.wait(self.full.index(stage), (i // self.STAGES) & 1, pred=wanted)
        return stage

    @gluon.jit
    def release(self, i):
        """Returns the buffer of use i to the producer, once every warp of this partition is done with it."""
        thread_barrier()
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1)


@gluon.jit
def make_numbers(STAGES: gl.constexpr):
    """Shared memory for a tile's number beside each of its buffers: (STAGES, 1) int32."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [STAGES, 1], LAYOUT)


@gluon.jit
def announce(number, i, WARPS: gl.constexpr = 1):
    """Writes a number for other partitions; a tile's number before the barrier of its rows is armed."""
    number.store(gl.full([1], i, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    thread_barrier()


@gluon.jit
def announced(number, WARPS: gl.constexpr = 4):
    """The number that another partition announced."""
    return gl.max(number.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def make_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1):
    """A ring, each buffer of which PRODUCERS partitions fill together, and CONSUMERS release."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=PRODUCERS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return Ring(full, empty, STAGES)
