"""One benchmark against one server: warm-up, every load with its repeats, and the search for a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from octavo.bench.load import Arrivals, Load, at_times, closed_loop, open_loop
from octavo.bench.options import BenchConfig
from octavo.bench.processes import ServerWatch
from octavo.bench.progress import Progress
from octavo.bench.records import AskError, Target
from octavo.bench.report import Limit, Point
from octavo.bench.search import find_limit
from octavo.bench.statistics import Summary, summarize
from octavo.bench.workload import Workload

_RATE_PRECISION = 0.05


class Session:
    """`server_root` is the process whose tree is watched; None where the server is not on this machine."""

    def __init__(
        self, config: BenchConfig, target: Target, workload: Workload, progress: Progress, server_root: int | None
    ) -> None:
        self._config = config
        self._target = target
        self._workload = workload
        self._progress = progress
        self._server_root = server_root

    async def warm_up(self) -> None:
        """Ask what is not measured, one after the other. Raises AskError where one fails: all would."""
        load = Load("concurrency", 1)
        requests = (await self._workload.requests(load, "warm-up"))[: self._config.num_warmups]
        records = await closed_loop(self._target, requests, 1, self._config.timeout, lambda record: None)
        for record in records:
            if record.error_kind is not None:
                raise AskError(record.error_kind, record.error_message.removeprefix(f"{record.error_kind}: "))

    async def sweep(self, on_point: Callable[[Point], None]) -> list[Point]:
        """Every load of the options, in their order."""
        points = []
        for load in self._config.loads:
            points.append(await self.point(load))
            on_point(points[-1])
        return points

    async def search(self, on_point: Callable[[Point], None]) -> tuple[list[Point], Limit]:
        """The hardest load within the SLO, and every load that was tried, the lightest first."""
        kind: Literal["concurrency", "rate"] = "rate" if self._config.find_limit == "rate" else "concurrency"
        tried: dict[float, Point] = {}

        async def is_met(value: float) -> bool:
            point = tried[value] = await self.point(Load(kind, value))
            on_point(point)
            return (point.mean("slo_share") or 0.0) >= self._config.slo_share

        most = max(1.0, self._config.most_load)
        found = await find_limit(is_met, 1.0, most, in_whole_numbers=kind == "concurrency", precision=_RATE_PRECISION)
        return [tried[value] for value in sorted(tried)], Limit(kind, found)

    async def point(self, load: Load) -> Point:
        """All repeats at one load."""
        return Point(load, tuple([await self._run(load, repeat) for repeat in range(self._config.repeats)]))

    async def _run(self, load: Load, repeat: int) -> Summary:
        config = self._config
        requests = await self._workload.requests(load, f"{load} run {repeat}")
        of = f", run {repeat + 1} of {config.repeats}" if config.repeats > 1 else ""
        self._progress.begin(f"{load}{of}", len(requests))
        watch = ServerWatch(self._server_root)
        clock = asyncio.get_running_loop().time
        begun_s, begun_cpu_s = clock(), time.process_time()
        async with watch.watching():
            if load.kind == "concurrency":
                records = await closed_loop(
                    self._target, requests, int(load.value), config.timeout, self._progress.note
                )
            else:
                arrivals: Arrivals = "fixed" if config.arrivals == "fixed" else "poisson"
                times_s = at_times(requests, load, arrivals, config.seed + repeat)
                records = await open_loop(self._target, requests, times_s, config.timeout, self._progress.note)
            cores = (time.process_time() - begun_cpu_s) / max(1e-9, clock() - begun_s)
        self._progress.end()
        return summarize(records, config.limits, cores, watch.use())
