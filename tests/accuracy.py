"""The one tolerance rule: a kernel's error may be at most twice PyTorch's own in the same dtype.

    max|x - ref| <= 2 max|pt - ref| + 2 max|(ref + 0.3 - 0.3) - ref|

x is ours, pt is attention_reference in the inputs' dtype, ref the same in float64 on the same inputs. The
last term is about one unit in the last place of that dtype, for results where PyTorch happens to be exact. It
is the rule of the flash-attention package (tests/cute), with a float64 instead of a float32 reference. In
float32 both errors are a few roundings of sums in different orders, and either may be zero by luck: there the
limit is three times PyTorch's error plus 2e-6 (lse is float32 for all dtypes).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import block_masks
from kernels.block_mask import BlockMask
from kernels.reference import attention_reference

NAMES = ("out", "lse", "dq", "dk", "dv")


def random_qkv(
    batch: int,
    seq_q: int,
    seq_k: int,
    n_head: int,
    n_kv_head: int,
    head_dim: int,
    dtype,
    device,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v that require gradients; the logits' standard deviation is `scale`."""

    def draw(seq: int, heads: int, factor: float) -> Tensor:
        x = factor * torch.randn(batch, seq, heads, head_dim, device=device)
        return x.to(dtype).requires_grad_()

    return draw(seq_q, n_head, scale), draw(seq_k, n_kv_head, 1.0), draw(seq_k, n_kv_head, 1.0)


def rising_qkv(batch: int, seq_len: int, n_head: int, n_kv_head: int, head_dim: int, device):
    """bfloat16 q, k, v whose logits rise by about 100 with every 64 keys, from the last key to the first."""
    q, k, v = random_qkv(batch, seq_len, seq_len, n_head, n_kv_head, head_dim, torch.bfloat16, device)
    steps = (seq_len - 1 - torch.arange(seq_len, device=device)) // 64
    with torch.no_grad():
        q += 1.0
        k += (100.0 / head_dim**0.5 * steps)[:, None, None]
    return q, k, v


def peaked_qkv(seq_len: int, sharpness: float, head_dim: int, device):
    """bfloat16 q, k, v of two heads; each query looks for one key before it, in most cases far before."""
    _, k, v = random_qkv(1, seq_len, seq_len, 2, 2, head_dim, torch.bfloat16, device)
    found = (torch.rand(seq_len) * torch.arange(1, seq_len + 1)).long() // 2
    q = (sharpness * k.detach()[:, found.to(device)].float()).bfloat16()
    return q.requires_grad_(), k, v


def holes(n_batch: int, n_head: int, seq_q: int, seq_k: int, device, block_size: int = 64) -> BlockMask:
    """A mask with full, partial and absent blocks and an empty row of blocks, different in each head."""
    n_rows, n_columns = ((seq + block_size - 1) // block_size for seq in (seq_q, seq_k))
    blocks = torch.randint(3, (n_batch, n_head, n_rows, n_columns))
    blocks[:, :, 1] = 0
    shares = torch.tensor([0.0, 0.3, 1.0])[blocks]
    shares = shares.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)
    mask = torch.rand(n_batch, n_head, seq_q, seq_k) < shares[:, :, :seq_q, :seq_k]
    return block_masks.from_dense(mask.to(device), block_size=block_size)


def run(attention: Callable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, **options):
    """out, lse, dq, dk, dv of one implementation; rows with lse -inf get no gradient through lse."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, **options)
    loss = (out * dout.to(out.dtype)).sum() + (lse * dlse.to(lse.dtype)).masked_fill(
        lse == -torch.inf, 0.0
    ).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))


def assert_as_accurate_as_torch(attention: Callable, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
    """Asserts that out, lse, dq, dk and dv of attention(q, k, v, **options) keep the rule."""
    dout = torch.randn(q.shape, device=q.device).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    ours = run(attention, q, k, v, dout, dlse, **options)
    torchs = run(attention_reference, q, k, v, dout, dlse, **options)
    truths = run(
        attention_reference, q.double(), k.double(), v.double(), dout.double(), dlse.double(), **options
    )
    for name, x, pt, ref in zip(NAMES, ours, torchs, truths, strict=True):
        assert_within_rule(name, x, pt, ref)


def assert_close_to_truth(attention: Callable, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
    """Asserts that out and lse are float64's but for roundings of P, of out and of float32 sums.

    Where logits are large, PyTorch's bfloat16 rounds them by whole numbers, and the rule says little.
    """
    with torch.no_grad():
        out, lse = attention(q, k, v, return_lse=True, **options)
        true_out, true_lse = attention_reference(
            q.double(), k.double(), v.double(), return_lse=True, **options
        )
    scale = v.abs().max().item() / (1.0 - options.get("dropout_p", 0.0))
    assert largest_difference(out, true_out) < 2**-7 * scale
    finite = true_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    error = (lse.double() - true_lse)[finite].abs()
    assert (error <= 1e-5 + 2e-6 * true_lse[finite].abs()).all()


def assert_within_rule(name: str, x: Tensor, pt: Tensor, ref: Tensor) -> None:
    """Asserts that x keeps the rule and, where ref is infinite, is the same infinity."""
    finite = ref.isfinite()
    assert torch.equal(x[~finite].double(), ref[~finite]), (
        f"{name}: infinite in other places than the reference"
    )
    x, pt, ref = x[finite], pt[finite], ref[finite]
    assert x.isfinite().all(), f"{name}: {int((~x.isfinite()).sum())} of {x.numel()} numbers are not finite"
    if ref.numel() == 0:
        return
    error, error_pt = largest_difference(x, ref), largest_difference(pt, ref)
    rounded = ref.to(x.dtype)
    probe = largest_difference(rounded + 0.3 - 0.3, rounded)
    limit = 2 * error_pt + 2 * probe
    if x.dtype == torch.float32:
        limit = 3 * error_pt + 2 * probe + 2e-6
    assert error <= limit, f"{name}: error {error:.3g} is above {limit:.3g} (PyTorch's own is {error_pt:.3g})"


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()
