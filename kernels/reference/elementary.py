"""Elementary functions and row sums whose bits depend on nothing but the element or the row.

Torch's own `exp`, `log`, `silu`, `tanh` take another code path for the last elements of a thread's share, and its sums
another order for another number of rows or threads. What is built here uses correctly rounded operations alone (add,
multiply, divide, round, compare, integer arithmetic), each a separate call so that nothing is fused: vector lane or
scalar tail, one thread or many, the result is the same. Knows floats; knows no models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Format:
    """What the range reduction of `exp` needs of a floating point format."""

    integer: torch.dtype
    mantissa_bits: int
    exponent_bias: int
    # ln 2 in two parts: a multiple of the first by any exponent is exact.
    ln2_high: float
    ln2_low: float
    # Taylor degree that brings the truncation below half a unit in the last place on |r| <= ln(2) / 2.
    degree: int
    # Below `low` the result is 0, above `high` infinity: 2 ** n is then a normal number between them.
    low: float
    high: float


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 127, 0.693359375, -2.12194440e-4, 7, -87.0, 88.0),
    torch.float64: _Format(
        torch.int64, 52, 1023, 6.93147180369123816490e-01, 1.90821492927058770002e-10, 13, -708.0, 709.0
    ),
}


def exp(x: Tensor) -> Tensor:
    """e ** x for fp32 or fp64, within 2 units in the last place; 0 below -87 (-708), infinity above 88 (709).

    Argument reduction of W. J. Cody and W. Waite, "Software Manual for the Elementary Functions", 1980, chapter 6.
    """
    form = _FORMATS[x.dtype]
    clamped = x.clamp(form.low, form.high)
    exponent = (clamped * math.log2(math.e)).round_()
    rest = clamped.sub_(exponent * form.ln2_high).sub_(exponent * form.ln2_low)
    result = torch.full_like(rest, 1.0 / math.factorial(form.degree))
    for power in range(form.degree - 1, -1, -1):
        result.mul_(rest).add_(1.0 / math.factorial(power))
    scale = exponent.to(form.integer).add_(form.exponent_bias).bitwise_left_shift_(form.mantissa_bits).view(x.dtype)
    result.mul_(scale)
    return result.masked_fill_(x < form.low, 0.0).masked_fill_(x > form.high, math.inf)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal fp64 numbers, within 2 units in the last place.

    ln(m) = 2 artanh((m - 1) / (m + 1)) for the mantissa m in [sqrt(1/2), sqrt(2)).
    """
    form = _FORMATS[torch.float64]
    bits = x.view(torch.int64)
    exponent = (bits >> form.mantissa_bits) - form.exponent_bias
    one = form.exponent_bias << form.mantissa_bits
    mantissa = ((bits & ((1 << form.mantissa_bits) - 1)) | one).view(torch.float64)
    high = mantissa > math.sqrt(2.0)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = (exponent + high).to(torch.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(square, 1.0 / 25.0)
    for odd in range(23, 0, -2):
        series.mul_(square).add_(1.0 / odd)
    return exponent * form.ln2_high + (exponent * form.ln2_low + 2.0 * ratio * series)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, absolute error about one fp32 epsilon."""
    decayed = exp(x.abs().mul_(-2.0))
    return ((1.0 - decayed) / (1.0 + decayed)).copysign_(x)


def sum_last_(x: Tensor) -> Tensor:
    """Sum over the last dimension, which is dropped: a tree of halvings in an order its length alone decides.

    Overwrites `x`.
    """
    length = x.shape[-1]
    while length > 1:
        half = length // 2
        x[..., :half].add_(x[..., length - half : length])
        length -= half
    return x[..., 0]
