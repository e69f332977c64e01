"""Memory for weights: large pieces of huge pages, from which matrices are cut one behind the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.extension import native

# Pieces so large that huge pages, 2 MB each, hold nearly all of them: reading weights then waits for no translation.
_PIECE_BYTES = 64 * 2**20
_ALIGNMENT = 64


class Arena:
    """Used by one thread at a time. No piece is given back before its last matrix is gone."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised bytes at a multiple of a cache line."""
        if self._used + num_bytes > len(self._piece):
            size = max(num_bytes, _PIECE_BYTES) + _ALIGNMENT
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
