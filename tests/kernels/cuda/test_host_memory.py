"""Pinned host memory of exactly the size that was asked for, from a CUDA runtime that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.cuda.host_memory import pinned_zeros


class FakeRuntime:
    """Notes what it pins: bytes by address."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


def test_as_much_is_pinned_as_was_asked_for_and_let_go_of() -> None:
    runtime = FakeRuntime()
    data, unpin = pinned_zeros((3, 5, 1000), torch.bfloat16, runtime)
    assert runtime.pinned == {data.data_ptr(): 30_000}
    assert data.data_ptr() % 4096 == 0
    assert (data.shape, data.dtype) == ((3, 5, 1000), torch.bfloat16)
    assert not data.any()
    data.fill_(1.0)
    assert data.sum() == 15_000
    unpin()
    assert runtime.pinned == {}


def test_memory_that_cannot_be_had_or_pinned_is_an_error() -> None:
    with pytest.raises(MemoryError, match="8 bytes of host memory cannot be pinned: error 2"):
        pinned_zeros((2,), torch.float32, FakeRuntime(status=2))
    with pytest.raises(MemoryError, match=r"bytes of host memory cannot be had"):
        pinned_zeros((2**60,), torch.uint8, FakeRuntime())
