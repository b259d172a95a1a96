"""The head of a language model and its loss: the mean of log(sum(exp(x))) - x[target], rows x = hidden W^T.

The logits are the largest tensor of a step, so only CHUNK rows of them exist at a time, in a buffer that
every chunk reuses. A kernel turns each row, in place, into the gradient of its loss, softmax(x) -
onehot(target), and two matrix products turn these rows into the gradients of hidden and W. All of this
happens in the forward pass; the backward pass only scales the gradients. How often the softmax reads a row
depends on the GPU:

    Hopper, bfloat16    never: the product writes exponentials in its place (cross_entropy_epilogue.py)
    Hopper, otherwise   once: a row stays in shared memory between its passes (cross_entropy_hopper.py)
    elsewhere           twice, first for a running maximum and the sum relative to it (Milakov and
                        Gimelshein, arXiv:1805.02867)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cross_entropy_epilogue, hopper
from kernels.checks import check_device, check_is_int, check_is_tensor
from kernels.registration import below_autocast, on_its_gpu, refuse_forward_derivatives

LOG2E = tl.constexpr(1.4426950408889634)
# rows whose logits exist at the same time: 0.8 GiB in bf16 with GPT-2's vocabulary; 32K rows are four chunks
CHUNK = 8448
BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    n_columns,
    vocab_size,
    BLOCK: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
):
    """One row; columns from vocab_size on pad the vocabulary: they get no probability and no gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n_columns
    offs = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    target_logit = tl.load(logits_ptr + target).to(tl.float32)
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    for start in range(0, n_columns, BLOCK):
        columns = start + offs
        x = tl.load(logits_ptr + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
        x = tl.where(columns < vocab_size, x, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(x, 0))
        l_i = l_i * tl.exp2((m_i - m_new) * LOG2E) + tl.sum(tl.exp2((x - m_new) * LOG2E), 0)
        m_i = m_new
    lse = m_i + tl.log(l_i)
    tl.store(losses_ptr + row, lse - target_logit)
    if WITH_GRADIENT:
        for start in range(0, n_columns, BLOCK):
            columns = start + offs
            inside = columns < n_columns
            x = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            dx = tl.exp2((x - lse) * LOG2E) - tl.where(columns == target, 1.0, 0.0)
            dx = tl.where(columns < vocab_size, dx, 0.0)
            tl.store(logits_ptr + columns, dx.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab_size: int, with_gradient: bool
) -> None:
    """Writes the loss of each row of logits (N, V'); with_gradient overwrites the row with its gradient."""
    n_rows, n_columns = logits.shape
    # imported only where Gluon is known to exist
    if logits.element_size() == 2 and hopper.is_hopper(logits.device) and hopper.build_error() is None:
        from kernels.cross_entropy_hopper import cross_entropy_in_shared_memory, fits

        if fits(n_columns, vocab_size):
            cross_entropy_in_shared_memory(logits, targets, losses, vocab_size, with_gradient)
            return
    cross_entropy_kernel[(n_rows,)](
        logits, targets, losses, n_columns, vocab_size,
        BLOCK=BLOCK, WITH_GRADIENT=with_gradient, num_warps=NUM_WARPS,
    )  # fmt: skip


@torch.library.custom_op("nanoflash::linear_cross_entropy", mutates_args=())
@on_its_gpu
@below_autocast
def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    chunk: int,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean loss, and the gradients of the summed loss for hidden and weight, empty if not asked for.

    The last tensor, float32, is empty or holds a factor per row, by which the gradient of hidden has yet to
    be multiplied: the next one to read that gradient does so at no cost.
    """
    n_rows = hidden.shape[0]
    # out of range, a kernel would read another address and give a plausible loss; like PyTorch's own check,
    # this one does not wait for the GPU
    torch._assert_async(
        ((targets >= 0) & (targets < vocab_size)).all(),
        f"targets must be from 0 to {vocab_size - 1}, got others: leave out rows that are not to count, "
        "whose targets may be -100 in PyTorch, or use F.cross_entropy of the logits",
    )
    cast, targets = weight.to(hidden.dtype), targets.contiguous()
    losses = torch.empty(n_rows, dtype=torch.float32, device=hidden.device)
    dhidden, dweight, factors = _gradients(hidden, weight, of_hidden, of_weight)
    in_epilogue = factors.numel() > 0
    if in_epilogue:
        # the epilogue's kernels read contiguous rows
        hidden, cast = hidden.contiguous(), cast.contiguous()
        mask = cross_entropy_epilogue.padding_mask(weight.shape[0], vocab_size, hidden.device)
    buffer = torch.empty(min(chunk, n_rows), weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for start in range(0, n_rows, chunk):
        rows = slice(start, min(start + chunk, n_rows))
        logits, part = buffer[: rows.stop - start], hidden[rows]
        if in_epilogue:
            part, factors[rows] = cross_entropy_epilogue.losses_and_exponentials(
                part, cast, targets[rows], mask, losses[rows], logits
            )
        else:
            torch.mm(part, cast.T, out=logits)
            cross_entropy_(logits, targets[rows], losses[rows], vocab_size, of_hidden or of_weight)
        if of_hidden:
            torch.mm(logits, cast, out=dhidden[rows])
        if of_weight and start == 0:
            _mm(logits.T, part, out=dweight)
        elif of_weight:
            _add_mm(logits.T, part, out=dweight)
    return losses.mean(), dhidden, dweight, factors


@linear_cross_entropy_forward.register_fake
def _(hidden, weight, targets, vocab_size, chunk, of_hidden, of_weight):
    return hidden.new_empty((), dtype=torch.float32), *_gradients(hidden, weight, of_hidden, of_weight)


def _gradients(hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool) -> tuple[Tensor, ...]:
    """What the operator returns besides the loss, not filled yet."""
    # a sum over many rows, which becomes a mean only in the backward pass, may exceed float16's 65504
    summed = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    asked = ((hidden, hidden.dtype, of_hidden), (weight, summed, of_weight))
    gradients = (
        torch.empty_like(x, dtype=dtype) if wanted else x.new_empty(0, dtype=dtype)
        for x, dtype, wanted in asked
    )
    in_epilogue = (of_hidden or of_weight) and cross_entropy_epilogue.fits(hidden, weight)
    factors = hidden.new_empty(hidden.shape[0] if in_epilogue else 0, dtype=torch.float32)
    return *gradients, factors


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, summed in float32 if that is out's dtype."""
    if _sums_in_float32(a, out):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _add_mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a b, summed in float32 if that is out's dtype; where it can, the product itself adds to out."""
    if _sums_in_float32(a, out):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += torch.mm(a, b)


def _sums_in_float32(a: Tensor, out: Tensor) -> bool:
    """Whether PyTorch can multiply matrices like a and store the sums in out without rounding them."""
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and out.dtype == torch.float32


def _save_for_backward(ctx, inputs, output):
    ctx.n_rows, (ctx.of_hidden, ctx.of_weight) = inputs[0].shape[0], inputs[-2:]
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    # gradients are enabled here only with create_graph=True
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "linear_cross_entropy has no second derivative: use F.cross_entropy of the logits where you need "
            "one (double backward, gradient penalties), or leave out create_graph=True"
        )
    if dloss is None:
        return (None,) * 7
    dhidden, dweight, factors = ctx.saved_tensors
    # as a matrix: a tensor without dimensions would be rounded to the gradient's 16 bits first, on a GPU
    scale = (dloss / ctx.n_rows)[None, None]
    of_rows = scale * factors[:, None] if factors.shape[0] else scale
    dhidden = (dhidden * of_rows).to(dhidden.dtype) if ctx.of_hidden else None
    dweight = (dweight * scale).to(ctx.weight_dtype) if ctx.of_weight else None
    return dhidden, dweight, None, None, None, None, None


