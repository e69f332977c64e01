"""The C++ backend: AVX-512-bf16, AVX-512, AVX2 and portable kernels, one chosen when a backend is opened."""

from kernels.cpu.backend import CpuBackend
from kernels.cpu.extension import unavailable_reason

__all__ = ["CpuBackend", "unavailable_reason"]
