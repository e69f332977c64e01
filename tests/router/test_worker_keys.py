"""CURVE on the token path: a router with a key takes tokens from the workers that the scheduler named alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from octavo.internal.v1 import worker_pb2
from router.streams.token_inlet import TokenInlet
from router.streams.types import PromptDelta, TokenDelta
from tests.fakes.router_stack import in_loop
from worker_svc.token_outlet import TokenOutlet

KEY, ROUTER_ID = 7, 1


class Taken:
    """What one stream key got."""

    def __init__(self, inlet: TokenInlet) -> None:
        self._queue: asyncio.Queue[TokenDelta | PromptDelta] = asyncio.Queue()
        inlet.register(KEY, self._queue.put_nowait)

    async def next(self) -> tuple[int, ...]:
        delta = await self._queue.get()
        assert isinstance(delta, TokenDelta)
        return delta.token_ids

    @property
    def empty(self) -> bool:
        return self._queue.empty()


@contextlib.asynccontextmanager
async def listening(*, curve: bool = True) -> AsyncIterator[tuple[TokenInlet, Taken]]:
    inlet = TokenInlet("tcp://127.0.0.1:0", curve=curve)
    running = asyncio.create_task(inlet.run())
    try:
        yield inlet, Taken(inlet)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        inlet.close()


@contextlib.contextmanager
def worker(endpoint: str, public_key: str) -> Iterator[TokenOutlet]:
    outlet = TokenOutlet()
    outlet.add_router(worker_pb2.RouterEndpoint(router_id=ROUTER_ID, endpoint=endpoint, curve_public_key=public_key))
    try:
        yield outlet
    finally:
        outlet.reset()
        outlet.close()


def batch(*token_ids: int) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(
        stream_keys=[KEY],
        attempts=[1],
        positions=[0],
        num_tokens=[len(token_ids)],
        token_ids=token_ids,
        finish_reasons=[0],  # type: ignore[list-item]
        final_token_ids=[0],
    )


@in_loop
async def test_a_named_worker_is_heard() -> None:
    async with listening() as (inlet, taken):
        with worker(inlet.endpoint, inlet.curve_public_key) as outlet:
            inlet.authorise([outlet.curve_public_key])
            assert outlet.send(ROUTER_ID, batch(1, 2))
            assert await taken.next() == (1, 2)


@in_loop
async def test_a_worker_that_connects_before_it_is_named_is_heard_once_it_is() -> None:
    async with listening() as (inlet, taken):
        with worker(inlet.endpoint, inlet.curve_public_key) as outlet:
            assert outlet.send(ROUTER_ID, batch(3))
            assert inlet.worker_keys is not None
            while inlet.worker_keys.num_pending == 0:
                await asyncio.sleep(0.01)
            assert taken.empty
            inlet.authorise(["not Z85", outlet.curve_public_key])
            assert await taken.next() == (3,)


@in_loop
async def test_a_worker_that_is_not_named_is_not_heard() -> None:
    async with listening() as (inlet, taken):
        with (
            worker(inlet.endpoint, inlet.curve_public_key) as stranger,
            worker(inlet.endpoint, inlet.curve_public_key) as known,
        ):
            inlet.authorise([known.curve_public_key])
            stranger.send(ROUTER_ID, batch(666))
            assert inlet.worker_keys is not None
            while inlet.worker_keys.num_pending == 0:
                await asyncio.sleep(0.01)
            known.send(ROUTER_ID, batch(5))
            assert await taken.next() == (5,)
            assert taken.empty


@pytest.mark.parametrize("key", ["", zmq.curve_keypair()[0].decode()], ids=["none", "another router's"])
@in_loop
async def test_a_worker_with_the_wrong_key_of_the_router_is_not_heard(key: str) -> None:
    async with listening() as (inlet, taken):
        with (
            worker(inlet.endpoint, key) as mistaken,
            worker(inlet.endpoint, inlet.curve_public_key) as right,
        ):
            inlet.authorise([mistaken.curve_public_key, right.curve_public_key])
            mistaken.send(ROUTER_ID, batch(666))
            right.send(ROUTER_ID, batch(5))
            assert await taken.next() == (5,)
            assert taken.empty


@pytest.mark.parametrize(
    "garbage", [b"\x80\x04K*.", b"\xff" + b"\0" * 8 + b"\x7f" + b"x" * 4096, b"GET / HTTP/1.1\r\n\r\n"]
)
@in_loop
async def test_f68_garbage_on_the_token_port_changes_nothing(garbage: bytes) -> None:
    async with listening() as (inlet, taken):
        host, _, port = inlet.endpoint.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await writer.drain()
        with worker(inlet.endpoint, inlet.curve_public_key) as outlet:
            inlet.authorise([outlet.curve_public_key])
            outlet.send(ROUTER_ID, batch(4))
            assert await taken.next() == (4,)
        writer.close()
        assert inlet.num_dropped_messages == 0
        del reader


@in_loop
async def test_without_curve_no_key_is_needed() -> None:
    async with listening(curve=False) as (inlet, taken):
        assert inlet.curve_public_key == ""
        inlet.authorise(["anything"])
        with worker(inlet.endpoint, "") as outlet:
            outlet.send(ROUTER_ID, batch(9))
            assert await taken.next() == (9,)
