"""Kernels in CUDA C++, where it serves better than Triton. Optional: compiled with nvcc at first use, and cached."""
