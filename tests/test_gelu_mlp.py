"""The MLP with GELU inside of its products, against PyTorch's layers one by one."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels.epilogue_library import VERSION, epilogues, is_installed, serves
from kernels.gelu_mlp import fuses, gelu_gradient, gelu_mlp, gelu_mlp_forward
from model import GPT, AttentionConfig, ModelConfig
from model.gpt import MLP

has_kernels = is_installed() and torch.cuda.is_available() and serves(torch.device("cuda"))
on_hopper_or_newer = pytest.mark.skipif(
    not has_kernels, reason="needs quack-kernels and a GPU from Hopper on"
)


def plain(x, w1, b1, w2, b2, residual=None):
    out = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
    return out if residual is None else residual + out


def inputs(device, rows=(3, 37), channels=64, width=256, bias=True, dtype=torch.float64, residual=True):
    shapes = (*rows, channels), (width, channels), (width,), (channels, width), (channels,), (*rows, channels)
    scales = 1.0, channels**-0.5, 1.0, width**-0.5, 1.0, 1.0
    tensors = [
        (scale * torch.randn(shape, device=device)).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    missing = (() if bias else (2, 4)) + (() if residual else (5,))
    return [None if i in missing else x.requires_grad_() for i, x in enumerate(tensors)]


def result_and_gradients(function, tensors, dout, dtype):
    tensors = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    out = function(*tensors)
    return out.detach(), *torch.autograd.grad(out, [x for x in tensors if x is not None], dout.to(dtype))


def assert_as_accurate_as_torch(function, plain, tensors):
    x = tensors[0]
    # expanded, as behind a sum, and as it comes from a norm
    for dout in (torch.randn_like(x), torch.ones((), device=x.device, dtype=x.dtype).expand(x.shape)):
        truths = result_and_gradients(plain, tensors, dout, torch.float64)
        torchs = result_and_gradients(plain, tensors, dout, x.dtype)
        ours = result_and_gradients(function, tensors, dout, x.dtype)
        for our, pt, ref in zip(ours, torchs, truths, strict=True):
            # as tests/accuracy.py has it
            unit = ((ref.to(x.dtype) + 0.3 - 0.3).double() - ref).abs().max()
            assert (our.double() - ref).abs().max() <= 2 * (pt.double() - ref).abs().max() + 2 * unit


def assert_repeats(function, tensors):
    """The same bits in 20 more runs."""
    x = tensors[0]
    dout = torch.randn_like(x)
    first = result_and_gradients(function, tensors, dout, x.dtype)
    for _ in range(20):
        again = result_and_gradients(function, tensors, dout, x.dtype)
        assert all(map(torch.equal, first, again))


def assert_frozen_alone_has_no_gradient(function, tensors, frozen):
    tensors[frozen].requires_grad_(False)
    function(*tensors).sum().backward()
    assert [x.grad is None for x in tensors] == [index == frozen for index in range(len(tensors))]


def assert_none_comes_of_no_gradient(function, tensors):
    x = torch.ones(3, requires_grad=True)
    # the checkpoint hands back no gradient of what its layer leaves unused
    checkpoint(lambda x, _: 2 * x, x, function(*tensors), use_reentrant=True).sum().backward()
    assert all(tensor.grad is None for tensor in tensors)
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_result_and_gradients_are_those_of_the_layers_one_by_one(bias, residual, compiled):
    tensors = inputs("cpu", bias=bias, residual=residual)
    ours = torch.compile(gelu_mlp, backend="aot_eager", fullgraph=True) if compiled else gelu_mlp
    dout = torch.randn_like(tensors[0])
    expected = result_and_gradients(plain, tensors, dout, torch.float64)
    torch.testing.assert_close(result_and_gradients(ours, tensors, dout, torch.float64), expected)


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "width"),
    [((1,), 8, 24), ((3, 37), 64, 256), ((2, 1024), 768, 3072), ((2000,), 1600, 6400)],
)
def test_on_a_gpu_it_is_as_accurate_as_torch(dtype, bias, residual, rows, channels, width):
    tensors = inputs("cuda", rows, channels, width, bias, dtype, residual)
    assert_as_accurate_as_torch(gelu_mlp, plain, tensors)


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_derivative_is_accurate_far_from_zero(dtype):
    """The hardware's tanh is off by 2^-11, which the derivative multiplies by up to its x."""
    x = torch.zeros(4001, 8, device="cuda", dtype=dtype)
    x[:, 0] = torch.linspace(-20, 20, 4001)
    eye = torch.eye(8, device="cuda", dtype=dtype)
    _, hidden, slope = gelu_mlp_forward(x, eye, None, eye, None, None)
    wide = x.double().requires_grad_()
    value = F.gelu(wide, approximate="tanh")
    (truth,) = torch.autograd.grad(value.sum(), wide)
    torch.testing.assert_close(slope.double(), truth, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(hidden.double(), value, atol=4e-3, rtol=4e-3)


@on_hopper_or_newer
@pytest.mark.gpu
def test_on_a_gpu_results_repeat_bit_for_bit():
    assert_repeats(gelu_mlp, inputs("cuda", (4096,), 768, 3072, dtype=torch.bfloat16))


@on_hopper_or_newer
@pytest.mark.gpu
def test_on_a_gpu_graphs_replay_it_with_new_numbers():
    x, *weights = (t.detach() for t in inputs("cuda", (512,), dtype=torch.bfloat16))
    gelu_mlp(x, *weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gelu_mlp(x, *weights)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, gelu_mlp(x, *weights))


@on_hopper_or_newer
@pytest.mark.gpu
def test_rows_at_odd_places_are_refused_by_the_operator():
    _, *weights = inputs("cuda", (64,), dtype=torch.bfloat16)
    shifted = torch.empty(64 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 64)
    with pytest.raises(ValueError, match=r"x must have rows .* multiples of 16 bytes"):
        gelu_mlp(shifted, *weights)


@pytest.mark.skipif(not is_installed(), reason="needs quack-kernels")
@pytest.mark.parametrize(
    ("product", "names"),
    [
        ("mm_gelu", ["x", "w1"]),
        ("mm_added", ["hidden", "w2", "residual"]),
        ("mm_scaled", ["dout", "w2"]),
        ("mm_scaled_and_sum", ["dout", "w2"]),
        ("mm_exp2_and_sum", ["hidden", "weight"]),
    ],
)
def test_rows_at_odd_places_are_refused_by_the_names_that_callers_know(product, names):
    even, odd = torch.zeros(8, 8).bfloat16(), torch.zeros(65).bfloat16()[1:].view(8, 8)
    for place, name in enumerate(names):
        matrices = [odd if place == index else even for index in range(3)]
        arguments = {
            "mm_gelu": (*matrices[:2], None),
            "mm_added": (*matrices[:2], None, matrices[2]),
            "mm_exp2_and_sum": (*matrices[:2], even[0], even[0], even, 8),
        }.get(product, matrices)
        with pytest.raises(ValueError, match=f"^{name} must have rows .* multiples of 16 bytes"):
            getattr(epilogues(), product)(*arguments)


@pytest.mark.parametrize("frozen", range(6))
def test_what_is_frozen_has_no_gradient(frozen):
    assert_frozen_alone_has_no_gradient(gelu_mlp, inputs("cpu"), frozen)


def test_a_result_without_a_gradient_gives_none_to_any_input():
    assert_none_comes_of_no_gradient(gelu_mlp, inputs("cpu"))


def test_a_single_row_needs_no_row_dimension():
    x, *weights = inputs("cpu", rows=())
    torch.testing.assert_close(gelu_mlp(x, *weights), plain(x, *weights))


def test_autocast_changes_neither_dtype_nor_result():
    tensors = inputs("cpu", dtype=torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = gelu_mlp(*tensors)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    assert results[1][0].dtype == torch.float32
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("loss", "index", "frozen"),
    [
        (torch.sum, 0, []),
        # these gradients are products with what GELU has saved alone, which takes no gradient itself
        (torch.sum, 0, [3]),
        (lambda out: out.square().sum(), 3, []),
    ],
    ids=["of x", "of x where w2 is frozen", "of w2"],
)
def test_a_second_derivative_is_refused(loss, index, frozen):
    tensors = inputs("cpu")
    for i in frozen:
        tensors[i].requires_grad_(False)
    out = gelu_mlp(*tensors)
    with pytest.raises(NotImplementedError, match="fused_gelu=false"):
        torch.autograd.grad(loss(out), tensors[index], create_graph=True)


def test_the_operators_keep_pytorchs_rules():
    x, *weights = inputs("cpu", rows=(5,), channels=8, width=16)
    torch.library.opcheck(gelu_mlp_forward, (x, *weights))
    torch.library.opcheck(gelu_gradient, (x.detach(), weights[2].detach(), torch.randn(5, 16).double(), True))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0, 0].tolist(), "^x must be a tensor, got list"),
        (0, lambda x: x.sum(), r"x must be \(..., C\) and w1 \(F, C\), got shapes \(\) and \(256, 64\)"),
        (1, lambda w1: None, "w1 must be a tensor, got NoneType"),
        (1, lambda w1: w1[0], r"got shapes \(3, 37, 64\) and \(64,\)"),
        (1, lambda w1: w1[:, :8], r"w1 must have shape \(256, 64\), got \(256, 8\)"),
        (2, lambda b1: b1[1:], r"b1 must have shape \(256,\), got \(255,\)"),
        (3, lambda w2: w2[:8], r"w2 must have shape \(64, 256\), got \(8, 256\)"),
        (4, lambda b2: b2.float(), "b2 must be torch.float64 on cpu, as x is, got torch.float32 on cpu"),
        (5, lambda residual: residual[:1], r"residual must have shape \(3, 37, 64\), got \(1, 37, 64\)"),
    ],
)
def test_what_does_not_fit_is_named(index, change, message):
    tensors = inputs("cpu")
    tensors[index] = change(tensors[index])
    with pytest.raises(ValueError, match=message):
        gelu_mlp(*tensors)


