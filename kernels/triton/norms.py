"""RMS norms, one program per row: no row's sum depends on another row. fp32 inside, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts import check_norm, check_residual
from kernels.triton.launch import UNFUSED


@triton.jit
def _rms_norm(X, RESIDUAL, WEIGHT, OUT, x_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    here = column < WIDTH
    x = tl.load(X + row * x_stride + column, mask=here, other=0.0).to(tl.float32)
    if ADD:
        residual = RESIDUAL + row * WIDTH + column
        rounded = (x + tl.load(residual, mask=here, other=0.0).to(tl.float32)).to(RESIDUAL.dtype.element_ty)
        tl.store(residual, rounded, mask=here)
        x = rounded.to(tl.float32)
    root = tl.sqrt_rn(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(WEIGHT + column, mask=here, other=0.0).to(tl.float32)
    tl.store(OUT + row * WIDTH + column, (x / root * weight).to(OUT.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of x [num_tokens, hidden], or of residual + x, which `residual` then holds.

    Raises ValueError for a residual or weight of another shape.
    """
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    check_norm(weight, width)
    if residual is not None:
        check_residual(residual, x)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        out if residual is None else residual,
        weight,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        PADDED=padded,
        ADD=residual is not None,
        num_warps=min(16, max(1, padded // 512)),
        **UNFUSED,
    )
    return out
