"""Products with quantized weights: 8-bit numbers under scales, and 4-bit codes under scales and zero points of groups.

Knows weights as `quantized_layout` has them, and activations. A product turns a tile of weights into the activations'
dtype, exactly, and multiplies that. Scales meet the sums in fp32. Inputs are summed in one order, in tiles of one
length, for every number of rows; `invariant` also keeps the matrix instruction.

A 4-bit code is made a float by the bits around it: 0x4300 | q is 128 + q in bf16, 0x6400 | q is 1024 + q in fp16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import UNFUSED
from kernels.triton.quantized_layout import SIXTEEN_BITS, QuantizedLinear, TritonScaledLinear

# Rows of a tile from a number of rows on, and its columns and warps.
_TILES = ((1, 16, 64, 4), (17, 32, 64, 4), (33, 64, 128, 8))
# One kind of matrix instruction for every number of rows.
_INVARIANT_TILES = ((1, 64, 64, 4),)


@triton.jit
def _from_eight_bits(bits, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of uint8 bits, exactly, without fp8 instructions: sign, exponent and mantissa moved to their places."""
    wide = bits.to(tl.int16)
    if IS_FLOAT:
        # Exponents' biases are 7 here, 15 in fp16 and 127 in bf16: powers of two, which multiply exactly.
        SHIFT: tl.constexpr = 7 if tl.float16 == DTYPE else 4
        FACTOR: tl.constexpr = 256.0 if tl.float16 == DTYPE else 1.329227995784916e36
        result = (((wide & 0x80) << 8) | ((wide & 0x7F) << SHIFT)).to(DTYPE, bitcast=True) * FACTOR
    else:
        result = (wide - ((wide & 0x80) << 1)).to(tl.float32).to(DTYPE)
    return result


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["BIAS"])
def _scaled_product(
    X,
    VALUES,
    SCALES,
    BIAS,
    OUT,
    num_rows,
    num_columns,
    depth,
    x_stride,
    scale_columns,
    block_rows,
    IS_FLOAT: tl.constexpr,
    SCALES_DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program per tile of outputs. SCALES_DEPTH: inputs that share a scale, a multiple of BLOCK_K; 0: all."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    has_row = (rows < num_rows)[:, None]
    has_column = columns < num_columns
    x = X + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    values = VALUES + columns.to(tl.int64)[None, :] * depth + inner[:, None]
    scales = SCALES + (columns // block_rows) * scale_columns
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, depth, BLOCK_K):
        left = tl.load(x + k, mask=has_row & (k + inner < depth)[None, :], other=0.0)
        bits = tl.load(values + k, mask=has_column[None, :] & (k + inner < depth)[:, None], other=0)
        right = _from_eight_bits(bits, IS_FLOAT, X.dtype.element_ty)
        if SCALES_DEPTH > 0:
            scale = tl.load(scales + k // SCALES_DEPTH, mask=has_column, other=0.0)
            acc += tl.dot(left, right) * scale[None, :]
        else:
            acc = tl.dot(left, right, acc)
    if SCALES_DEPTH == 0:
        acc = acc * tl.load(scales, mask=has_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(BIAS + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    out = OUT + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=has_row & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["BIAS"])
def _grouped_product(
    X,
    CODES,
    SCALES,
    ZEROS,
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
):
    """A program per tile of outputs; a tile of inputs lies in one group."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    MAGIC: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, BLOCK_K // 2)
    has_row = (rows < num_rows)[:, None]
    has_column = columns < num_columns
    x = X + rows.to(tl.int64)[:, None] * x_stride + half[None, :]
    codes = CODES + half.to(tl.int64)[:, None] * num_columns + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    zeros = ZEROS + columns
    scales = SCALES + columns
    for k in range(0, depth, BLOCK_K):
        first = tl.load(x + k, mask=has_row, other=0.0)
        second = tl.load(x + k + BLOCK_K // 2, mask=has_row, other=0.0)
        both = tl.load(codes, mask=has_column[None, :], other=0).to(tl.int16)
        zero = tl.load(zeros, mask=has_column, other=0).to(tl.int16)
        scale = tl.load(scales, mask=has_column, other=0.0)
        codes += BLOCK_K // 2 * num_columns
        zeros += num_columns
        scales += num_columns
        base = (zero | MAGIC).to(DTYPE, bitcast=True)[None, :]
        low = ((both & 0xF) | MAGIC).to(DTYPE, bitcast=True) - base
        high = (((both >> 4) & 0xF) | MAGIC).to(DTYPE, bitcast=True) - base
        product = tl.dot(first, low)
        product = tl.dot(second, high, product)
        acc += product * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(BIAS + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    out = OUT + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=has_row & has_column[None, :])


def linear(x: Tensor, packed: QuantizedLinear, invariant: bool) -> Tensor:
    """x @ weight.T + bias; raises ValueError when x has another width or no 16 bits."""
    if x.dtype not in SIXTEEN_BITS or x.shape[-1] != packed.in_features:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; the weight takes [rows, {packed.in_features}] of 16 bits")
    rows, columns = x.shape[0], packed.out_features
    tiles = _INVARIANT_TILES if invariant else _TILES
    _, block_m, block_n, num_warps = [entry for entry in tiles if entry[0] <= max(1, rows)][-1]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    grid = (triton.cdiv(columns, block_n), triton.cdiv(rows, block_m))
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, **UNFUSED}
    bias = out if packed.bias is None else packed.bias
    if isinstance(packed, TritonScaledLinear):
        x = x if x.stride(1) == 1 else x.contiguous()
        height, width = packed.block
        _scaled_product[grid](
            x,
            packed.values,
            packed.scales,
            bias,
            out,
            rows,
            columns,
            packed.in_features,
            x.stride(0),
            packed.scales.shape[1],
            height,
            IS_FLOAT=packed.is_float,
            SCALES_DEPTH=0 if width >= packed.in_features else width,
            HAS_BIAS=packed.bias is not None,
            BLOCK_K=packed.block_k,
            num_stages=3,
            **options,
        )
        return out
    if packed.depth > packed.in_features:
        x = F.pad(x, (0, 1))
    x = x.contiguous() if packed.order is None else x.index_select(1, packed.order)
    _grouped_product[grid](
        x,
        packed.codes,
        packed.scales,
        packed.zeros,
        bias,
        out,
        rows,
        columns,
        packed.depth,
        x.stride(0),
        HAS_BIAS=packed.bias is not None,
        BLOCK_K=packed.block_k,
        num_stages=4,
        **options,
    )
    return out
