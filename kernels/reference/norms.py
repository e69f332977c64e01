"""RMS norms, gated activations and the soft cap, in fp32 with one rounding at the end; rows share no reduction."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.reference.elementary import exp, sum_last_, tanh

# Elements per pass of an activation: its dozen operations then find them in a cache near the core.
_ELEMENTS_AT_ONCE = 1 << 17


def rms_normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of fp32 `x`; fp32."""
    mean_square = sum_last_(x * x) / x.shape[-1]
    return (x / (mean_square + eps).sqrt_()[..., None]).mul_(weight.float())


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [num_tokens, 2 * width], gate first; rounded once to its dtype."""
    return _gated(gate_up, lambda gate: gate)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in GELU's tanh form, as silu_mul.

    (1 + tanh(z)) / 2 is the logistic function of 2z (D. Hendrycks and K. Gimpel, https://arxiv.org/abs/1606.08415).
    """

    def twice_z(gate: Tensor) -> Tensor:
        return (gate * gate).mul_(0.044715).add_(1.0).mul_(gate).mul_(2 * math.sqrt(2 / math.pi))

    return _gated(gate_up, twice_z)


def _gated(gate_up: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
    """gate * logistic(inner(gate)) * up."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_tokens, width, dtype=gate_up.dtype)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // width)
    for start in range(0, num_tokens, rows_at_once):
        rows = slice(start, start + rows_at_once)
        gate, up = gate_up[rows].float().chunk(2, dim=-1)
        result[rows] = (gate / exp(-inner(gate)).add_(1.0)).mul_(up)
    return result


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of [rows, columns], fp32."""
    result = torch.empty(x.shape, dtype=torch.float32)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // max(1, x.shape[1]))
    for start in range(0, len(x), rows_at_once):
        rows = slice(start, start + rows_at_once)
        result[rows] = tanh(x[rows].float().mul(1.0 / cap)).mul_(cap)
    return result
