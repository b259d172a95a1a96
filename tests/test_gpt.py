import math

import pytest
import torch
import torch.nn.functional as F

from kernels import block_masks, operators, packed
from kernels.reference import attention_reference
from model import GPT, AttentionConfig, ModelConfig
from model.attention import attend
from model.config import flops_per_token
from model.generate import empty_caches
from model.gpt import gelu
from model.recompute import RECOMPUTE
from model.ring import Ring
from model.rope import RotaryConfig

PUBLISHED = {
    "gpt2": (12, 12, 768, 124_439_808),
    "gpt2_medium": (24, 16, 1024, 354_823_168),
    "gpt2_large": (36, 20, 1280, 774_030_080),
    "gpt2_xl": (48, 25, 1600, 1_557_611_200),
}


def config(**changes) -> ModelConfig:
    values = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "max_seq_len": 64, "dropout": 0.0}
    return ModelConfig(**{**values, **changes})


def model(
    implementation: str = "sdpa", fused_loss: bool = False, low_precision_residual: bool = False, **changes
) -> GPT:
    return GPT(
        config(**changes),
        AttentionConfig(implementation=implementation),
        fused_loss=fused_loss,
        low_precision_residual=low_precision_residual,
    )


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_size_has_the_published_number_of_parameters(size):
    n_layer, n_head, n_embd, published = PUBLISHED[size]
    with torch.device("meta"):
        gpt = model(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=50257, max_seq_len=1024)
    assert gpt.n_parameters() == published


@pytest.mark.parametrize(("n_embd", "n_head"), [(128, 4), (768, 12)])
def test_the_first_loss_is_that_of_a_uniform_guess(n_embd, n_head):
    gpt = model(n_embd=n_embd, n_head=n_head, vocab_size=50257)
    tokens = torch.randint(50257, (4, 65))
    loss = gpt(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(loss - math.log(50257)) < 0.1


@pytest.mark.parametrize("n_layer", [1, 8])
def test_what_is_added_to_the_stream_starts_smaller_in_deeper_models(n_layer):
    for block in model(n_layer=n_layer, n_embd=128, n_head=4).blocks:
        for branch in (block.attention, block.mlp):
            deviation = branch.projection.weight.std().item()
            assert deviation == pytest.approx(0.02 / math.sqrt(2 * n_layer), rel=0.05)


def test_the_padding_of_the_vocabulary_takes_no_probability_and_no_gradient():
    gpt = model(vocab_size=300)
    assert gpt.token_embedding.weight.shape[0] == 384
    tokens = torch.randint(300, (2, 17))
    assert gpt(tokens).shape == (2, 17, 300)
    gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    assert gpt.token_embedding.weight.grad[300:].abs().max() == 0
    assert gpt.token_embedding.weight.grad[:300].abs().min(dim=1).values.max() > 0


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_built_without_memory_is_whole_when_it_has_its_weights(assign, fresh_memory_is_nan):
    gpt, tokens = model(), torch.randint(300, (2, 17))
    with torch.device("meta"):
        empty = model()
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(gpt.state_dict(), assign=assign)
    assert torch.equal(empty(tokens, tokens), gpt(tokens, tokens))


def test_a_prediction_depends_on_no_later_token():
    gpt = model().eval()
    tokens = torch.randint(300, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 300
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "flash"])
def test_padding_gives_zero_and_nothing_sees_it(implementation, device):
    q, k, v = torch.randn(3, 2, 24, 2, 16, device=device)
    document_ids = torch.tensor([[-1] * 5 + [0] * 19, [-1] * 2 + [0] * 10 + [1] * 12], device=device).int()
    out = attend(q, k, v, implementation, document_ids=document_ids)
    expected = attention_reference(q, k, v, document_ids=document_ids)
    assert not out[document_ids < 0].any()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "flash"])
def test_documents_out_of_order_are_refused(implementation, device):
    q, document_ids = (
        torch.randn(1, 4, 2, 16, device=device),
        torch.tensor([[0, 1, 0, 1]], device=device).int(),
    )
    with pytest.raises(ValueError, match="document_ids must not decrease along a row"):
        attend(q, q, q, implementation, document_ids=document_ids)