linear_cross_entropy_forward.register_autograd(_backward, setup_context=_save_for_backward)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int = CHUNK
) -> Tensor:
    """The mean cross-entropy in nats, () float32, of targets (N,) int64 under logits hidden weight^T.

    hidden: (N, C), N at least 1. weight: (V', C), usually float32; rows from vocab_size on are padding. The
    products run in hidden's dtype. The gradient of weight is summed in weight's dtype, or in float32 if that
    is float16. Raises ValueError for other shapes, for integers, for several devices, and without a GPU,
    RuntimeError for targets that are not from 0 to vocab_size - 1, on a GPU when the host next waits for it,
    and NotImplementedError for second and forward derivatives and for gradients in transforms of torch.func.
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        check_is_tensor(name, x)
    for name, x in (("vocab_size", vocab_size), ("chunk", chunk)):
        check_is_int(name, x)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.shape[0] == 0:
        raise ValueError(
            "hidden must be (N, C), N at least 1, and weight (V', C), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    for name, x in (("hidden", hidden), ("weight", weight)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a floating-point dtype, got {x.dtype}: call .float()")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be one int64 for each of the {hidden.shape[0]} rows of hidden, got "
            f"{tuple(targets.shape)} {targets.dtype}"
        )
    # a kernel would read addresses of another device
    for name, x in (("weight", weight), ("targets", targets)):
        if x.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device}, as hidden, got {x.device}: move it")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}: leave it out for {CHUNK}")
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(
            f"vocab_size must be from 1 to the {weight.shape[0]} rows of weight, got {vocab_size}"
        )
    check_device("hidden", hidden, instead="F.cross_entropy of the logits")
    refuse_forward_derivatives("linear_cross_entropy", "use F.cross_entropy of the logits", hidden, weight)
    # inside vmap a tensor does not tell that it requires a gradient, which would be lost without a word. Not
    # asked of a compiler: one that does not know the question would break the graph of a training step
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() and transformed:
        raise NotImplementedError(
            "linear_cross_entropy has no gradient in transforms of torch.func (grad, vjp, vmap): use "
            "torch.autograd.grad, F.cross_entropy of the logits, or torch.no_grad() if none is needed"
        )
    wanted = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    return linear_cross_entropy_forward(hidden, weight, targets, vocab_size, chunk, *wanted)[0]
