"""The head of a request is bounded in size and time, whoever sends it; bodies and answers are not touched by that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http_server import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, listen, quiet_server
from tests.fakes.router_stack import in_loop


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


@contextlib.asynccontextmanager
async def connection(
    head_timeout_s: float = HEAD_TIMEOUT_S,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server, listener = quiet_server(echo, None, head_timeout_s), listen("--http-port", "127.0.0.1", 0)
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
