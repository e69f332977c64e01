"""A peer that answers no ping is let go in the time that was asked for."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from octavo.keepalive import keepalive_options

GOODBYE_LIMIT_S = 30.0
"""Half of what gRPC takes unless it is told."""


def test_a_peer_that_stands_still_is_let_go() -> None:
    async def test() -> None:
        server = grpc.aio.server(options=[*keepalive_options(0.1, 0.1), ("grpc.keepalive_permit_without_calls", 1)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        settings = b"\0\0\0\4\0\0\0\0\0"
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(2**16):
                pass
        writer.close()
        await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), GOODBYE_LIMIT_S))
