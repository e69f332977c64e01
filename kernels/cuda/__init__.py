"""Kernels in CUDA C++, where it serves better than Triton: compiled at first use, and cached; and memory for them."""
