"""Plain Triton: every feature, every GPU, and the CPU interpreter."""

from kernels.portable.backward import attention_backward
from kernels.portable.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