def test_attention_that_nothing_computes_is_refused():
    q, mask = torch.randn(1, 4, 2, 16), block_masks.window(4, 2)
    with pytest.raises(ValueError, match=r"implementation must be one of .*flash, sdpa.*, got 'falsh'"):
        attend(q, q, q, "falsh")
    with pytest.raises(ValueError, match="block_mask needs implementation flash or reference: sdpa"):
        attend(q, q, q, "sdpa", block_mask=mask)


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "flash"])
def test_documents_do_not_see_each_other(implementation, device):
    gpt = model(implementation, max_seq_len=32).eval().to(device)
    tokens = torch.randint(300, (1, 24), device=device)
    document_ids = torch.tensor([[0] * 10 + [1] * 14], dtype=torch.int32, device=device)
    positions = torch.tensor([[*range(10), *range(14)]], device=device)
    packed = gpt(tokens, document_ids=document_ids, positions=positions)
    alone = gpt(tokens[:, 10:])
    torch.testing.assert_close(packed[:, 10:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("implementation", ["reference", "flash"])
def test_implementations_give_the_same_loss_and_gradients(implementation, n_kv_head, device):
    sdpa, other = (model(name, n_kv_head=n_kv_head).to(device) for name in ("sdpa", implementation))
    other.load_state_dict(sdpa.state_dict())
    tokens = torch.randint(300, (2, 50), device=device)
    for gpt in (sdpa, other):
        gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, expected), actual in zip(sdpa.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_plain_pytorch_drops_what_the_kernels_drop(device):
    flash, plain = (model(name, n_layer=1, dropout=0.2).to(device) for name in ("flash", "reference"))
    plain.load_state_dict(flash.state_dict())
    tokens = torch.randint(300, (2, 50), device=device)
    for gpt in (flash, plain):
        torch.manual_seed(1)
        gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, expected), actual in zip(flash.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_fused_loss_has_the_value_and_the_gradients_of_the_plain_one(device):
    plain, fused = model().to(device), model(fused_loss=True).to(device)
    fused.load_state_dict(plain.state_dict())
    tokens = torch.randint(300, (2, 50), device=device)
    losses = [gpt(tokens[:, :-1], tokens[:, 1:]) for gpt in (plain, fused)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        # as gradient accumulation divides it
        (loss / 4).backward()
    for (name, expected), actual in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.01)])
def test_compiled_gelu_and_its_gradient_are_those_of_the_tanh_form(dtype, tolerance):
    x = torch.linspace(-12, 12, 4001, dtype=dtype).requires_grad_()
    compiled = torch.compile(gelu, backend="aot_eager", fullgraph=True)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    actual = compiled(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), x)[0], gradient, rtol=0, atol=tolerance)


def test_attention_and_the_fused_loss_compile_into_one_graph(device):
    gpt = model("flash", fused_loss=True).to(device)
    compiled = torch.compile(gpt, backend="aot_eager", fullgraph=True)
    tokens = torch.randint(300, (2, 17), device=device)
    expected = gpt(tokens[:, :-1], tokens[:, 1:])
    actual = compiled(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss, list(gpt.parameters())) for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("low_precision_residual", [False, True])
def test_the_residual_stream_is_in_low_precision_where_that_is_asked_for(low_precision_residual):
    gpt = model(low_precision_residual=low_precision_residual)
    dtypes = []
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, __, x: dtypes.append(x.dtype))
    tokens = torch.randint(300, (2, 50))
    exact = gpt(tokens[:, :-1], tokens[:, 1:])
    assert dtypes == [torch.float32] * 2, "autocast is off"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = gpt(tokens[:, :-1], tokens[:, 1:])
    assert dtypes[2:] == [torch.bfloat16 if low_precision_residual else torch.float32] * 2
    assert loss.item() == pytest.approx(exact.item(), abs=2e-3)


