"""The CPU as a device: whatever is launched is computed before the launch returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.device.api import Aside, Graph, Mark


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _Done:
    taken_ns: int

    def duration_ns(self) -> int:
        return self.taken_ns


@dataclass(frozen=True)
class Repeated:
    """A graph that launches by calling again."""

    launch: Callable[[], None]

    def replay(self) -> None:
        self.launch()


class CpuDevice:
    """The plain twin of `CudaDevice`."""

    torch_device = torch.device("cpu")
    runs_ahead = False

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _Reached()

    def beside(self, work: Callable[[], None]) -> Aside:
        begun_ns = time.perf_counter_ns()
        work()
        return _Done(time.perf_counter_ns() - begun_ns)

    def follow(self, aside: Aside) -> None:
        pass

    def capture(self, launch: Callable[[], None]) -> Graph:
        launch()
        return Repeated(launch)

    def range(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


CPU = CpuDevice()
"""It has no state: one serves all."""
