"""Weight matrices packed for the extension's own product, and the product.

Knows matrices and row counts; knows no layers. A matrix is kept in the narrowest of bf16, fp16 and fp32 that holds each
of its weights exactly and is widened in registers, so that an fp32 model loaded from a bf16 checkpoint reads half the
memory and answers in the same bits. fp32 weights that a GGUF file held in blocks are kept in such blocks where that
gives back each of them. A matrix of bf16 is kept a second time, coded in twelve bits a weight without loss, while there
is memory to spare: a step of few rows does little more than read weights, and takes a quarter less time. Sums are fp32,
in one order whatever the rows, the threads and the copy that was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.dtypes import DTYPE_CODES, dtype_code
from kernels.cpu.extension import native

# Columns of a panel (src/panels.h).
_PANEL_COLUMNS = 32
# Pieces so large that huge pages, 2 MB each, hold nearly all of them: reading weights then waits for no translation.
_ARENA_BYTES = 64 * 2**20
_ALIGNMENT = 64
# Coded panels of more bytes than this share of the plain ones are not worth their memory.
_MOST_OF_PLAIN = 0.9
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
    # The same weights in twelve bits each.
    coded_panels: Tensor | None
    # fp32
    bias: Tensor | None
    # What the extension takes of it, in its order, after context, x, out and the number of rows.
    shape_arguments: tuple[int, int, int, int, int, int, int]


class Arena:
    """Memory for weights, cut from large pieces of huge pages. Never given back before its last matrix is gone."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised bytes at a multiple of a cache line."""
        if self._used + num_bytes > len(self._piece):
            size = max(num_bytes, _ARENA_BYTES) + _ALIGNMENT
            self._piece = torch.empty(size, dtype=torch.uint8)
            native().advise_huge_pages(self._piece.data_ptr(), size)
            self._used = -self._piece.data_ptr() % _ALIGNMENT
        taken = self._piece[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken

    def shorten(self, taken: Tensor, num_bytes: int) -> Tensor:
        """The first bytes of what was taken last; the rest of it can be taken again."""
        self._used -= (len(taken) - num_bytes) // _ALIGNMENT * _ALIGNMENT
        return taken[:num_bytes]


class PanelMemory:
    """Where matrices are kept: apart those that are read at a time, so that one lies behind the other."""

    def __init__(self, max_coded_bytes: int) -> None:
        self.plain = Arena()
        self.coded = Arena()
        self.max_coded_bytes = max_coded_bytes
        self.coded_bytes = 0
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
    coded = _coded(context, panels, columns, depth, memory) if stored == DTYPE_CODES[torch.bfloat16] else None
    kept_bias = None if bias is None else bias.to(torch.float32, copy=True).contiguous()
    address = 0 if kept_bias is None else kept_bias.data_ptr()
    coded_address = 0 if coded is None else coded.data_ptr()
    arguments = (columns, depth, code, stored, panels.data_ptr(), coded_address, address)
    return CpuLinear(depth, columns, weight.dtype, kept_in, panels, coded, kept_bias, arguments)


def _coded(context: int, panels: Tensor, columns: int, depth: int, memory: PanelMemory) -> Tensor | None:
    """Panels of bf16 coded; None where they would not be smaller or there is no memory for them."""
    capacity = min(int(len(panels) * _MOST_OF_PLAIN), memory.max_coded_bytes - memory.coded_bytes)
    taken = memory.coded.take(capacity)
    used = native().code_panels(context, panels.data_ptr(), taken.data_ptr(), columns, depth, capacity)
    coded = memory.coded.shorten(taken, used)
    memory.coded_bytes += used
    return coded if used else None


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
