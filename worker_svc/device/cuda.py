"""One CUDA device: the steps' stream, a stream for copies beside them, pinned memory, CUDA graphs in one pool.

Knows torch.cuda; knows no steps. Steps are launched on the thread's current stream, copies on one of their own with
events between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.device.api import Aside, Graph, Mark


@dataclass(frozen=True)
class _EventMark:
    event: torch.cuda.Event

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _StreamAside:
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def duration_ns(self) -> int | None:
        if not self.end.query():  # type: ignore[no-untyped-call]
            return None
        return int(self.begin.elapsed_time(self.end) * 1e6)


class CudaDevice:
    """Makes its device the thread's current one. For the thread that computes."""

    runs_ahead = True

    def __init__(self, torch_device: torch.device, has_ranges: bool = False) -> None:
        """`has_ranges` has `range` write NVTX ranges, which cost a little."""
        torch.cuda.set_device(torch_device)
        self.torch_device = torch_device
        self._has_ranges = has_ranges
        self._copies, self._captures = _stream(torch_device), _stream(torch_device)
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        event = _event(enable_timing=False)
        event.record(torch.cuda.current_stream())
        return _EventMark(event)

    def beside(self, work: Callable[[], None]) -> Aside:
        begin, end = _event(enable_timing=True), _event(enable_timing=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies), self.range("block copies"):
            begin.record(self._copies)
            work()
            end.record(self._copies)
        return _StreamAside(begin, end)

    def follow(self, aside: Aside) -> None:
        if not isinstance(aside, _StreamAside):
            raise TypeError(f"{type(aside).__name__} was launched on another device")
        torch.cuda.current_stream().wait_event(aside.end)

    def capture(self, launch: Callable[[], None]) -> Graph:
        # First without a graph: kernels are compiled and libraries make their workspaces, neither of which can be
        # captured.
        self._captures.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._captures):
            launch()
        torch.cuda.current_stream().wait_stream(self._captures)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._captures, capture_error_mode="thread_local"):
            launch()
        return graph

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name) if self._has_ranges else nullcontext()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event(*, enable_timing: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=enable_timing)  # type: ignore[no-untyped-call]
