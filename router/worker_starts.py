"""The starts of workers as the scheduler reports them, phase by phase, so that readiness can tell all of a start.

A report says only where a worker is; this remembers where it was. Times are this router's. Knows no surface.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from octavo.internal.v1 import scheduler_pb2, types_pb2
from octavo.phases import Phase

MAX_WORKERS = 16
"""Starts that are remembered, the newest."""

_COUNTS = re.compile(r"(\d+)/(\d+)")
_LAST_PHASES = frozenset({"warm-up", "ready"})


class WorkerStarts:
    """What is known of the workers' starts. A start that ended before it could succeed is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: dict[str, list[Phase]] = {}
        # When the running phase of a worker began; of those that start now, and of no other.
        self._begun: dict[str, float] = {}

    def observe(self, starting: Iterable[scheduler_pb2.StartingWorker]) -> None:
        """Take in a report: every worker that is starting now, and where it is."""
        now = self._clock()
        reported = {worker.name: worker.phase for worker in starting}
        for name, phase in reported.items():
            self._advance(name, phase, now)
        for name in self._begun.keys() - reported.keys():
            self._finish(name, now)
        while len(self._phases) > MAX_WORKERS:
            oldest = next(iter(self._phases))
            del self._phases[oldest]
            self._begun.pop(oldest, None)

    def snapshot(self) -> list[tuple[str, Phase]]:
        """Worker and phase of each that is remembered, a worker's in their order."""
        now = self._clock()
        return [
            (name, phase if phase.ended else replace(phase, seconds=now - self._begun[name]))
            for name, phases in self._phases.items()
            for phase in phases
        ]

    def _advance(self, name: str, reported: types_pb2.StartPhase, now: float) -> None:
        phases = self._phases.setdefault(name, [])
        if not phases or phases[-1].ended or phases[-1].name != reported.name:
            self._end_running(name, now)
            phases.append(Phase(reported.name, 0.0, ended=False))
            self._begun[name] = now
        counts = _COUNTS.match(reported.detail)
        if counts:
            phases[-1] = replace(phases[-1], done=int(counts[1]), total=int(counts[2]))

    def _finish(self, name: str, now: float) -> None:
        if self._phases[name][-1].name in _LAST_PHASES:
            self._end_running(name, now)
        else:
            del self._phases[name]
        del self._begun[name]

    def _end_running(self, name: str, now: float) -> None:
        phases = self._phases[name]
        if phases and not phases[-1].ended:
            phases[-1] = replace(phases[-1], seconds=now - self._begun[name], ended=True)
