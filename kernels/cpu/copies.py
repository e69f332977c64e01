"""Second copies of matrices, coded in twelve bits a weight without loss, for steps of few rows.

Such a step does little more than read weights. One thread makes the copies, beside the one that computes; that one
takes them into use between two calls of the extension, within which all threads have to read the same. Knows panels of
bf16; knows no rows and no layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.arena import Arena
from kernels.cpu.extension import native

# Coded panels of more bytes than this share of the plain ones are not worth their memory.
_MOST_OF_PLAIN = 0.9


class CodedCopy:
    """The copy of one matrix, once there is one."""

    def __init__(self) -> None:
        self.panels: Tensor | None = None
        # Where the extension finds the address of `panels`; 0: none.
        self._place = torch.zeros(1, dtype=torch.int64)

    @property
    def place_address(self) -> int:
        return self._place.data_ptr()

    def set(self, panels: Tensor) -> None:
        """From the next call of the extension on; not beside one."""
        self.panels = panels
        self._place.fill_(panels.data_ptr())


@dataclass(frozen=True)
class _Wanted:
    """Panels of bf16 of a matrix [columns, depth], and what their copy is for."""

    panels: Tensor
    columns: int
    depth: int
    copy: CodedCopy

    @property
    def most_bytes(self) -> int:
        return int(len(self.panels) * _MOST_OF_PLAIN)


class CodedCopies:
    """All copies of a backend, wanted, made, and in use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arena = Arena()
        self._used_bytes = 0
        self._wanted: deque[_Wanted] = deque()
        self._made: deque[tuple[CodedCopy, Tensor]] = deque()

    @property
    def num_bytes(self) -> int:
        """What they take, and what those that are wanted will take at most."""
        wanted = sum(each.most_bytes for each in tuple(self._wanted))
        return min(self._used_bytes + wanted, self._max_bytes)

    def want(self, panels: Tensor, columns: int, depth: int) -> CodedCopy:
        """The copy of these panels, which `make` makes."""
        copy = CodedCopy()
        if self._used_bytes < self._max_bytes:
            self._wanted.append(_Wanted(panels, columns, depth, copy))
        return copy

    def make(self, context: int, goes_on: Callable[[], bool]) -> int:
        """Makes what is wanted, matrix by matrix, until `goes_on` says no; the bytes of all copies then.

        In one thread at a time, whichever. A matrix gets none where it would not be much smaller or memory does not
        suffice.
        """
        while self._wanted and goes_on():
            wanted = self._wanted[0]
            capacity = min(wanted.most_bytes, self._max_bytes - self._used_bytes)
            taken = self._arena.take(capacity)
            shape = (wanted.columns, wanted.depth)
            used = native().code_panels(context, wanted.panels.data_ptr(), taken.data_ptr(), *shape, capacity)
            coded = self._arena.shorten(taken, used)
            if used:
                self._made.append((wanted.copy, coded))
            self._used_bytes += used
            self._wanted.popleft()
        return self._used_bytes

    def adopt(self) -> None:
        """Takes into use what has been made. For the thread that computes, and not beside a call of the extension."""
        while self._made:
            copy, panels = self._made.popleft()
            copy.set(panels)
