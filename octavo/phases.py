"""Start-up in named phases: each is timed, logged, and reported through a callback.

Knows names and times; must not know what a phase does or who is told.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

_LOG = logging.getLogger(__name__)


class Abandoned(Exception):
    """Raised in a phase, or by a report, to give the start up on purpose: nothing has failed."""


@dataclass(frozen=True)
class Phase:
    """One phase as it stands: `seconds` so far, in all once it `ended`; `done` of `total` units, if counted."""

    name: str
    seconds: float
    ended: bool
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        count = f" {self.done}/{self.total}" if self.total is not None else ""
        return f"{self.name}{count} {self.seconds:.2f} s{'' if self.ended else ' ...'}"


Report = Callable[[Phase], None]


class Phases:
    """The phases of one start, in order. One thread runs them; `snapshot` may be read from any.

    `report` is called, in the running thread, with each phase as it begins, counts on, and ends. A phase that
    raises is logged as failed and stays unended: the last one of a snapshot is where the start stopped.
    """

    def __init__(self, report: Report | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._started = clock()
        self._phases: tuple[Phase, ...] = ()

    @property
    def seconds(self) -> float:
        """Time since the first phase could have begun."""
        return self._clock() - self._started

    def snapshot(self) -> tuple[Phase, ...]:
        """Every phase begun so far, the running one last."""
        return self._phases

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Run a block as a phase; the block may call what it is given with the units done so far."""
        begun = self._clock()
        current = Phase(name, 0.0, ended=False, done=None if total is None else 0, total=total)
        self._phases = (*self._phases, current)
        self._tell(current)

        def advance(done: int) -> None:
            self._tell(replace(self._phases[-1], seconds=self._clock() - begun, done=done))

        try:
            yield advance
        except Abandoned:
            _LOG.info("start: %s given up after %.2f s", name, self._clock() - begun)
            raise
        except BaseException:
            _LOG.error("start: %s failed after %.2f s", name, self._clock() - begun)
            raise
        self._tell(replace(self._phases[-1], seconds=self._clock() - begun, ended=True))
        _LOG.info("start: %s", self._phases[-1])

    def _tell(self, phase: Phase) -> None:
        self._phases = (*self._phases[:-1], phase)
        if self._report is not None:
            self._report(phase)
