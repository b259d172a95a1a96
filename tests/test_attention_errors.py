"""What the public functions refuse: a ValueError that names the argument, what it was and what it must be."""

import subprocess
import sys
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import block_masks
from kernels.decode import decode_attention
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.packed import flash_attention_packed
from kernels.portable.backward import attention_backward
from kernels.problem import Problem
from kernels.reference import attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.zeros(2, 8, 4, 16, device=DEVICE)


@pytest.mark.parametrize("attend", [flash_attention, attention_reference])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": X.tolist()}, "k must be a tensor, got list"),
        ({"q": X[0]}, r"q must have 4 dimensions.*\(8, 4, 16\)"),
        ({"k": X.half()}, "one dtype.*float32.*float16"),
        ({"v": X.to("meta")}, "one device.*meta"),
        ({"q": X[..., :0]}, "q must not be empty"),
        ({"v": X[:, :4]}, "k and v must have one shape"),
        ({"q": X[..., :8]}, "head_dim of q, 8, got 16"),
        ({"k": X[:1], "v": X[:1]}, "batch of q, 2, got 1"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, "4 heads of q must be a multiple.*3"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive.*0.0"),
        ({"softmax_scale": 1e-46}, "softmax_scale must be positive and finite, got 1e-46.*1e-30 to 1e"),
        ({"softmax_scale": 1e39}, "softmax_scale must be positive and finite, got 1e.39"),
        ({"softmax_scale": 1e21}, r"softmax_scale must be positive and finite, got 1e\+21.*1e-30 to 1e\+20"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be positive and finite, got nan"),
        ({"softmax_scale": torch.tensor(0.5)}, "softmax_scale must be a float, got a tensor"),
        ({"softmax_scale": "x"}, "softmax_scale must be a number, got str 'x'"),
        ({"dropout_p": "a"}, "dropout_p must be a number, got str 'a'"),
        ({"dropout_p": None}, "dropout_p must be a number, got NoneType None"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"dropout_p": torch.zeros(2)}, r"dropout_p must be a number, got Tensor tensor\(\[0., 0.\]\)"),
        ({"causal": []}, r"causal must be True or False, got \[\]"),
        ({"causal": 2}, "causal must be True or False, got 2"),
        ({"causal": 0.5}, "causal must be True or False, got 0.5"),
        ({"causal": torch.ones(2)}, "causal must be True or False, got tensor"),
        ({"causal": np.array([True, False])}, "causal must be True or False, got array"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"deterministic": "no"}, "deterministic must be True or False, got 'no'"),
        ({"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
        ({"window": 3.5}, "window must be an int, got float 3.5"),
        ({"window": True}, "window must be an int, got bool True"),
        ({"dropout_p": 0.1, "dropout_seed": True}, "dropout_seed must be an int, got bool True"),
        ({"window": torch.tensor(3)}, "window must be an int, got Tensor"),
        ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int, got float 1.5"),
        ({"window": 0}, "window must be at least 1.*got 0"),
        ({"window": 2**31 - 1}, "window must be .* below 1073741824, got 2147483647"),
        ({"window": 4, "causal": False}, "window=4 with causal=False"),
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and at most 0.9961, got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed must be at least 0.*-1"),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.zeros(2, dtype=torch.int64, device=DEVICE)},
            "dropout_seed.*one element",
        ),
        ({"block_mask": object()}, "block_mask"),
        ({"document_ids": [[0] * 8] * 2}, "document_ids must be a tensor, got list"),
        (
            {"document_ids": torch.zeros(2, 7, dtype=torch.int32, device=DEVICE)},
            r"document_ids.*\(2, 8\).*\(2, 7\)",
        ),
        ({"document_ids": torch.zeros(2, 8, device=DEVICE)}, "document_ids must be int32, got torch.float32"),
        (
            {"document_ids": torch.tensor([[0, 1, 0, 1] * 2] * 2).int().to(DEVICE)},
            "document_ids must not decrease along a row, got 1 before 0 in row 0: number the documents",
        ),
        (
            {"document_ids": torch.zeros(2, 8, dtype=torch.int32, device="meta")},
            f"document_ids must be on {X.device}, got meta: move it",
        ),
        ({"dropout_p": 0.1, "dropout_seed": 2**63}, "dropout_seed must be at least 0 and below 2.*63, got"),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="meta")},
            f"dropout_seed must be .* on {X.device}, got .* on meta",
        ),
    ],
)
def test_the_kernels_and_the_definition_name_what_is_wrong(attend, change, message):
    arguments = {"q": X, "k": X, "v": X} | change
    with pytest.raises(ValueError, match=message):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.double(), "q must be bfloat16.*float64"),
        (X[..., :12], "head_dim must be a multiple of 8.*12"),
        (X[:, :0], "q must not be empty"),
    ],
)
def test_the_definition_takes_dtypes_heads_and_lengths_that_the_kernels_refuse_by_name(x, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(x, x, x)
    assert attention_reference(x, x, x).shape == x.shape


def test_the_definition_refuses_whole_numbers_by_name():
    x = X.long()
    with pytest.raises(ValueError, match=r"^q, k and v must be floating-point, got torch.int64: cast them$"):
        attention_reference(x, x, x)


@pytest.mark.parametrize("attend", [flash_attention, attention_reference])
def test_under_autocast_the_kernels_and_the_definition_take_tensors_of_several_dtypes(attend):
    with torch.autocast(DEVICE, torch.float16):
        assert attend(X, X.half(), X.bfloat16()).dtype == torch.float16


def test_the_definition_runs_on_a_device_without_autocast():
    assert attention_reference(*[X.to("meta")] * 3).device.type == "meta"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["nested", "jagged", "sparse"])
