"""The head of a request is bounded in size and time, its body in time, whoever sends it; answers are not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http_server import MAX_HEAD_BYTES, listen, quiet_server
from tests.fakes.router_stack import in_loop


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body, or without looking at it."""
    body = b"" if scope["path"] == "/unread" else await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


@contextlib.asynccontextmanager
async def connection(
    app: ASGIApp = echo, **limits: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server, listener = quiet_server(app, None, **limits), listen("--http-port", "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.stop()
        await serving


@in_loop
async def test_a_head_without_end_is_refused() -> None:
    async with connection() as (reader, writer):
        # All of it is read: what is not would make the end a reset, which overtakes the answer.
        writer.write((b"GET / HTTP/1.1\r\nHost: x\r\nX: ").ljust(MAX_HEAD_BYTES + 1, b"a"))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert str(MAX_HEAD_BYTES).encode() in answer


@in_loop
async def test_large_bodies_one_after_another_are_no_head() -> None:
    body = b"b" * (MAX_HEAD_BYTES + 7)
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with connection() as (reader, writer):
        writer.write(request * 3)
        for _ in range(3):
            assert await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(str(len(body)))) == str(len(body)).encode()


@in_loop
async def test_a_head_that_does_not_come_ends_the_connection() -> None:
    for begun in (b"", b"GET / HTTP/1.1\r\nHost: x\r\nX: "):
        async with connection(head_timeout_s=0.05) as (reader, writer):
            writer.write(begun)
            assert await reader.read() == b""


SLOW = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"
UNREAD = SLOW.replace(b"POST /", b"POST /unread")


@in_loop
async def test_a_body_that_does_not_come_is_refused() -> None:
    async with connection(body_timeout_s=0.05) as (reader, writer):
        writer.write(SLOW)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert (error["code"], error["type"], error["param"]) == (408, "timeout_error", None)
        assert "--body-timeout" in error["message"]


@in_loop
async def test_a_body_that_nobody_reads_holds_no_connection_either() -> None:
    async with connection(body_timeout_s=0.05) as (reader, writer):
        writer.write(UNREAD)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b" 408 " not in answer


@in_loop
async def test_an_answer_may_take_longer_than_its_body() -> None:
    has_body, may_answer = asyncio.Event(), asyncio.Event()

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        has_body.set()
        await may_answer.wait()
        await Response("late")(scope, receive, send)

    limit_s = 0.05
    async with connection(later, head_timeout_s=limit_s, body_timeout_s=limit_s) as (reader, writer):
        writer.write(SLOW + b"cde")
        await has_body.wait()
        # A connection that is opened now and says nothing ends by the same limit, after the first would have.
        silent, its_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        assert await silent.read() == b""
        its_writer.close()
        may_answer.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@in_loop
async def test_whoever_leaves_is_missed_by_the_request_that_is_answered_with_others_behind_it() -> None:
    left: list[str] = []
    is_over = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await send({"type": "http.response.start", "status": 200})
        leaving = asyncio.ensure_future(receive())
        try:
            while not leaving.done():
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
                await asyncio.sleep(0)
            left.append(f"{scope['path']} {leaving.result()['type']}")
        finally:
            is_over.set()

    heads = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(3))
    async with connection(stream) as (reader, writer):
        writer.write(heads)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()
        await asyncio.wait_for(is_over.wait(), 20)
    assert left == ["/0 http.disconnect"]
