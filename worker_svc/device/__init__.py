"""Where a worker computes: a CUDA device or the CPU, behind as few operations as the step needs."""
