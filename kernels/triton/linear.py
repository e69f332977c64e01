"""Matrix products: cuBLAS through torch, or a product that gives a row the same bits in any batch.

Knows weight matrices and row counts; knows no layers. The invariant product sums over the inner dimension in steps
of one length and in one order for every row count, with the same kind of matrix instruction: cuBLAS picks another
kernel, and another order, for another number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.configs import matmul_config
from kernels.triton.launch import UNFUSED
from kernels.triton.layer import DeviceShape

_GROUP_ROWS = 8


@dataclass(frozen=True)
class TritonLinear:
    """A weight matrix [out_features, in_features] as it came, and its bias."""

    weight: Tensor
    bias: Tensor | None

    @property
    def kept_as(self) -> str:
        """What the matrix is kept in."""
        return str(self.weight.dtype).removeprefix("torch.")

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    X,
    WEIGHT,
    BIAS,
    OUT,
    num_rows,
    num_columns,
    depth,
    x_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs take output tiles in turn, GROUP tiles of rows at a time so that their weights are still near."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        first_row_tile = tile // (GROUP * column_tiles) * GROUP
        group = tl.minimum(row_tiles - first_row_tile, GROUP)
        within = tile % (GROUP * column_tiles)
        rows = (first_row_tile + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
        x = X + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
        weight = WEIGHT + columns.to(tl.int64)[None, :] * depth + inner[:, None]
        has_row = (rows < num_rows)[:, None]
        has_column = (columns < num_columns)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, depth, BLOCK_K):
            left = tl.load(x + k, mask=has_row & (k + inner < depth)[None, :], other=0.0)
            right = tl.load(weight + k, mask=has_column & (k + inner < depth)[:, None], other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(BIAS + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
        out = OUT + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=has_row & has_column)


def pack(weight: Tensor, bias: Tensor | None) -> TritonLinear:
    """Raises ValueError for a weight that is not a matrix."""
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out_features, in_features], got shape {tuple(weight.shape)}")
    return TritonLinear(weight.contiguous(), bias)


def linear(x: Tensor, packed: TritonLinear, device: DeviceShape, invariant: bool) -> Tensor:
    """x @ weight.T + bias; raises ValueError when x has another dtype or width than the weight."""
    if x.dtype != packed.weight.dtype or x.shape[-1] != packed.in_features:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; the weight takes [num_tokens, {packed.in_features}] "
            f"{packed.weight.dtype}"
        )
    if not invariant:
        return F.linear(x, packed.weight, packed.bias)
    return _invariant(x if x.stride(1) == 1 else x.contiguous(), packed, device)


def _invariant(x: Tensor, packed: TritonLinear, device: DeviceShape) -> Tensor:
    rows, columns = x.shape[0], packed.out_features
    config = matmul_config(device.arch, x.element_size(), rows)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    _matmul[(min(tiles, 2 * device.num_multiprocessors),)](
        x,
        packed.weight,
        packed.weight if packed.bias is None else packed.bias,
        out,
        rows,
        columns,
        packed.in_features,
        x.stride(0),
        HAS_BIAS=packed.bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=_GROUP_ROWS,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **UNFUSED,
    )
    return out