def test_a_few_steps_learn_a_repeating_sequence():
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    tokens = torch.arange(8).repeat(4, 5)
    for _ in range(100):
        loss = gpt(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


def test_flops_follow_the_published_convention():
    # 6 N + 12 L C T: nanoGPT's estimate for the 124M model at 1024 tokens
    gpt2 = config(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, max_seq_len=1024)
    n = 124_439_808 - 1024 * 768
    assert flops_per_token(gpt2, 1024, causal=False) == 6 * n + 12 * 12 * 768 * 1024
    assert flops_per_token(gpt2, 1024, causal=True) == 6 * n + 6 * 12 * 768 * 1024


class AloneInTwo:
    """Stands for the first rank of a process group of two, where nothing is sent."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_a_ring_needs_positions_and_has_the_documents_and_the_longest_sequence_of_all_processes():
    gpt, ring = model("reference"), Ring(AloneInTwo(), 64)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    positions = ring.positions[0].long()[None]
    for inputs in ({}, {"positions": positions, "document_ids": torch.zeros(1, 32).int()}):
        with pytest.raises(ValueError, match="with a ring, positions must be given and document_ids not"):
            gpt(tokens, ring=ring, **inputs)
    with pytest.raises(ValueError, match="128 positions, but model.max_seq_len=64"):
        gpt(torch.zeros(1, 64, dtype=torch.long), ring=Ring(AloneInTwo(), 128), positions=positions)


def test_a_token_behind_cached_ones_takes_no_documents():
    gpt, tokens = model("reference"), torch.zeros(1, 1, dtype=torch.long)
    caches = empty_caches(gpt, 8, torch.tensor([3]))
    with pytest.raises(ValueError, match="document_ids: a token behind cached ones sees all of them"):
        gpt.hidden_states(tokens, torch.zeros(1, 1).int(), torch.tensor([[2]]), caches)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="65 positions, but model.max_seq_len=64"):
        model()(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 3}, "model.n_embd=32 must be a multiple of model.n_head=3: n_embd=30"),
        ({"n_layer": 0}, "model.n_layer must be at least 1, got 0"),
        ({"n_layer": 2.0}, "model.n_layer must be an integer, got 2.0"),
        ({"mlp_width": True}, "model.mlp_width must be an integer, got True"),
        ({"dropout": 1.0}, "model.dropout must be at least 0 and at most 0.9961, got 1.0"),
        ({"norm_eps": -1.0}, "model.norm_eps must be at least 0 and finite, got -1.0"),
        ({"norm_eps": float("nan")}, "model.norm_eps must be at least 0 and finite, got nan"),
        ({"norm_eps": float("inf")}, "model.norm_eps must be at least 0 and finite, got inf"),
        (
            {"n_head": 16, "rotary": RotaryConfig(base=100.0, scaling="ntk", factor=2.0)},
            "model.rotary.scaling=ntk needs model.head_dim to be at least 4, got 2",
        ),
    ],
)
def test_an_impossible_model_is_refused_by_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention.implementation must be one of flash, sdpa, reference"):
        AttentionConfig(implementation="fast")


LLAMA = {
    "n_kv_head": 1,
    "mlp_width": 48,
    "rotary": RotaryConfig(base=10_000.0),
    "norm": "rms",
    "mlp": "swiglu",
    "bias": "none",
    "tied_head": False,
}
SHAPES = {"gpt2": {}, "llama": LLAMA, "qwen": {**LLAMA, "bias": "qkv", "qk_norm": True, "head_dim": 24}}


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_given_one_dtype_under_autocast(shape, monkeypatch):
    given = []
    monkeypatch.setattr(
        "model.attention.attend", lambda *qkv, **options: given.extend(qkv[:3]) or attend(*qkv, **options)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**SHAPES[shape])(torch.randint(300, (1, 9)))
    # of two layers
    assert [x.dtype for x in given] == [torch.bfloat16] * 6


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_count_the_parameters_that_there_are(shape):
    gpt = model(**SHAPES[shape])
    n = gpt.n_parameters()
    if shape == "gpt2":
        n -= gpt.position_embedding.weight.numel()
    else:
        # the untied embedding is a look-up
        n -= 300 * 32
    width = gpt.config.n_head * gpt.config.head_dim
    assert flops_per_token(gpt.config, 64, causal=False) == 6 * n + 12 * 2 * width * 64


@pytest.mark.parametrize("shape", ["llama", "qwen"])
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_rotary_models_depend_on_distances_alone(shape, implementation):
    gpt = model(implementation, **SHAPES[shape]).eval()
    tokens = torch.randint(300, (2, 20))
    torch.testing.assert_close(gpt(tokens), gpt(tokens, positions=torch.arange(5, 25)), rtol=1e-4, atol=1e-5)


def test_a_model_with_normed_heads_runs_under_autocast():
    gpt = model("sdpa", **SHAPES["qwen"])
    with torch.autocast("cpu", torch.bfloat16):
        loss = gpt(torch.randint(300, (2, 20)), torch.randint(300, (2, 20)))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(300), abs=0.1)


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "rotary": RotaryConfig(base=10000.0)}])
def test_torchs_deterministic_switch_reaches_the_kernels(options, device, monkeypatch):
    seen = []

    def spy(problem, *arguments, run=operators.run):
        seen.append(problem.deterministic)
        return run(problem, *arguments)

    for module in (operators, packed):
        monkeypatch.setattr(module, "run", spy)
    gpt = model("flash", **options).to(device)
    tokens = torch.randint(gpt.config.vocab_size, (1, 17), device=device)
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        gpt(tokens[:, :-1], tokens[:, 1:]).backward()
    assert seen == [True] * (2 * gpt.config.n_layer) + [False] * (2 * gpt.config.n_layer)


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_on_embeddings_attention_and_both_branches_in_training_alone(shape, training, monkeypatch):
    dropped, drop, attend = [], F.dropout, F.scaled_dot_product_attention

    def dropout(x, p, training, inplace):
        dropped.append(("stream", p if training else 0.0))
        return drop(x, p, training, inplace)

    def attention(*given, dropout_p, **options):
        dropped.append(("weights", dropout_p))
        return attend(*given, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    gpt, p = model(dropout=0.25, **shape).train(training), 0.25 if training else 0.0
    tokens = torch.randint(300, (2, 17))
    gpt(tokens, tokens)
    layer = [("weights", p), ("stream", p), ("stream", p)]
    assert dropped == [("stream", p), *layer, *layer]


@pytest.mark.parametrize("shape", [{}, {"tied_head": False}], ids=["tied", "untied"])
def test_biases_start_at_zero_and_a_head_of_its_own_small(shape):
    for name, value in model(n_embd=128, n_head=4, **shape).named_parameters():
        if name.endswith("bias"):
            assert not value.any(), name
        elif name == "head.weight":
            assert value.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_gelu_is_fused_only_where_nothing_is_recomputed(recompute):
    gpt = GPT(config(), AttentionConfig(implementation="sdpa"), fused_gelu=True, recompute=recompute)
    assert [block.mlp.fused_gelu for block in gpt.blocks] == [recompute == "none"] * 2
