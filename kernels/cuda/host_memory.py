"""Host memory that a CUDA device reads and writes by itself, as much as was asked for.

torch's own pinned memory comes in powers of two: a lower tier of 20 GiB would take 32. Knows bytes and CUDA's runtime.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, runtime: Any = None) -> tuple[Tensor, Callable[[], None]]:
    """Zeros in pinned memory, and what unpins it, to be called once when no copy runs and before the memory goes.

    `runtime` stands for torch.cuda.cudart(), with its calls cudaHostRegister and cudaHostUnregister. Raises
    MemoryError where there is not so much memory, or the driver does not pin it.
    """
    runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]
    num_bytes = prod(shape) * dtype.itemsize
    try:
        # Of whole pages: the driver pins pages, and none twice.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be had: {error.strerror}") from error
    data = torch.frombuffer(pages, dtype=torch.uint8)
    address = data.data_ptr()
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if status != runtime.cudaError.success:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned: {runtime.cudaGetErrorString(status)}")
    return data.view(dtype).view(shape), lambda: runtime.cudaHostUnregister(address)