def test_every_form_of_the_call_names_a_tensor_that_is_not_dense_and_what_takes_its_sequences(kind):
    parts = [X[0, :3], X[1]]
    if kind == "sparse":
        x = X.to_sparse()
    else:
        layout = torch.jagged if kind == "jagged" else torch.strided
        x = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(ValueError, match="q must be dense.*flash_attention_varlen"):
        flash_attention(x, x, x)
    with pytest.raises(ValueError, match="k must be dense.*flash_attention_varlen"):
        flash_attention_varlen(X[0], x, x, torch.tensor([0, 8], dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="qkv must be dense"):
        flash_attention_packed(x)


def test_a_device_without_autocast_is_refused_as_any_that_is_no_gpu():
    q, qkv = X.to("meta"), X.to("meta")[:, :, None].expand(-1, -1, 3, -1, -1)
    for name, call in (
        ("q", lambda: flash_attention(q, q, q)),
        ("q", lambda: flash_attention_varlen(q[0], q[0], q[0], torch.tensor([0, 8]).int())),
        ("qkv", lambda: flash_attention_packed(qkv)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be on a GPU, got meta: move it"):
            call()


def test_every_form_of_the_call_refuses_a_text_for_a_flag():
    packed = X[:, :, None].expand(-1, -1, 3, -1, -1).contiguous()
    lengths = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    for call in (
        lambda: flash_attention_varlen(X[0], X[0], X[0], lengths, deterministic="false"),
        lambda: flash_attention_packed(packed, deterministic="false"),
    ):
        with pytest.raises(ValueError, match="^deterministic must be True or False, got 'false'"):
            call()


@pytest.mark.parametrize("flag", [1, np.True_, torch.tensor(True)], ids=repr)
def test_a_flag_is_a_bool_of_any_library(flag):
    assert torch.equal(flash_attention(X, X, X, causal=flag), flash_attention(X, X, X))


def test_every_form_of_the_call_refuses_what_the_interpreter_computes_wrongly():
    x = X.bfloat16()
    packed, filled = x[:, :, None].expand(-1, -1, 3, -1, -1).contiguous(), torch.tensor([8, 8])
    for call in (
        lambda: flash_attention(x, x, x),
        lambda: flash_attention_varlen(x[0], x[0], x[0], torch.tensor([0, 8]).int()),
        lambda: flash_attention_packed(packed),
        lambda: decode_attention(x[:, :1], x, x, filled),
    ):
        with pytest.raises(ValueError, match="float16 or float32 on a CPU, got bfloat16"):
            call()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="or use attention_reference"):
        flash_attention(X, X, X)


def apart(x, **options):
    return flash_attention(x, x, x, **options)


def as_packed(x, **options):
    return flash_attention_packed(torch.stack([x] * 3, 2), **options)


@pytest.mark.parametrize("number", [1, True, np.float64(0.5), np.float32(0.5), Fraction(1, 2)], ids=repr)
@pytest.mark.parametrize("form", [apart, as_packed])
def test_a_scale_is_a_number_of_any_library(number, form):
    assert_same_passes(form, {"softmax_scale": number}, {"softmax_scale": float(number)})


def assert_same_passes(form, options, expected_options) -> None:
    """form(x, ...) and its gradient are the same with both, past the dispatcher and through it."""
    x = torch.randn(1, 8, 1, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    expected = None
    for mode in (nullcontext, Dispatched):
        for given in (expected_options, options):
            leaf = x.clone().requires_grad_()
            with mode():
                out = form(leaf, **given)
                (gradient,) = torch.autograd.grad(out.sum(), leaf)
            expected = expected or (out, gradient)
            assert torch.equal(out, expected[0])
            assert torch.equal(gradient, expected[1])


class Dispatched(TorchDispatchMode):
    """Lets every operator through, which none is called past then."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_hides_no_wrong_dtype(dtype):
    x = X.to(dtype)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match=f"got {dtype}"):
        flash_attention(x, x, x)


@pytest.mark.parametrize(
    ("cu_seqlens", "cu_seqlens_k", "message"),
    [
        ([1, 8], None, r"cu_seqlens must start at 0, got 1: F.pad\(lengths.cumsum"),
        ([0, 7], None, "cu_seqlens must end at the total number of tokens, 8, got 7"),
        ([0, 5, 4, 8], None, "cu_seqlens must not decrease, got 5 before 4: "),
        ([0], None, r"cu_seqlens must have shape"),
        ([0, 8], [0, 4, 8], "cu_seqlens_k must be as long as cu_seqlens, 2, got 3"),
        ([0, 8], [0, 9], "cu_seqlens_k must end at the total number of tokens, 8, got 9"),
    ],
)
def test_flash_attention_varlen_names_what_is_wrong(cu_seqlens, cu_seqlens_k, message):
    x = X[0]
    cu_seqlens_k = None if cu_seqlens_k is None else torch.tensor(cu_seqlens_k).int().to(DEVICE)
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(x, x, x, torch.tensor(cu_seqlens).int().to(DEVICE), cu_seqlens_k=cu_seqlens_k)


def test_lengths_must_be_a_tensor():
    with pytest.raises(ValueError, match="cu_seqlens must be a tensor, got list"):
        flash_attention_varlen(X[0], X[0], X[0], [0, 8])


def test_changed_document_ids_are_checked_again():
    x, ids = X, torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    flash_attention(x, x, x, document_ids=ids)
    ids[:, 0] = 1
    with pytest.raises(ValueError, match="document_ids must not decrease"):
        flash_attention(x, x, x, document_ids=ids)


def test_document_ids_that_numpy_has_changed_are_checked_again():
    if DEVICE != "cpu":
        pytest.skip("NumPy writes to no GPU")
    numbers = np.zeros((2, 8), np.int32)
    ids = torch.from_numpy(numbers)
    flash_attention(X, X, X, document_ids=ids)
    # PyTorch does not count this as a change
    numbers[:, 0] = 1
    with pytest.raises(ValueError, match="document_ids must not decrease"):
        flash_attention(X, X, X, document_ids=ids)


def test_lengths_that_were_right_are_checked_again_for_other_tokens():
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32, device=DEVICE)
    flash_attention_varlen(X[0], X[0], X[0], cu_seqlens)
    longer = torch.cat([X[0], X[0]])
    with pytest.raises(ValueError, match="cu_seqlens must end at the total number of tokens, 16, got 8"):
        flash_attention_varlen(longer, longer, longer, cu_seqlens)


def test_masks_made_in_inference_mode_are_checked_too():
    with torch.inference_mode():
        ids = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
        flash_attention(X, X, X, document_ids=ids)
        ids[:, 0] = 1
        with pytest.raises(ValueError, match="document_ids must not decrease"):
            flash_attention(X, X, X, document_ids=ids)


def test_what_was_made_in_inference_mode_serves_where_no_gradients_are_wanted_and_is_else_refused_by_name():
    x = X.clone().requires_grad_()
    with torch.inference_mode():
        given = {
            "block_mask": {"block_mask": block_masks.window(8, 3, device=DEVICE)},
            "dropout_seed": {"dropout_p": 0.1, "dropout_seed": torch.tensor([3], device=DEVICE)},
        }
    for name, options in given.items():
        out = flash_attention(X, X, X, **options)
        with torch.no_grad():
            assert torch.equal(flash_attention(x, X, X, **options), out)
        for arguments in ((x, X, X), (X, X, x)):
            with pytest.raises(
                ValueError, match=rf"{name} was made under inference_mode.*inference_mode\(False"
            ):
                flash_attention(*arguments, **options)
    # without dropout nothing reads the seed
    flash_attention(x, X, X, **(options | {"dropout_p": 0.0})).sum().backward()
    assert x.grad.isfinite().all()


def test_more_queries_than_the_backward_pass_can_number_are_refused():
    # an expanded number: none of this is ever in memory
    x = torch.zeros(1, dtype=torch.float16, device=DEVICE).expand(2**22, 100, 4, 8)
    problem = Problem(softmax_scale=1.0, causal=True, deterministic=True)
    with pytest.raises(ValueError, match=r"q must have fewer than 2\*\*31 .*128.*16777216 heads of 100"):
        attention_backward(problem, x, None, x, x, x, x, torch.zeros(1, device=DEVICE))


def test_without_a_gpu_the_error_says_what_to_do():
    program = (
        "import os, torch; from kernels.flash_attention import flash_attention\n"
        "x = torch.zeros(1, 8, 1, 16)\n"
        "for _ in range(2):\n"
        "    try: flash_attention(x, x, x)\n"
        "    except ValueError as error: print(error)\n"
        # too late, after the first error has said so
        "    os.environ['TRITON_INTERPRET'] = '1'"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.count("q must be on a GPU, got cpu") == 2, result.stderr
    assert result.stdout.count("TRITON_INTERPRET=1 before Python starts") == 2
