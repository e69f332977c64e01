"""Who looks on while the engine works: metrics and traces. What they see changes nothing.

Knows calls, the core's events and statistics; must not know the engine.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.statistics import ReplicaStatistics
from scheduler_svc.core.types import Event
from scheduler_svc.parties import Call


class Observer(Protocol):
    """One that looks on. Its methods are quick and raise nothing."""

    def accepted(self, call: Call) -> None:
        """A sequence was accepted; its events follow."""
        ...

    def saw(self, event: Event, call: Call) -> None:
        """The core said this of a live sequence, or of one that its caller has just cancelled."""
        ...

    def leaving(self, replica: ReplicaStatistics) -> None:
        """A replica is about to be forgotten; this is the last word on what it did."""
        ...
