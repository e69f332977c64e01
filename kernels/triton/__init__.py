"""The kernel API in Triton, for NVIDIA GPUs. Imported only when chosen: Triton comes with CUDA builds of torch."""

from kernels.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
