"""Everything that flash_attention takes, drawn at random and together, against the definition."""

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import block_masks
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.reference import attention_reference, visible_keys
from tests.accuracy import NAMES, assert_within_rule

LAYOUTS = ["contiguous", "packed", "heads first", "odd", "channels apart"]
GRADIENTS = [*LAYOUTS, "of a sum", "over tokens", "over heads"]


# what fails is shown as it was drawn: a search for a smaller one would last longer than a test may
@settings(
    max_examples=25,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    kind=st.sampled_from(["plain", "documents", "varlen"]),
    heads=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 3), (2, 1, 2), (1, 2, 4)]),
    seq_q=st.integers(1, 70),
    seq_k=st.integers(1, 70),
    head_dim=st.sampled_from([8, 16, 24, 40, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 80),
    cuts=st.lists(st.integers(0, 70), max_size=3),
    padding=st.integers(0, 20),
    block_size=st.sampled_from([None, 64, 128]),
    blocks_of=st.tuples(st.booleans(), st.booleans()),
    dropout_p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**63 - 1),
    is_seed_tensor=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.02, 0.2]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    dout_layout=st.sampled_from(GRADIENTS),
    loss_of=st.sampled_from(["out and lse", "out", "lse"]),
    deterministic=st.booleans(),
)
def test_any_combination_is_as_accurate_as_torch(
    device, kind, heads, seq_q, seq_k, head_dim, dtype, causal, window, cuts, padding,
    block_size, blocks_of, dropout_p, seed, is_seed_tensor, softmax_scale, layouts, dout_layout, loss_of,
    deterministic,
):  # fmt: skip
    """By the one rule, and rows that see nothing give exactly nothing.

    Two limits of docs/kernels.md are left out. In 16 bits a row that sees one or two keys gets no gradient of
    out under dropout: what cancels there leaves its rounding. And logits stay small, for float32 in which lse
    itself is rounded.
    """
    torch.manual_seed(seed % 2**32)
    batch, n_kv_head, n_head = heads
    window = window if causal else None
    if kind == "documents":
        seq_q, seq_k = sorted((seq_q, seq_k))
    if kind == "varlen":
        batch = 1
    options = {"causal": causal, "window": window}
    shared = {"softmax_scale": softmax_scale, "deterministic": deterministic}
    if dropout_p:
        seed = torch.tensor([seed], device=device) if is_seed_tensor else seed
        shared |= {"dropout_p": dropout_p, "dropout_seed": seed}

    def attention(q, k, v, **more):
        return flash_attention(q, k, v, **options, **more)

    if kind == "varlen":
        # the keys of a sequence are about as many as its queries, or none
        starts_q, starts_k = ends(cuts, seq_q), ends([cut * 7 % 71 for cut in cuts], seq_k)
        visible = torch.zeros(1, 1, seq_q, seq_k, dtype=torch.bool)
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            visible[..., q0:q1, k0:k1] = visible_keys(q1 - q0, k1 - k0, **options)
        of_q, of_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k))

        def attention(q, k, v, **more):
            q, k, v = (x.squeeze(0) for x in (q, k, v))
            out, lse = flash_attention_varlen(q, k, v, of_q, cu_seqlens_k=of_k, **options, **more)
            return out[None], lse[None]

    else:
        if kind == "documents":
            # of each batch its own, of the first with padding
            first = torch.tensor([cut + 9 * b for b in range(batch) for cut in cuts]).view(batch, -1, 1)
            ids = (torch.arange(seq_k) >= first).sum(1).int()
            ids[0, :padding] = -1
            options["document_ids"] = ids.to(device)
        visible = visible_keys(
            seq_q, seq_k, **{name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
        )
    if block_size is not None:
        shape = batch if blocks_of[0] else 1, n_head if blocks_of[1] else 1
        options["block_mask"], dense = random_blocks(*shape, seq_q, seq_k, block_size, device)
        visible = visible & dense

    q = laid_out(layouts[0], (batch, seq_q, n_head, head_dim), dtype, device)
    k, v = (laid_out(x, (batch, seq_k, n_kv_head, head_dim), dtype, device) for x in layouts[1:])
    dout = laid_out(dout_layout, q.shape, dtype, device)
    n_visible = visible.sum(-1).to(device)  # (B or 1, H or 1, Tq)
    few = ((n_visible == 1) | (n_visible == 2)).transpose(1, 2)[..., None]
    if dropout_p and dtype != torch.float32 and few.any():
        dout = dout.masked_fill(few, 0.0)
    dlse = torch.randn(batch, n_head, seq_q, device=device)

    def run(attention, dtype, **options):
        # their strides stay
        inputs = [(x if x.dtype == dtype else x.to(dtype)).detach().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*inputs, return_lse=True, **options, **shared)
        losses = {"out": (out, dout.to(dtype)), "lse": (lse, dlse.to(lse.dtype))}
        outputs, gradients = zip(*(losses[name] for name in loss_of.split(" and ")), strict=True)
        gradients = torch.autograd.grad(outputs, inputs, gradients, materialize_grads=True)
        return out.detach(), lse.detach(), *gradients

    definition = {"causal": False, "block_mask": block_masks.from_dense(visible.to(device))}
    ours = run(attention, dtype)
    pt, truth = (run(attention_reference, x, **definition) for x in (dtype, torch.float64))
    for name, *of_each in zip(NAMES, ours, pt, truth, strict=True):
        assert_within_rule(name, *of_each)
    blind = (n_visible == 0).transpose(1, 2).expand(q.shape[:3])
    assert not ours[0][blind].any()
    assert not ours[2][blind].any()


def ends(cuts: list[int], seq_len: int) -> list[int]:
    """Where sequences start, and the end of the last."""
    return [0, *sorted(min(cut, seq_len) for cut in cuts), seq_len]


def random_blocks(n_batch: int, n_head: int, seq_q: int, seq_k: int, block_size: int, device):
    """A block mask of empty, partial and full squares of 64, and the same as a (B, H, Tq, Tk) tensor."""
    squares = torch.randint(3, (n_batch, n_head, -(-seq_q // 64), -(-seq_k // 64)))
    shares = torch.tensor([0.0, 0.3, 1.0])[squares].repeat_interleave(64, 2).repeat_interleave(64, 3)
    shares = shares[..., :seq_q, :seq_k]
    dense = torch.rand(shares.shape) < shares
    return block_masks.from_dense(dense.to(device), block_size=block_size), dense


def laid_out(layout: str, shape: tuple[int, ...], dtype, device) -> Tensor:
    """Random numbers (B, T, H, D)."""
    batch, seq_len, n_head, head_dim = shape

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    match layout:
        case "packed":
            return draw(batch, seq_len, 3, n_head, head_dim)[:, :, 1]
        case "heads first":
            return draw(batch, n_head, seq_len, head_dim).transpose(1, 2)
        case "odd":
            # rows that begin between multiples of 16 bytes
            return draw(batch, seq_len, n_head, head_dim + 1)[..., 1:]
        case "channels apart":
            return draw(batch, head_dim, n_head, seq_len).permute(0, 3, 2, 1)
        case "of a sum":
            return draw(1, 1, 1, 1).expand(shape)
        case "over tokens":
            return draw(batch, 1, n_head, head_dim).expand(shape)
        case "over heads":
            return draw(batch, seq_len, 1, head_dim).expand(shape)
    return draw(*shape)
