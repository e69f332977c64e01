"""Weight matrices as quantized checkpoints hold them, in one form for each kind whatever file layout they came from.

Knows codes and scales; knows no checkpoints and no products. `kernels.reference.quantized` says what they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

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
