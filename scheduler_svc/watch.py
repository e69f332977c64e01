"""What the scheduler's process does beside its calls: notices the passing of time, and says how things stand.

Knows engine and metrics, and the event loop. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from scheduler_svc.engine import Engine
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.summary import Reading, load_line, take_reading, totals_line

_LOG = logging.getLogger(__name__)

_TICK_S = 1.0
_SCRAPE_LIMIT_S = 5.0


def call_in(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
    """Runs a function in the loop from any thread, and returns when it is done; from the loop's own thread at once."""

    def call(work: Callable[[], None]) -> None:
        async def run() -> None:
            work()

        try:
            is_inside = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_inside = False
        if is_inside:
            work()
        else:
            asyncio.run_coroutine_threadsafe(run(), loop).result(_SCRAPE_LIMIT_S)

    return call


class Watch:
    """Looks at one engine. `progress` and `load` run until they are cancelled."""

    def __init__(self, engine: Engine, metrics: SchedulerMetrics, interval_s: float) -> None:
        """`interval_s`: between two lines about the load; 0 for none."""
        self._engine = engine
        self._metrics = metrics
        self._interval_s = interval_s

    def read(self) -> None:
        """Bring the metrics up to date."""
        engine = self._engine
        statistics = engine.core.statistics()
        self._metrics.read(statistics, engine.stalled(), engine.num_routers, len(engine.served.starting))

    async def progress(self) -> None:
        """Let the engine notice what time alone brings about."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._engine.tick()

    async def load(self) -> None:
        """A line about the load every so often, while there is any."""
        if not self._interval_s:
            return
        before = self._take_reading()
        while True:
            await asyncio.sleep(self._interval_s)
            now = self._take_reading()
            if (line := load_line(before, now)) is not None:
                _LOG.info("%s", line)
            before = now

    def totals(self) -> str:
        """What there was from start to end."""
        self.read()
        return totals_line(self._metrics)

    def _take_reading(self) -> Reading:
        self.read()
        return take_reading(self._metrics, self._engine.core.statistics(), self._engine.now())
