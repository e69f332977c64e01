"""How long an event loop was kept from running by its own process, however busy the machine is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

_BEAT_S = 0.005


@dataclass
class LoopWatch:
    """`longest_stall_s` is the longest time between two beats in which this process computed all along.

    Of the time that passed and the CPU time that the process took, the smaller one: where the machine ran something
    else, the process took little; where a thread computes beside a loop that runs, little time passes between beats.
    """

    longest_stall_s: float = 0.0
    num_beats: int = 0


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[LoopWatch]:
    """Watch the running loop."""
    found = LoopWatch()

    async def beat() -> None:
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(_BEAT_S)
            stall = min(time.perf_counter() - wall - _BEAT_S, time.process_time() - cpu)
            found.longest_stall_s = max(found.longest_stall_s, stall)
            found.num_beats += 1

    task = asyncio.create_task(beat())
    try:
        yield found
    finally:
        task.cancel()
