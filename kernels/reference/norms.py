"""RMS norms and the gated activation, in fp32 with one rounding at the end; rows never share a reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.elementary import exp, sum_last_

# Elements per pass of the activation: its dozen operations then find them in a cache near the core.
_ELEMENTS_AT_ONCE = 1 << 17


def rms_normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of fp32 `x`; fp32."""
    mean_square = sum_last_(x * x) / x.shape[-1]
    return (x / (mean_square + eps).sqrt_()[..., None]).mul_(weight.float())


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [num_tokens, 2 * width], gate first; rounded once to its dtype."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_tokens, width, dtype=gate_up.dtype)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // width)
    for start in range(0, num_tokens, rows_at_once):
        rows = slice(start, start + rows_at_once)
        gate, up = gate_up[rows].float().chunk(2, dim=-1)
        result[rows] = (gate / exp(-gate).add_(1.0)).mul_(up)
    return result
