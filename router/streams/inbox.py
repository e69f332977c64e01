"""What the sequences of one request have to say, until their reader comes for it.

One reader takes everything that waits at once. Tokens of a sequence that follow each other are joined: a client that
reads more slowly than the model writes, and a router with too much to do, are sent fewer and larger deltas. Knows the
outputs of sequences; knows no text.
"""

from __future__ import annotations

import asyncio

from router.streams.types import NewTokens, Output


class Inbox:
    """Filled by the drivers of a request, emptied by its one reader, in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, Output]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, output: Output) -> None:
        """An output of the sequence `index`."""
        waiting = self._waiting
        if waiting and isinstance(output, NewTokens):
            last_index, last = waiting[-1]
            if last_index == index and isinstance(last, NewTokens):
                waiting[-1] = index, _joined(last, output)
                return
        waiting.append((index, output))
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # done where it was cancelled
            reader.set_result(None)

    async def take(self) -> list[tuple[int, Output]]:
        """All that waits, in order; something, however long it takes."""
        while not self._waiting:
            self._reader = self._loop.create_future()
            await self._reader
        taken, self._waiting = self._waiting, []
        return taken


def _joined(first: NewTokens, second: NewTokens) -> NewTokens:
    logprobs = None if first.logprobs is None or second.logprobs is None else first.logprobs + second.logprobs
    return NewTokens(first.position, first.token_ids + second.token_ids, logprobs)
