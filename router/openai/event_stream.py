"""A response of server-sent events. Knows ASGI and the format's framing; knows nothing of what the events say.

A comment goes out in silence. A client that leaves ends the work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import Cancelled, RouterError
from router.openai.shapes import error_json
from router.openai.transport import body_sender, dump, error_response, unless_gone

T = TypeVar("T")

COMMENT_INTERVAL_S = 10.0
"""Silence after which a comment line is sent, so that proxies keep an idle stream open."""

_DONE = "data: [DONE]\n\n"


def as_event(data: str) -> str:
    """An event with this data, which has no line break."""
    return f"data: {data}\n\n"


class EventStream(Response, Generic[T]):
    """The events that `lines` makes of each item, in pieces that go out one by one, then those of `last`.

    An error before the first one is an HTTP error; a later one is an event of its own.
    """

    def __init__(
        self,
        items: contextlib.AbstractAsyncContextManager[AsyncIterator[T]],
        lines: Callable[[T], Iterable[str]],
        last: Callable[[], Iterable[str]] = lambda: (),
        on_error: Callable[[RouterError], None] = lambda error: None,
        comment_interval_s: float = COMMENT_INTERVAL_S,
    ) -> None:
        """`on_error` is told of an error before it is written."""
        self._items = items
        self._lines = lines
        self._last = last
        self._comment_interval_s = comment_interval_s
        self._on_error = on_error
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Cancelled):
            await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _EventWriter(send, body_sender(scope, send))
        comments = asyncio.create_task(writer.comment_in_silence(self._comment_interval_s))
        lines = self._lines
        try:
            async with self._items as items:
                async for item in items:
                    for line in lines(item):
                        await writer.write(line)
            for line in self._last():
                await writer.write(line)
        except RouterError as error:
            self._on_error(error)
            if not writer.started:
                await error_response(error)(scope, receive, send)
                return
            await writer.write(as_event(dump(error_json(error))))
        finally:
            comments.cancel()
        await writer.write(_DONE, more=False)


class _EventWriter:
    def __init__(self, send: Send, send_body: Send) -> None:
        self._send = send
        self._send_body = send_body
        self._wrote = False
        self._follows_comment = False
        self.started = False

    async def write(self, text: str, *, more: bool = True) -> None:
        self._wrote = True
        if self._follows_comment:
            # Readers that strip what they read have lost the comment's end, and would take the event for a part of it;
            # vLLM's benchmark client is one.
            self._follows_comment, text = False, f":\n\n{text}"
        await self._put(text, more)

    async def _put(self, text: str, more: bool) -> None:
        if not self.started:
            await self._start()
        await self._send_body({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def comment_in_silence(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if not self._wrote:
                # Said before it is sent: an event may come while the connection takes it.
                self._follows_comment = True
                await self._put(": waiting\n\n", True)
            self._wrote = False

    async def _start(self) -> None:
        self.started = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
