"""The events of several prompts of one request, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router.requests import Event


async def merge(runs: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all runs as they come; the first error ends them all."""
    if len(runs) == 1:
        async for event in runs[0]:
            yield 0, event
        return
    merged: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()

    async def pump(position: int, events: AsyncGenerator[Event, None]) -> None:
        try:
            async for event in events:
                merged.put_nowait((position, event))
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)

    pumps = [asyncio.create_task(pump(position, events)) for position, events in enumerate(runs)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
