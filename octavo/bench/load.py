"""Sends requests: so many at once (closed loop), or at given times whatever the server does (open loop).

Knows the event loop's clock, which a test may replace, and the `Target` protocol. Measures; judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from octavo.bench.records import AskError, BenchRequest, Record, Target

Arrivals = Literal["poisson", "fixed"]
OnRecord = Callable[[Record], None]


@dataclass(frozen=True)
class Load:
    """How hard to push: so many requests `at once`, so many `per second`, or at the times of a `trace`."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    """Requests at once, or a second; of a trace, how many times faster than written."""

    def __str__(self) -> str:
        return {"concurrency": "{:g} at once", "rate": "{:g}/s", "trace": "trace x{:g}"}[self.kind].format(self.value)


def arrival_times(requests_per_s: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds from the begin at which requests come, without end: the same ones for the same seed.

    Poisson: gaps are exponential, as of many clients that know nothing of each other. The first request comes after
    the first gap.
    """
    random, at_s = Random(f"arrivals {seed}"), 0.0
    while True:
        at_s += random.expovariate(requests_per_s) if arrivals == "poisson" else 1 / requests_per_s
        yield at_s


def at_times(requests: Sequence[BenchRequest], load: Load, arrivals: Arrivals, seed: int) -> list[float]:
    """When each request of an open loop is due, from the begin. Raises ValueError for a trace without times."""
    if load.kind == "rate":
        return list(islice(arrival_times(load.value, arrivals, seed), len(requests)))
    times = [request.at_s for request in requests if request.at_s is not None]
    if load.kind != "trace" or len(times) != len(requests):
        raise ValueError(f"a load of {load} has no times for {len(requests)} requests")
    return [(at_s - min(times)) / load.value for at_s in times]


async def closed_loop(
    target: Target, requests: Sequence[BenchRequest], num_at_once: int, timeout_s: float, on_record: OnRecord
) -> list[Record]:
    """Keep so many requests open until all are answered; each lane asks the next one when its last has ended."""
    pending, records = iter(requests), list[Record]()
    loop = asyncio.get_running_loop()

    async def lane() -> None:
        for request in pending:
            record = Record(due_s=loop.time())
            records.append(record)
            await _ask(target, request, record, timeout_s)
            on_record(record)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(num_at_once, len(requests))):
            lanes.create_task(lane())
    return records


async def open_loop(
    target: Target,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    timeout_s: float,
    on_record: OnRecord,
) -> list[Record]:
    """Send each request at its time from now, however many are open already, and wait for the last answer."""
    loop = asyncio.get_running_loop()
    begin, records = loop.time(), list[Record]()

    async def one(request: BenchRequest, record: Record) -> None:
        await _ask(target, request, record, timeout_s)
        on_record(record)

    async with asyncio.TaskGroup() as asked:
        for request, at_s in sorted(zip(requests, times_s, strict=True), key=lambda pair: pair[1]):
            await asyncio.sleep(begin + at_s - loop.time())
            record = Record(due_s=begin + at_s)
            records.append(record)
            asked.create_task(one(request, record))
    return records


async def _ask(target: Target, request: BenchRequest, record: Record, timeout_s: float) -> None:
    """Ask one, and note what happens. A failure is part of what happens; a defect of ours is raised."""
    time = asyncio.get_running_loop().time

    def note_tokens(num_tokens: int) -> None:
        record.arrivals_s.append(time())
        record.num_arrived_tokens += num_tokens

    record.sent_s = time()
    try:
        async with asyncio.timeout(timeout_s):
            record.answer = await target.ask(request, note_tokens)
    except AskError as error:
        record.error_kind, record.error_message = error.kind, str(error)
    except TimeoutError:
        record.error_kind, record.error_message = "timeout", f"no complete answer within {timeout_s:g} s (--timeout)"
    record.ended_s = time()
