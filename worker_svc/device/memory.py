"""A card's memory as one rank sees it: what is free, what it holds itself, what a piece of work takes at most."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class CardMemory:
    """Bytes of one card at one moment. `own_bytes` are this process's, torch's cache and its context included."""

    total_bytes: int
    free_bytes: int
    own_bytes: int

    @property
    def others_bytes(self) -> int:
        """Held by other processes."""
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


class Meter(Protocol):
    """Measures one card."""

    def read(self) -> CardMemory:
        """Now, with nothing kept that could be given back."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Most memory that `work` takes at once beyond what is held already."""
        ...

    def kept_bytes(self, work: Callable[[], object]) -> int:
        """Memory that is gone while what `work` returns is held."""
        ...


class CudaMeter:
    """Made before anything is on the card, so that what was held before is known to be others'."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.cuda.mem_get_info(device)
        # Asking made the context, which is ours, but small beside what is divided here.
        self._free_at_start = free

    def read(self) -> CardMemory:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        # Libraries hold memory that torch does not count; what others took since the start looks the same.
        return CardMemory(total, free, max(reserved, min(self._free_at_start - free, 2 * reserved)))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def kept_bytes(self, work: Callable[[], object]) -> int:
        before = self.read().free_bytes
        held = work()
        after = self.read().free_bytes
        del held
        return max(0, before - after)
