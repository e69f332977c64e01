"""Ends a call whose client does not take what is sent to it.

Flow control lets such a client hold up its call, and with it the request's task and memory, for as long as the
connection lives, past every deadline. Knows the event loop's clock; knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from router.errors import Cancelled

DEFAULT_TIMEOUT_S = 60.0


class Sending:
    """`since` is when the send that is going on began, by the event loop's clock; None while none is."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None


@contextlib.asynccontextmanager
async def ends_unread(limit_s: float) -> AsyncIterator[Sending]:
    """Ends the block once a send in it has lasted `limit_s`. Raises Cancelled then.

    A send costs two assignments: one timer looks at it every now and then, where a timer for each send would cost more
    than most of what is sent.
    """
    loop, sending = asyncio.get_running_loop(), Sending()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        lasted_s = 0.0 if sending.since is None else loop.time() - sending.since
        if lasted_s >= limit_s:
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(limit_s - lasted_s, look)

    try:
        async with asyncio.timeout(None) as timeout:
            look()
            yield sending
    except TimeoutError:
        if not timeout.expired():
            raise
        raise Cancelled(f"the client took nothing of its answer for {limit_s:g} s (--send-timeout)") from None
    finally:
        if timer is not None:
            timer.cancel()
