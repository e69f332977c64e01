"""What waits for a slow reader: tokens joined, everything else as it came."""

from __future__ import annotations

import asyncio

from router.streams.inbox import Inbox
from router.streams.types import NewTokens, QueueMoved, TokenLogprob
from tests.fakes.router_stack import in_loop


@in_loop
async def test_tokens_that_follow_each_other_are_joined() -> None:
    inbox = Inbox()
    one, two = TokenLogprob(1, -0.5), TokenLogprob(2, -1.5)
    inbox.put(0, QueueMoved(1, None))
    inbox.put(0, NewTokens(0, (1,), (one,)))
    inbox.put(0, NewTokens(1, (2,), (two,)))
    inbox.put(1, NewTokens(0, (7,), None))
    inbox.put(0, NewTokens(2, (3,), None))
    assert await inbox.take() == [
        (0, QueueMoved(1, None)),
        (0, NewTokens(0, (1, 2), (one, two))),
        (1, NewTokens(0, (7,), None)),
        (0, NewTokens(2, (3,), None)),
    ]


@in_loop
async def test_a_reader_waits_for_something() -> None:
    inbox = Inbox()
    reader = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    inbox.put(0, NewTokens(0, (1,), None))
    inbox.put(0, NewTokens(1, (2,), None))
    assert await reader == [(0, NewTokens(0, (1, 2), None))]
