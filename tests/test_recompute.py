"""model/recompute.py: the same gradients from less memory."""

import weakref
from functools import partial

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, AttentionConfig, ModelConfig
from model.recompute import KEPT, recomputed


def small(recompute: str, implementation: str = "sdpa", **changes) -> GPT:
    torch.manual_seed(0)
    values = {"n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 128, "max_seq_len": 32, "dropout": 0.0}
    config = ModelConfig(**{**values, **changes})
    return GPT(config, AttentionConfig(implementation=implementation), recompute=recompute)


def loss_of(gpt) -> torch.Tensor:
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    return gpt(tokens[:, :-1], tokens[:, 1:])


def gradients(gpt: GPT, run=None) -> list[torch.Tensor]:
    loss_of(gpt if run is None else run).backward()
    return [p.grad for p in gpt.parameters()]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made while it is entered that are still alive."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def bytes(self, gpt: GPT) -> int:
        """Without those of views of the weights."""
        weights = {p.untyped_storage()._cdata for p in gpt.parameters()}
        return sum(
            size
            for key, (storage, size) in self.storages.items()
            if storage() is not None and key not in weights
        )


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2}], ids=["plain", "dropout"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradients_bit_for_bit(recompute, changes, implementation):
    kept, again = (gradients(small(kind, implementation, **changes)) for kind in ("none", recompute))
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)


def test_selective_recomputation_draws_what_attention_with_dropout_has_drawn(monkeypatch):
    # as fused attention of a GPU: one operator, which draws from the generator
    library = torch.library.Library("nanoflash_tests", "FRAGMENT")
    library.define("attention(Tensor x, float dropout_p) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("attention", F.dropout, "CompositeExplicitAutograd")
    attention = torch.ops.nanoflash_tests.attention.default
    monkeypatch.setattr("model.recompute.KEPT", KEPT | {attention})

    def gradient(kind):
        torch.manual_seed(0)
        x = torch.ones(100, requires_grad=True)
        # what attention gives is of no interest: what is drawn behind it must be the same
        layer = recomputed(lambda x: F.dropout(x + attention(x.detach(), 0.5), 0.5).square(), kind)
        layer(x).sum().backward()
        return x.grad

    assert torch.equal(gradient("selective"), gradient("none"))


class Calls(TorchDispatchMode):
    """Counts the calls of one operator while it is entered."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.n = operator, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += function is self.operator
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "n"), [("none", 3), ("selective", 3), ("full", 6)])
def test_full_recomputation_alone_repeats_pytorchs_attention(recompute, n):
    with Calls(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) as calls:
        gradients(small(recompute))
    assert calls.n == n


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradients_with_our_kernels(recompute, device):
    kept, again = (small(kind, "flash", n_layer=1, n_embd=64).to(device) for kind in ("none", recompute))
    tokens = torch.randint(128, (1, 32), device=device)
    for gpt in (kept, again):
        gpt(tokens, tokens).backward()
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradients_in_a_compiled_model(recompute):
    # the graphs that recomputation shapes, without the minute that C++ takes
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True)
    kept, again = (gradients(gpt, compiled(gpt)) for gpt in (small("none"), small(recompute)))
    for a, b in zip(kept, again, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_compiled_one_by_one_as_shards_are_share_one_graph(recompute):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    gpt = small(recompute, n_layer=5)
    for block in gpt.blocks:
        block.compile(backend=counter)
    for _ in range(2):
        loss_of(gpt).backward()
    assert counter.frame_count == 1


def test_more_recomputation_keeps_less_of_a_layer_for_the_backward_pass():
    kept = {}
    for kind in ("none", "selective", "full"):
        totals = []
        for n_layer in (1, 3):
            gpt = small(kind, n_layer=n_layer)
            with LiveBytes() as live:
                loss = loss_of(gpt)
            totals.append(live.bytes(gpt))
            loss.backward()
        kept[kind] = (totals[1] - totals[0]) / 2 / (2 * 32 * 32 * 4)
    # in units of the stream (B, T, C): its input alone; that, the products (3 + 1 + 4 + 1) and attention; all
    assert kept["full"] == 1.0
    assert 9.0 < kept["selective"] < 12.0
    assert kept["none"] > 15.0


def test_selective_recomputation_keeps_what_every_attention_kernel_of_ours_gives():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = [name[1] for name in names if name[0] == "nanoflash" and name[1].endswith("attention_forward")]
    assert sorted(ours) == ["attention_forward", "packed_attention_forward"]
    assert {getattr(torch.ops.nanoflash, name).default for name in ours} <= KEPT


def test_nothing_is_recomputed_where_there_is_no_backward_pass():
    gpt = small("full").eval()
    with torch.no_grad():
        assert torch.equal(loss_of(gpt), loss_of(small("none").eval()))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got 'half'"):
        small("half")


def test_a_layer_is_left_as_it_is_where_there_is_no_backward_pass():
    layer = torch.nn.Identity()
    assert recomputed(layer, "full") is not layer
    with torch.no_grad():
        assert recomputed(layer, "full") is layer
