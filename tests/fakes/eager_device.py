"""A device that runs ahead on the CPU: steps are computed at their launch, and admitted to be done when a test says so.

It notes what it was asked, in order, so that a test can see what follows what. `PaddedReference` lets the reference
kernels take the padding rows of a captured batch, as GPU kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.api import KVCache, KVCacheSpec, PackedLinear, RaggedBatch
from kernels.quantized import QuantizedWeight
from kernels.reference import ReferenceBackend
from kernels.reference.quantized import dequantize
from worker_svc.device.api import Aside, Graph, Mark


@dataclass
class _Mark:
    device: EagerDevice
    number: int

    def is_reached(self) -> bool:
        return self.number <= self.device.num_reached

    def wait(self) -> None:
        self.device.num_reached = max(self.device.num_reached, self.number)
        self.device.events.append(f"wait for mark {self.number}")


@dataclass(frozen=True)
class _Aside:
    device: EagerDevice
    number: int

    def duration_ns(self) -> int | None:
        return None if self.device.copies_lag else 1000 * self.number


@dataclass(frozen=True)
class _Graph:
    device: EagerDevice
    number: int
    launch: Callable[[], None]

    def replay(self) -> None:
        self.device.events.append(f"replay {self.number}")
        self.launch()


class EagerDevice:
    """Runs ahead, on the CPU."""

    torch_device = torch.device("cpu")
    runs_ahead = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_marks = self.num_reached = self.num_asides = self.num_graphs = 0
        # Copies beside the steps are not done yet.
        self.copies_lag = False

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    def mark(self) -> Mark:
        self.num_marks += 1
        return _Mark(self, self.num_marks)

    def beside(self, work: Callable[[], None]) -> Aside:
        self.num_asides += 1
        self.events.append(f"copies {self.num_asides}")
        work()
        return _Aside(self, self.num_asides)

    def follow(self, aside: Aside) -> None:
        assert isinstance(aside, _Aside)
        self.events.append(f"follow copies {aside.number}")

    def capture(self, launch: Callable[[], None]) -> Graph:
        self.num_graphs += 1
        launch()
        return _Graph(self, self.num_graphs, launch)

    def range(self, name: str) -> AbstractContextManager[object]:
        return self._noted(name)

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        self.events.append(name)
        yield


class PaddedReference(ReferenceBackend):
    """Keeps a block to itself, in which padding rows write and read what nobody looks at.

    It is given quantized weights, as GPU kernels are, and notes them; what it multiplies is what they stand for.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        super().__init__(num_threads)
        self.quantized: list[QuantizedWeight] = []

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        self.quantized.append(weight)
        return self.pack_linear(dequantize(weight).to(dtype), bias)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> KVCache:
        return super().allocate_kv_cache(replace(spec, num_blocks=spec.num_blocks + 1))

    def plan_attention(self, batch: RaggedBatch, cache: KVCache):  # type: ignore[no-untyped-def]
        is_padding = batch.context_lens == 0
        if batch.max_query_len == 1:
            assert not batch.positions[is_padding].any()
        tables = batch.block_tables.clone()
        tables[is_padding, 0] = cache.spec.num_blocks - 1
        lens = torch.where(is_padding, 1, batch.context_lens)
        return super().plan_attention(replace(batch, context_lens=lens, block_tables=tables), cache)
