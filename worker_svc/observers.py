"""Who looks on while the engine works: metrics and traces. What they see changes nothing.

Knows plans and outcomes; must not know the engine.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.internal.v1 import worker_pb2

if TYPE_CHECKING:
    from worker_svc.outcome import StepOutcome


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was run and published. Times are of the performance counter, in nanoseconds."""

    plan: worker_pb2.StepPlan
    outcome: StepOutcome
    begun_ns: int
    ended_ns: int
    undelivered_rows: Set[int]
    num_refused_sends: int


class Observer(Protocol):
    """One that looks on, in the step thread. Its methods are quick and raise nothing."""

    def attached(self) -> None:
        """A new attachment begins, empty."""
        ...

    def stepped(self, step: Step) -> None:
        """A step is done."""
        ...

    def lost(self) -> None:
        """The attachment is lost, and every row with it."""
        ...
