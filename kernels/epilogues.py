"""Matrix products with GELU, or its gradient, in their epilogue, by cuBLASLt.

The epilogue works on a tile of the product while it is in registers: GELU then costs no pass of its own over
(N, F). PyTorch asks cuBLASLt for GELU without what it is of, which the backward pass needs, and never for the
gradient. NVIDIA's nvmath-python gives Python all of cuBLASLt.

cuBLASLt names columns first: what is (rows, columns) in row-major order is (columns, rows) to it, and a
product is asked for as out^T = b^T a^T.
"""

from functools import cache
from importlib.util import find_spec
from threading import Lock

import numpy as np
import torch
from torch import Tensor

# bytes: what cuBLAS recommends for Hopper
WORKSPACE = 32 << 20
# bytes: what the epilogues ask of where rows begin, and the most that any kernel of cuBLASLt asks for
ALIGNMENT, BEST_ALIGNMENT = 16, 256
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
# of nvmath-python, as the tests run with
VERSION = "1.0.0"
WAYS_OUT = f"on an NVIDIA GPU pip install nvmath-python=={VERSION}, elsewhere use fused_gelu=false"


@cache
def is_installed() -> bool:
    return find_spec("nvmath") is not None


def mm_gelu(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """gelu(a b + bias), in its tanh form, and a b + bias, (N, F) each. a: (N, C), b: (C, F), bias: (F,)."""
    out, inner = (a.new_empty(a.shape[0], b.shape[1]) for _ in range(2))
    _run("GELU_AUX" if bias is None else "GELU_AUX_BIAS", a, b, out, inner, bias)
    return out, inner


def mm_gelu_gradient(a: Tensor, b: Tensor, inner: Tensor) -> Tensor:
    """a b times the derivative of GELU at inner, (N, F). a: (N, C), b: (C, F), inner: (N, F) contiguous."""
    out = torch.empty_like(inner)
    _run("DGELU", a, b, out, inner, None)
    return out


def _run(epilogue: str, a: Tensor, b: Tensor, out: Tensor, inner: Tensor, bias: Tensor | None) -> None:
    """out = epilogue(a b) in bf16 or fp16, on the current GPU and stream.

    Raises ValueError for rows that cuBLASLt cannot read, and without nvmath-python.
    """
    if not is_installed():
        raise ValueError(f"GELU inside of matrix products needs nvmath-python: {WAYS_OUT}")
    matrices = {"a": a, "b": b, "out": out}
    for name, x in matrices.items():
        row = max(x.stride()) * x.element_size()
        if min(x.stride()) != 1 or row % ALIGNMENT or x.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} must have rows that begin at multiples of {ALIGNMENT} bytes, got "
                f"{tuple(x.shape)} with strides {x.stride()} at address {x.data_ptr()}: clone it, or "
                "choose sizes in multiples of 8"
            )
    layouts = ((*x.shape, *x.stride()) for x in matrices.values())
    addresses = (x.data_ptr() for x in matrices.values())
    alignment = min(BEST_ALIGNMENT, *(address & -address for address in addresses))
    _plan(a.get_device(), epilogue, a.dtype, alignment, *layouts).run(a, b, out, inner, bias)


class Plan:
    """One product of matrices of these sizes and strides, by the kernel that cuBLASLt thinks the fastest.

    a, b, out: (rows, columns, stride of rows, stride of columns); alignment: of their addresses, in bytes.
    """

    def __init__(
        self, handle: int, epilogue: str, dtype: torch.dtype, alignment: int, a: tuple, b: tuple, out: tuple
    ):
        from nvmath import CudaDataType
        from nvmath.bindings import cublas, cublasLt

        self.lt, self.handle = cublasLt, handle
        # the pointers below belong to one call at a time
        self.lock = Lock()
        number = CudaDataType.CUDA_R_16BF if dtype == torch.bfloat16 else CudaDataType.CUDA_R_16F
        self.description = cublasLt.matmul_desc_create(
            cublas.ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F
        )
        self._describe("EPILOGUE", cublasLt.Epilogue[epilogue])
        self._describe("EPILOGUE_AUX_LD", out[2])
        # their first operand is b
        self.layouts = []
        for attribute, (rows, columns, stride, step) in (("TRANSA", b), ("TRANSB", a), (None, out)):
            is_transposed = step != 1
            if is_transposed:
                rows, columns, stride = columns, rows, step
            if attribute is not None:
                self._describe(attribute, is_transposed)
            self.layouts.append(cublasLt.matrix_layout_create(number, columns, rows, stride))
        self.algorithm = self._fastest(alignment)

    def run(self, a: Tensor, b: Tensor, out: Tensor, inner: Tensor, bias: Tensor | None) -> None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=a.device)
        of_a, of_b, of_out = self.layouts[1], self.layouts[0], self.layouts[2]
        with self.lock:
            self._describe("EPILOGUE_AUX_POINTER", inner.data_ptr())
            if bias is not None:
                self._describe("BIAS_POINTER", bias.data_ptr())
            self.lt.matmul(
                self.handle, self.description, ONE.ctypes.data,
                b.data_ptr(), of_b, a.data_ptr(), of_a, ZERO.ctypes.data,
                out.data_ptr(), of_out, out.data_ptr(), of_out, self.algorithm.ctypes.data,
                workspace.data_ptr(), WORKSPACE, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

    def _describe(self, attribute: str, value: int) -> None:
        attribute = self.lt.MatmulDescAttribute[attribute]
        value = np.array([value], self.lt.get_matmul_desc_attribute_dtype(attribute))
        self.lt.matmul_desc_set_attribute(self.description, attribute, value.ctypes.data, value.nbytes)

    def _fastest(self, alignment: int) -> np.ndarray:
        preference = self.lt.matmul_preference_create()
        limits = {"MAX_WORKSPACE_BYTES": WORKSPACE}
        limits |= {f"MIN_ALIGNMENT_{matrix}_BYTES": alignment for matrix in "ABCD"}
        for name, value in limits.items():
            attribute = self.lt.MatmulPreferenceAttribute[name]
            value = np.array([value], self.lt.get_matmul_preference_attribute_dtype(attribute))
            self.lt.matmul_preference_set_attribute(preference, attribute, value.ctypes.data, value.nbytes)
        found, count = np.zeros(1, self.lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        self.lt.matmul_algo_get_heuristic(
            self.handle, self.description, *self.layouts, self.layouts[2], preference,
            1, found.ctypes.data, count.ctypes.data,
        )  # fmt: skip
        self.lt.matmul_preference_destroy(preference)
        if not count[0]:
            raise ValueError("cuBLASLt has no GELU inside of products on this GPU: use fused_gelu=false")
        return found


@cache
def _plan(device_index: int, *problem) -> Plan:
    return Plan(_handle(device_index), *problem)


@cache
def _handle(device_index: int) -> int:
    """cuBLASLt's state on the current GPU, whose number this is."""
    from nvmath.bindings import cublasLt

    return cublasLt.create()
