"""Kernels in CUDA C++, where it serves better than Triton. Optional: compiled at first use, and cached."""
