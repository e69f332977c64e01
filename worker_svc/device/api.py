"""What a step asks of the device it runs on, beside kernels: host memory, marks in time, copies beside it, graphs.

Work is *launched*; on a device that runs ahead it is computed later, in the order of its launches. Knows no tensors'
meaning and no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point after everything that had been launched when it was made."""

    def is_reached(self) -> bool:
        """Whether all of it is computed. Never waits."""
        ...

    def wait(self) -> None:
        """Returns when it is."""
        ...


class Aside(Protocol):
    """Work that runs beside the steps."""

    def duration_ns(self) -> int | None:
        """The nanoseconds that it took; None while it runs. Never waits."""
        ...


class Graph(Protocol):
    """Launches that were recorded once: the same kernels on the same tensors, whatever those hold by then."""

    def replay(self) -> None:
        """Launches all of them."""
        ...


class Device(Protocol):
    """Used by the step thread alone."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a launch returns before it is computed, so that it pays to launch a step before the last is done."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Uninitialised uint8 host memory that the device copies from and to by itself."""
        ...

    def mark(self) -> Mark:
        """After what has been launched so far."""
        ...

    def beside(self, work: Callable[[], None]) -> Aside:
        """Launches copies beside the steps: after what has been launched so far, and after earlier ones.

        What is launched later does not wait for them unless `follow` says so. Raises what `work` raises.
        """
        ...

    def follow(self, aside: Aside) -> None:
        """What is launched from now on comes after `aside`."""
        ...

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Records what `launch` launches, after running it once. Graphs share memory: replay them one after another."""
        ...

    def range(self, name: str) -> AbstractContextManager[object]:
        """Names what is launched inside for a profiler."""
        ...
