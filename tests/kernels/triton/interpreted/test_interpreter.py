"""The corrected interpreter computes what the GPU does where the stock one does not, and its sanitizer sees faults."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreter import install, sanitizer
from triton.runtime.errors import InterpreterError

install()


@triton.jit
def _cast(X, OUT, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(OUT + offsets, tl.load(X + offsets).to(OUT.dtype.element_ty))


@triton.jit
def _product(A, B, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    tl.store(OUT + m[:, None] * N + n[None, :], tl.dot(a * 2.0, b))


@triton.jit
def _fill(OUT, count, stride, MASKED: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * stride + tl.arange(0, N)
    if MASKED:
        tl.store(OUT + offsets, offsets, mask=offsets < count)
    else:
        tl.store(OUT + offsets, offsets)


@triton.jit
def _shift(X, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(X + offsets, tl.load(X + offsets + 1))


@triton.jit
def _at(X, block, stride, WIDE: tl.constexpr):
    if WIDE:
        block = block.to(tl.int64)
    tl.store(X + block * stride, tl.load(X + block * stride) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_casts_round_to_nearest_even_and_fp8_saturates(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 100
    x[:4] = torch.tensor([500.0, -460.0, 447.0, 0.0])
    out = torch.empty(4096, dtype=dtype)
    _cast[(1,)](x, out, N=4096)
    limit = torch.finfo(dtype).max
    assert torch.equal(out.float(), x.clamp(-limit, limit).to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_exact_and_rows_know_no_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 64, generator=generator).to(dtype), torch.randn(64, 16, generator=generator).to(dtype)
    out, rolled = torch.empty(32, 16), torch.empty(32, 16)
    _product[(1,)](a, b, out, M=32, N=16, K=64)
    _product[(1,)](a.roll(7, 0).contiguous(), b, rolled, M=32, N=16, K=64)
    assert torch.equal(out, ((2 * a.double()) @ b.double()).float())
    assert torch.equal(rolled, out.roll(7, 0))


def test_the_sanitizer_sees_a_forgotten_mask() -> None:
    out = torch.empty(40, dtype=torch.int32)
    with sanitizer() as launches:
        _fill[(2,)](out, 40, 32, MASKED=True, N=32)
    assert launches.num_addresses == 40
    with sanitizer(), pytest.raises(InterpreterError, match="24 of 32 store lanes out of bounds"):
        _fill[(2,)](out, 40, 32, MASKED=False, N=32)


def test_the_sanitizer_sees_programs_that_race() -> None:
    with sanitizer(), pytest.raises(AssertionError, match="one program stores what another one stores"):
        _fill[(2,)](torch.empty(64, dtype=torch.int32), 64, 16, MASKED=True, N=32)
    with sanitizer(), pytest.raises(AssertionError, match="one program stores what another one loads"):
        _shift[(2,)](torch.zeros(65, dtype=torch.int32), N=32)


def test_the_sanitizer_sees_an_offset_of_32_bits_that_wraps() -> None:
    x = torch.empty(3 << 30, dtype=torch.int8)
    with sanitizer():
        _at[(1,)](x, 1 << 16, 40_000, WIDE=True)
    with sanitizer(), pytest.raises(InterpreterError, match="out of bounds"):
        _at[(1,)](x, 1 << 16, 40_000, WIDE=False)
