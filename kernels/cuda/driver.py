"""The part of the CUDA driver that loads machine code and launches it on torch's current stream.

Knows addresses and numbers. torch has made the context, and is current on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cuda.compiler import CudaUnavailable


class Kernel:
    """One kernel of a cubin, loaded on the current device. It stays loaded for the life of the process."""

    def __init__(self, cubin: bytes, name: str) -> None:
        """Raises CudaUnavailable with the driver's error."""
        torch.cuda.current_stream()  # makes the context
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaUnavailable(f"the CUDA driver does not load: {error}") from error
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        # The driver reads the image when it loads it.
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))

    def launch(self, num_blocks: int, num_threads: int, arguments: Sequence[int]) -> None:
        """Queues a launch on the current stream. Every argument is an address or an integer of 64 bits."""
        values = (ctypes.c_longlong * len(arguments))(*arguments)
        size = ctypes.sizeof(ctypes.c_longlong)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*(base + size * place for place in range(len(arguments))))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (num_blocks, 1, 1, num_threads, 1, 1)
        self._check(self._driver.cuLaunchKernel(self._function, *sizes, 0, stream, pointers, None))

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            message = text.value.decode() if text.value else "unknown"
            raise CudaUnavailable(f"CUDA driver error {status}: {message}")
