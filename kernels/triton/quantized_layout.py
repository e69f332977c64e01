"""How quantized weights lie in memory for the products of `quantized.py`, and how they come to lie so.

The 4-bit layout puts the codes of inputs k and k + BLOCK_K / 2 of a tile in one byte, so that both halves of the bytes
are tiles. Read as checkpoints pack them, eight inputs in a word, each word would be fetched for every input of it. A
tile of inputs lies in one group: where groups are no whole tiles, inputs of zero fill them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import GroupedWeight, QuantizedWeight, ScaledWeight
from kernels.reference.quantized import dequantize
from kernels.triton import linear as linears

# Inputs of a tile.
_MOST_INPUTS, _FEWEST_INPUTS = 128, 32
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TritonScaledLinear:
    """8-bit numbers as uint8 [out_features, in_features]; `is_float` says they are e4m3. Scales as ScaledWeight has."""

    values: Tensor
    is_float: bool
    scales: Tensor
    block: tuple[int, int]
    block_k: int
    bias: Tensor | None

    @property
    def kept_as(self) -> str:
        """What the matrix is kept in."""
        return "float8_e4m3" if self.is_float else "int8"

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @property
    def out_features(self) -> int:
        return self.values.shape[0]


@dataclass(frozen=True)
class TritonGroupedLinear:
    """4-bit codes, uint8 [depth / 2, out_features]; scales fp32 and zeros uint8 [depth / block_k, out_features].

    `order` [depth] is the order of inputs in which those of a group are together, and are whole tiles: `in_features`
    stands for an input of zero that fills a tile. None: as they are.
    """

    in_features: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    block_k: int
    order: Tensor | None
    bias: Tensor | None

    @property
    def kept_as(self) -> str:
        """What the matrix is kept in."""
        return "4-bit codes"

    @property
    def depth(self) -> int:
        """Inputs with those that fill tiles."""
        return 2 * self.codes.shape[0]

    @property
    def out_features(self) -> int:
        return self.codes.shape[1]


QuantizedLinear = TritonScaledLinear | TritonGroupedLinear


def pack(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantizedLinear | linears.TritonLinear:
    """Lays a quantized weight out for activations of `dtype` on `device`.

    What the kernels do not take is dequantized to a plain weight: for fp32 activations, 8-bit codes of groups, 4-bit
    ones of groups so small that they would take no less, and 8-bit numbers of which fewer than 32 inputs share a scale.
    """
    own_bias = None if bias is None else bias.to(device)
    packed: QuantizedLinear | None = None
    if dtype in SIXTEEN_BITS and isinstance(weight, ScaledWeight):
        packed = _pack_scaled(weight, own_bias, device)
    elif dtype in SIXTEEN_BITS and isinstance(weight, GroupedWeight):
        packed = _pack_grouped(weight, own_bias, device)
    return packed or linears.pack(dequantize(weight).to(dtype).to(device), own_bias)


def _pack_scaled(weight: ScaledWeight, bias: Tensor | None, device: torch.device) -> TritonScaledLinear | None:
    """None where a tile of inputs would have several scales."""
    height, width = weight.block
    block_k = _MOST_INPUTS if width >= weight.shape[1] else math.gcd(_MOST_INPUTS, width)
    if block_k < _FEWEST_INPUTS:
        return None
    values = weight.values.contiguous().view(torch.uint8).to(device)
    is_float = weight.values.dtype == torch.float8_e4m3fn
    return TritonScaledLinear(values, is_float, weight.scales.contiguous().to(device), (height, width), block_k, bias)


def _pack_grouped(weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> TritonGroupedLinear | None:
    """None for 8 bits, and for groups so small that full tiles of them would be no smaller than floats."""
    columns, inputs = weight.shape
    groups = weight.groups.cpu()
    sizes = torch.bincount(groups, minlength=weight.scales.shape[1])
    block_k = math.gcd(_MOST_INPUTS, *sizes.tolist())
    if block_k < _FEWEST_INPUTS:
        block_k = _FEWEST_INPUTS
    full = -(-sizes // block_k) * block_k
    depth = int(full.sum())
    if weight.bits != 4 or depth >= 4 * inputs:
        return None
    order = _tiled_order(groups, sizes, full)
    is_sorted = torch.equal(order, torch.arange(inputs))
    codes = weight.codes.to(device).t()
    if not is_sorted:
        codes = F.pad(codes, (0, 0, 0, 1)).index_select(0, order.to(device))
    tiles = codes.reshape(depth // block_k, 2, block_k // 2, columns)
    codes = (tiles[:, 0] | (tiles[:, 1] << 4)).reshape(depth // 2, columns)
    of_tile = torch.arange(len(full)).repeat_interleave(full // block_k).to(device)
    scales, zeros = (x.to(device).t().index_select(0, of_tile).contiguous() for x in (weight.scales, weight.zeros))
    own_order = None if is_sorted else order.to(device)
    return TritonGroupedLinear(inputs, codes.contiguous(), scales, zeros, block_k, own_order, bias)


def _tiled_order(groups: Tensor, sizes: Tensor, full: Tensor) -> Tensor:
    """The inputs of each group in their order, and behind them the number of inputs, up to the group's full size."""
    order = torch.argsort(groups, stable=True)
    of_group = groups[order]
    rank_within = torch.arange(len(groups)) - (sizes.cumsum(0) - sizes)[of_group]
    tiled = torch.full((int(full.sum()),), len(groups))
    tiled[(full.cumsum(0) - full)[of_group] + rank_within] = order
    return tiled
