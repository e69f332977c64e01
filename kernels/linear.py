"""Matrix products: weights packed for oneDNN, and the proof at load that a row's result does not depend on the others.

Knows weight matrices and row counts; knows no layers. oneDNN computes a lone row with another kernel, so one row is
padded to two, and calls are bounded in rows and columns, so that the row counts probed stand for all that occur.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout hint of the packing: packing for 1 row is slow at every other count, packing for 32 is good everywhere.
_PACK_ROWS = 32
_MAX_CALL_ROWS = 512
# Wide matrices (the vocabulary's) are cut, which bounds what a probe costs.
_MAX_PART_COLUMNS = 8192
_PROBE_ROWS = (2, 3, 16, 17, 63, 64, 65, 512)
# Distinct rows of a probe; a number coprime to every vector width and tile height puts each in every place of a tile.
_PROBE_DISTINCT_ROWS = 13


@dataclass(frozen=True)
class ReferenceLinear:
    """A weight matrix cut into column ranges, each in oneDNN's layout; or one plain matrix without it."""

    in_features: int
    out_features: int
    # What x and the result are in.
    dtype: torch.dtype
    # What the product is computed in.
    compute_dtype: torch.dtype
    parts: tuple[tuple[Tensor, Tensor | None], ...]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def pack(weight: Tensor, bias: Tensor | None) -> tuple[ReferenceLinear, str]:
    """Packs a weight and says why its product is not row invariant ("" when it is).

    Tries the weight's own dtype first, then fp32 for 16-bit ones (exact inputs, one rounding at the end, twice the
    memory), then the plain product. Raises ValueError for a weight that is not a matrix.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out_features, in_features], got shape {tuple(weight.shape)}")
    columns, depth = weight.shape
    widths = sorted({min(_MAX_PART_COLUMNS, columns), columns % _MAX_PART_COLUMNS} - {0})
    candidates = [dtype for dtype in _compute_dtypes(weight.dtype) if onednn_supports(dtype)]
    for dtype in candidates:
        if all(_shape_agrees(width, depth, dtype) for width in widths):
            cuts = range(0, columns, _MAX_PART_COLUMNS)
            parts = tuple(_pack_part(weight, bias, cut, dtype) for cut in cuts)
            return ReferenceLinear(depth, columns, weight.dtype, dtype, parts, _onednn_linear), ""
    why = (
        f"a {columns}x{depth} {weight.dtype} product gives a row other bits in other batches"
        if candidates
        else f"this torch has no oneDNN product of packed {weight.dtype} weights"
    )
    return ReferenceLinear(depth, columns, weight.dtype, weight.dtype, ((weight, bias),), F.linear), why


def linear(x: Tensor, packed: ReferenceLinear) -> Tensor:
    """x @ weight.T + bias; raises ValueError when x has another dtype or width than the weight."""
    if x.dtype != packed.dtype or x.shape[-1] != packed.in_features:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; the weight takes [num_tokens, {packed.in_features}] {packed.dtype}"
        )
    rows = x.to(packed.compute_dtype)
    cuts = range(0, len(rows), _MAX_CALL_ROWS)
    pieces = [_linear_rows(rows[cut : cut + _MAX_CALL_ROWS], packed) for cut in cuts]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result.to(packed.dtype)


def _linear_rows(x: Tensor, packed: ReferenceLinear) -> Tensor:
    num_rows = x.shape[0]
    padded = x if num_rows > 1 else torch.cat((x, x))
    products = [packed.product(padded, weight, bias) for weight, bias in packed.parts]
    result = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    return result[:num_rows]


def _pack_part(weight: Tensor, bias: Tensor | None, cut: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    part = weight[cut : cut + _MAX_PART_COLUMNS].to(dtype).contiguous()
    part_bias = None if bias is None else bias[cut : cut + _MAX_PART_COLUMNS].to(dtype).contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(part, _PACK_ROWS), part_bias


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _compute_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)


@functools.cache
def onednn_supports(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU multiply packed weights of `dtype`."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and operators_support(torch.ops.mkldnn, dtype)


def operators_support(operators: Any, dtype: torch.dtype) -> bool:
    """Whether torch's private operators are the ones used here, and take `dtype`; other releases may lack some."""
    if not all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if probe is None:
        return dtype == torch.float32
    return hasattr(operators, probe) and bool(getattr(operators, probe)())


@functools.cache
def _shape_agrees(columns: int, depth: int, dtype: torch.dtype) -> bool:
    """`rows_agree` for a weight shape. Short random patterns stand for the real weight: shapes choose the kernel."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(997, generator=generator).to(dtype)
    size = columns * depth
    weight = pattern.repeat(size // len(pattern) + 1)[:size].view(columns, depth)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    distinct = torch.randn(_PROBE_DISTINCT_ROWS, depth, generator=generator).to(dtype)
    return rows_agree(lambda x: _onednn_linear(x, packed, None), distinct)


def rows_agree(product: Callable[[Tensor], Tensor], distinct: Tensor) -> bool:
    """Whether equal rows give bitwise equal results at every place of calls of every probed row count."""
    expected = product(distinct)
    for num_rows in _PROBE_ROWS:
        which = torch.arange(num_rows) % len(distinct)
        if not torch.equal(product(distinct[which]), expected[which]):
            return False
    return True
