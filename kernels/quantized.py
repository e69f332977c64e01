"""Weight matrices as quantized checkpoints hold them, in one form for each kind whatever file layout they came from.

Knows codes and scales, and how matrices are cut and stacked without a bit of what they stand for being changed; knows
no checkpoints and no products. `kernels.reference.quantized` says what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaledWeight:
    """8-bit numbers under scales of rectangles: value[n, k] * scales[n // block[0], k // block[1]].

    One scale for the tensor is a block of its whole shape, one per output channel a block of (1, in_features).
    """

    values: Tensor  # [out_features, in_features] float8_e4m3fn or int8
    scales: Tensor  # [ceil(out_features / block[0]), ceil(in_features / block[1])] fp32
    block: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        expected = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if tuple(self.scales.shape) != expected or self.scales.dtype != torch.float32:
            raise ValueError(
                f"scales are {tuple(self.scales.shape)} {self.scales.dtype}, must be {expected} fp32: blocks of "
                f"{self.block} of a weight {tuple(self.values.shape)}"
            )
        if self.values.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise ValueError(f"values are {self.values.dtype}, must be float8_e4m3fn or int8")

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True)
class GroupedWeight:
    """Codes of a few bits under scales and zero points of groups of inputs.

    (codes[n, k] - zeros[n, g]) * scales[n, g] for the group g = groups[k].
    """

    codes: Tensor  # [out_features, in_features] uint8
    scales: Tensor  # [out_features, number of groups] fp32
    zeros: Tensor  # [out_features, number of groups] uint8
    groups: Tensor  # [in_features] int64
    bits: int

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        expected = (rows, self.scales.shape[1])
        if tuple(self.zeros.shape) != expected or tuple(self.scales.shape) != expected:
            raise ValueError(
                f"zeros {tuple(self.zeros.shape)} and scales {tuple(self.scales.shape)} must both have {rows} rows and "
                "a column for each group"
            )
        if (
            tuple(self.groups.shape) != (columns,)
            or not 0 <= int(self.groups.min()) <= int(self.groups.max()) < (self.scales.shape[1])
        ):
            raise ValueError(f"groups must give each of {columns} inputs one of {self.scales.shape[1]} groups")

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]


QuantizedWeight = ScaledWeight | GroupedWeight


def rows_of(weight: QuantizedWeight, ranges: Sequence[range]) -> QuantizedWeight:
    """Ranges of the outputs, one behind the other: what they stand for is bitwise those rows of the matrix."""
    if isinstance(weight, GroupedWeight):
        codes, scales, zeros = (_pieces(part, ranges) for part in (weight.codes, weight.scales, weight.zeros))
        return replace(weight, codes=codes, scales=scales, zeros=zeros)
    height = weight.block[0]
    if any(rows.start % height or len(rows) % height for rows in ranges):
        weight, height = _scaled_by_rows(weight), 1
    tall = [range(rows.start // height, rows.stop // height) for rows in ranges]
    return replace(weight, values=_pieces(weight.values, ranges), scales=_pieces(weight.scales, tall))


def columns_of(weight: QuantizedWeight, columns: range) -> QuantizedWeight:
    """A range of the inputs: what it stands for is bitwise those columns of the matrix."""
    begin, size = columns.start, len(columns)
    if isinstance(weight, GroupedWeight):
        used, groups = torch.unique(weight.groups[begin : begin + size], return_inverse=True)
        codes = weight.codes.narrow(1, begin, size)
        return replace(weight, codes=codes, scales=weight.scales[:, used], zeros=weight.zeros[:, used], groups=groups)
    height, width = weight.block
    values = weight.values.narrow(1, begin, size)
    if width >= weight.shape[1]:
        return ScaledWeight(values, weight.scales, (height, size))
    narrow = math.gcd(width, begin)
    scales = weight.scales.repeat_interleave(width // narrow, 1)
    return ScaledWeight(values, scales[:, begin // narrow : -(-(begin + size) // narrow)], (height, narrow))


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix of all outputs, those of the first weight first; None where no one form holds them all.

    That is so of weights of different kinds, and of groups that differ: products share their order of inputs.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, GroupedWeight):
        grouped = [weight for weight in weights if isinstance(weight, GroupedWeight) and weight.bits == first.bits]
        if len(grouped) < len(weights) or not all(torch.equal(weight.groups, first.groups) for weight in grouped):
            return None
        parts = ((weight.codes, weight.scales, weight.zeros) for weight in grouped)
        codes, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
        return GroupedWeight(codes, scales, zeros, first.groups, first.bits)
    scaled = [weight for weight in weights if isinstance(weight, ScaledWeight)]
    kinds = {(weight.values.dtype, min(weight.block[1], weight.shape[1])) for weight in scaled}
    if len(scaled) < len(weights) or len(kinds) > 1:
        return None
    heights = {weight.block[0] for weight in scaled}
    if len(heights) > 1 or any(weight.shape[0] % weight.block[0] for weight in scaled[:-1]):
        scaled = [_scaled_by_rows(weight) for weight in scaled]
    values, scales = (_joined([getattr(weight, name) for weight in scaled]) for name in ("values", "scales"))
    return ScaledWeight(values, scales, scaled[0].block)


def _scaled_by_rows(weight: ScaledWeight) -> ScaledWeight:
    """With the same scales, said for each row."""
    height, width = weight.block
    return replace(weight, scales=weight.scales.repeat_interleave(height, 0)[: weight.shape[0]], block=(1, width))


def _pieces(tensor: Tensor, ranges: Sequence[range]) -> Tensor:
    pieces = [tensor.narrow(0, rows.start, len(rows)) for rows in ranges]
    return _joined(pieces)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].itemsize > 1:
        return torch.cat(list(pieces))
    # As bytes: not every device joins fp8 numbers.
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)
