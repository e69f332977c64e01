"""Gated activations and the soft cap, element by element in fp32 with one rounding.

Exponentials are to base 2 and of arguments whose overflow gives the limit that the function has: no library call, and
nothing to clamp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import UNFUSED

_COLUMNS = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)
# GELU's tanh form is x times the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3).
_TWO_ROOT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _gated(GATE_UP, OUT, stride, width, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    gate = tl.load(GATE_UP + row * stride + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * stride + width + column, mask=here, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = gate * _TWO_ROOT_TWO_OVER_PI * tl.fma(gate * _CUBIC, gate, 1.0)
    result = gate / (1.0 + tl.exp2(inner * -_LOG2_E)) * up
    tl.store(OUT + row * width + column, result.to(OUT.dtype.element_ty), mask=here)


@triton.jit
def _soft_cap(X, OUT, stride, width, cap, factor, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    x = tl.load(X + row * stride + column, mask=here, other=0.0).to(tl.float32)
    result = cap * (1.0 - 2.0 / (tl.exp2(x * factor) + 1.0))
    tl.store(OUT + row * width + column, result, mask=here)


def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """activation(gate) * up of [num_tokens, 2 * width]; [num_tokens, width]."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _COLUMNS))
    _gated[grid](gate_up, out, gate_up.stride(0), width, GELU=gelu, COLUMNS=_COLUMNS, num_warps=4, **UNFUSED)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of [rows, columns], fp32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], _COLUMNS))
    _soft_cap[grid](
        x, out, x.stride(0), x.shape[1], cap, 2.0 * _LOG2_E.value / cap, COLUMNS=_COLUMNS, num_warps=4, **UNFUSED
    )
    return out
