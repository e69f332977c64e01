"""Weight matrices packed for the extension's own product, and the product.

Knows matrices and row counts; knows no layers. A matrix is kept in the narrowest of bf16, fp16 and fp32 that holds each
of its weights exactly and is widened in registers, so that an fp32 model loaded from a bf16 checkpoint reads half the
memory and answers in the same bits. fp32 weights that a GGUF file held in blocks are kept in such blocks where that
gives back each of them. A matrix of bf16 gets a second copy for steps of few rows (copies.py). Sums are fp32, in one
order whatever the rows, the threads and the copy that was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.arena import Arena
from kernels.cpu.copies import CodedCopies, CodedCopy
from kernels.cpu.dtypes import DTYPE_CODES, dtype_code
from kernels.cpu.extension import native

# Columns of a panel (src/panels.h).
_PANEL_COLUMNS = 32
# Types of panels (src/abi.h), in words, and their bits a weight: codes in blocks carry two fp16 for 32 weights.
_PANELS = {
    **{code: (str(dtype).removeprefix("torch."), 8 * dtype.itemsize) for dtype, code in DTYPE_CODES.items()},
    3: ("blocks of 4 bits", 5),
    4: ("blocks of 8 bits", 9),
}


@dataclass(frozen=True)
class CpuLinear:
    """A weight matrix [out_features, in_features] in panels."""

    in_features: int
    out_features: int
    # What x and the result are in.
    dtype: torch.dtype
    # What the weights are kept in, in words.
    kept_in: str
    panels: Tensor
    # The same weights in twelve bits each, once they are made.
    copy: CodedCopy
    # fp32
    bias: Tensor | None
    # What the extension takes of it, in its order, after context, x, out and the number of rows.
    shape_arguments: tuple[int, int, int, int, int, int, int]


class PanelMemory:
    """Where matrices are kept: apart those that are read at a time, so that one lies behind the other."""

    def __init__(self, max_coded_bytes: int) -> None:
        self.plain = Arena()
        self.copies = CodedCopies(max_coded_bytes)
        self.saved_bytes = 0
        """What plain panels take less than the weights that they hold."""


def pack(context: int, weight: Tensor, bias: Tensor | None, memory: PanelMemory) -> CpuLinear:
    """Packs a weight [out_features, in_features] and its bias [out_features].

    Raises ValueError for other shapes and for types that the kernels do not compute with.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out_features, in_features], got shape {tuple(weight.shape)}")
    weight = weight.contiguous()
    columns, depth = weight.shape
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias must be [{columns}] for this weight, got shape {tuple(bias.shape)}")
    code = dtype_code(weight.dtype)
    stored = native().narrowest(context, weight.data_ptr(), 0, columns, depth, code, code)
    num_items = -(-columns // _PANEL_COLUMNS) * _PANEL_COLUMNS * depth
    kept_in, bits = _PANELS[stored]
    panels = memory.plain.take(num_items * bits // 8)
    native().pack(context, weight.data_ptr(), panels.data_ptr(), columns, depth, code, stored)
    memory.saved_bytes += weight.nbytes - len(panels)
    is_coded = stored == DTYPE_CODES[torch.bfloat16]
    copy = memory.copies.want(panels, columns, depth) if is_coded else CodedCopy()
    kept_bias = None if bias is None else bias.to(torch.float32, copy=True).contiguous()
    address = 0 if kept_bias is None else kept_bias.data_ptr()
    arguments = (columns, depth, code, stored, panels.data_ptr(), copy.place_address, address)
    return CpuLinear(depth, columns, weight.dtype, kept_in, panels, copy, kept_bias, arguments)


def linear(context: int, x: Tensor, packed: CpuLinear) -> Tensor:
    """x @ weight.T + bias; raises ValueError when x has another dtype or width than the weight."""
    num_rows, depth = x.shape
    if depth != packed.in_features or x.dtype != packed.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; the weight takes [num_tokens, {packed.in_features}] {packed.dtype}"
        )
    x = x if x.is_contiguous() else x.contiguous()
    out = x.new_empty((num_rows, packed.out_features))
    if num_rows:
        native().linear(context, x.data_ptr(), out.data_ptr(), num_rows, *packed.shape_arguments)
    return out