def test_sixteen_bits_and_multiples_of_eight_are_fused():
    assert fuses(torch.bfloat16, 768, 3072)
    assert fuses(torch.float16, 8, 24)
    assert not fuses(torch.float32, 768, 3072)
    assert not fuses(torch.bfloat16, 100, 3072)
    assert not fuses(torch.bfloat16, 768, 100)


def test_the_named_version_is_the_pinned_one():
    pinned = Path(__file__).parent.parent / "requirements.txt"
    assert f"quack-kernels[cu13]=={VERSION};" in pinned.read_text()


def test_a_library_that_does_not_import_is_named_with_the_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels.epilogues", None)
    message = r"cannot be used here \(ModuleNotFoundError: .*pip install 'quack.* and use fused_gelu=false"
    with pytest.raises(ImportError, match=message):
        epilogues()


def model_config(**changes) -> ModelConfig:
    values = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "max_seq_len": 64, "dropout": 0.0}
    return ModelConfig(**{**values, **changes})


@on_hopper_or_newer
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", ["all", "none"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_with_it_trains_as_one_without(compiled, bias, stream):
    assert_trains_alike(model_config(bias=bias), stream, compiled)


def assert_trains_alike(config: ModelConfig, stream: torch.dtype, compiled: bool) -> None:
    """Models with activations inside of products and apart have the same loss and gradients, roughly."""
    build = {"attention": AttentionConfig(implementation="sdpa")}
    build["low_precision_residual"] = stream == torch.bfloat16
    models = [GPT(config, **build, fused_gelu=on).cuda() for on in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.zeros(1, 32, device="cuda").bfloat16()
    assert [model.blocks[0].mlp._fuses(x) for model in models] == [False, True]
    tokens = torch.randint(300, (2, 50), device="cuda")
    gradients = []
    for model in models:
        run = torch.compile(model, fullgraph=True) if compiled else model
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens[:, :-1], tokens[:, 1:])
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize(
    ("case", "inside"),
    [
        ("nothing", True),
        ("dropout", False),
        ("dropout in evaluation", True),
        # as for estimates of uncertainty
        ("dropout in training alone", False),
        ("a module of the user's", False),
        ("rounding of the stream", False),
    ],
)
def test_the_stream_is_added_in_the_product_unless_something_stands_between(case, inside, monkeypatch):
    config = model_config(dropout=0.5 if "dropout" in case else 0.0)
    mlp = MLP(config, fused_gelu=True).train("evaluation" not in case)
    if "alone" in case:
        mlp.eval().residual_dropout.train()
    if "module" in case:
        mlp.residual_dropout = torch.nn.Identity()
    monkeypatch.setattr(mlp, "_fuses", lambda x: True)
    given = []

    def spied(*arguments):
        given.append(arguments)
        return gelu_mlp(*arguments)

    monkeypatch.setattr("kernels.gelu_mlp.gelu_mlp", spied)
    x, residual = torch.randn(2, 3, 5, 32)
    rounds = "rounding" in case
    with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        out = mlp(x, residual)
    [arguments] = given
    assert (len(arguments) == 6) == inside
    assert out.dtype == torch.float32
    if not (config.dropout and mlp.residual_dropout.training):
        parameters = mlp.expand.weight, mlp.expand.bias, mlp.projection.weight, mlp.projection.bias
        expected = plain(x, *parameters, residual)
        torch.testing.assert_close(out, expected, atol=0.03 if rounds else 1e-6, rtol=0)
        return
    # half of what is added is dropped
    assert 0.3 < (out == residual).float().mean() < 0.7


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["gate with biases", "recompute", "float32", "no gradients", "adapters", "odd width"]
)
def test_a_model_without_a_place_for_it_keeps_its_layers(case):
    config = model_config(
        mlp="swiglu" if "gate" in case else "gelu", mlp_width=100 if case == "odd width" else None
    )
    recompute = "full" if case == "recompute" else "none"
    gpt = GPT(config, AttentionConfig(implementation="sdpa"), fused_gelu=True, recompute=recompute).cuda()
    mlp: MLP = gpt.blocks[0].mlp
    if case == "adapters":
        mlp.expand = torch.nn.Sequential(mlp.expand)
    x = torch.zeros(1, 32, device="cuda", dtype=torch.float32 if case == "float32" else torch.bfloat16)
    with torch.set_grad_enabled(case != "no gradients"):
        assert not mlp._fuses(x)
