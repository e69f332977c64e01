"""What quantized weights stand for: dequantization, and the product that the kernels are held against.

A value is the exact difference or number times its scale, rounded to fp32; the caller rounds that once more to the
dtype it computes in. With 16-bit scales, as AWQ, GPTQ and most packed checkpoints have them, the first rounding does
nothing: the result is the nearest number of the target dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import GroupedWeight, QuantizedWeight, ScaledWeight


def dequantize(weight: QuantizedWeight) -> Tensor:
    """[out_features, in_features] fp32."""
    if isinstance(weight, GroupedWeight):
        zeros, scales = weight.zeros[:, weight.groups].float(), weight.scales[:, weight.groups]
        return (weight.codes.float() - zeros).mul_(scales)
    rows, columns = weight.shape
    height, width = weight.block
    scales = weight.scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return weight.values.float().mul_(scales)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x @ dequantized.T + bias, the weight rounded to x's dtype."""
    return F.linear(x, dequantize(weight).to(x.dtype), bias)


def quantize_grouped(weight: Tensor, group_size: int, bits: int = 4) -> GroupedWeight:
    """The nearest codes for [out_features, in_features], with a zero point and an fp16 scale for each group.

    Plain rounding, for tests and for weights made at random; real quantizers choose better. Raises ValueError when the
    inputs are no multiple of `group_size`.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"in_features {columns} must be a multiple of group_size {group_size}")
    grouped = weight.float().view(rows, -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)
    largest = 2**bits - 1
    scales = ((high - low) / largest).clamp(min=1e-6).half().float()
    zeros = (-low / scales).round().clamp(0, largest)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, largest)
    return GroupedWeight(
        codes.view(rows, columns).to(torch.uint8),
        scales,
        zeros.to(torch.uint8),
        torch.arange(columns) // group_size,
        bits,
    )


def quantize_scaled(weight: Tensor, block: tuple[int, int]) -> ScaledWeight:
    """The nearest e4m3 numbers for [out_features, in_features] under one fp32 scale for each block; for tests, too."""
    rows, columns = weight.shape
    height, width = min(block[0], rows), min(block[1], columns)
    padded = F.pad(weight.float().abs(), (0, -columns % width, 0, -rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scales = (tiles.amax((1, 3)) / 448.0).clamp(min=1e-12)
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = (weight.float() / spread).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return ScaledWeight(values, scales, (height, width))
