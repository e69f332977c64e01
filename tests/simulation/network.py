"""The network of the simulation: gRPC calls whose messages are late and whose connections break, and a token path that
loses, repeats and reorders.

Knows messages as bytes and who waits for them; knows nothing of what they mean. Every delay and every loss comes from
the one random generator of the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Never

import grpc
import grpc.aio
from google.protobuf.message import Message

_RECENT_LINES = 400
_TICK_S = 1e-6


class Trace:
    """What happened, as a running hash and the last lines for people."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hash = sha256()
        self.lines: list[str] = []
        self.keeps_all = False

    def note(self, line: str, content: bytes = b"") -> None:
        """Takes note of one event; `content` counts for the hash alone."""
        line = f"{self._clock():10.6f} {line}"
        self._hash.update(line.encode())
        self._hash.update(content)
        self.lines.append(line)
        if len(self.lines) > 2 * _RECENT_LINES and not self.keeps_all:
            del self.lines[:-_RECENT_LINES]

    def digest(self) -> str:
        """Equal for equal histories alone."""
        return self._hash.hexdigest()


@dataclass
class Weather:
    """How bad the network is now."""

    longest_delay_s: float
    token_loss: float = 0.0
    token_repeats: float = 0.0
    token_reordering: float = 0.0

    def calm(self) -> None:
        """From now on nothing is lost, repeated or reordered."""
        self.token_loss = self.token_repeats = self.token_reordering = 0.0


class Aborted(Exception):
    """What `abort` raises in a handler; the call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]]) -> None:
        super().__init__(code, details)
        self.error = _failure(code, details, metadata)


class CallContext:
    """What a handler sees of its call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, Any]] = ()
    ) -> Never:
        raise Aborted(code, details, trailing_metadata)


class Wire:
    """One direction of a connection: keeps the order, takes its time, and once cut delivers nothing any more."""

    def __init__(self, network: Network, deliver: Callable[[Any], None]) -> None:
        self._network, self._deliver = network, deliver
        self._last_s = 0.0
        self._is_cut = False

    def send(self, item: Any) -> None:
        """Puts something on its way."""
        self._last_s = max(self._last_s + _TICK_S, self._network.now_s + self._network.delay_s())
        self._network.loop.call_at(self._last_s, self._arrive, item)

    def cut(self) -> None:
        """Loses whatever is under way, and all that follows."""
        self._is_cut = True

    def _arrive(self, item: Any) -> None:
        if not self._is_cut:
            self._deliver(item)


Handler = Callable[[AsyncIterator[Any], CallContext], AsyncIterator[Message]]
Lookup = Callable[[], Handler | None]
_OPEN, _CANCEL, _END = object(), object(), object()


class Call:
    """A call, seen from the client: iterate for responses. The server may be absent when the call reaches it."""

    def __init__(self, network: Network, name: str, lookup: Lookup) -> None:
        self.name = name
        self._network, self._lookup = network, lookup
        self._up, self._down = Wire(network, self._at_server), Wire(network, self._at_client)
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._server: asyncio.Task[None] | None = None
        self._is_over = False
        network.calls[self] = None
        self._up.send(_OPEN)

    def say(self, message: Message) -> None:
        """Sends one request of the stream."""
        self._up.send(_copy(message))

    def cancel(self) -> None:
        """The client wants nothing more; the server hears of it later."""
        if not self._is_over:
            self._is_over = True
            self._up.send(_CANCEL)

    def break_off(self) -> None:
        """The connection is lost. Both sides hear of it, each in its own time."""
        self._cut()
        error = _failure(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self._network.later(lambda: self._at_client(error))
        self._network.later(self._stop_server)

    def lose_server(self) -> None:
        """The server's process died."""
        self.break_off()
        self._stop_server()

    def lose_client(self) -> None:
        """The client's process died."""
        self._cut()
        self._is_over = True
        self._network.later(self._stop_server)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item = await self._responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, grpc.aio.AioRpcError):
            self._end()
            raise item
        if item is _END:
            self._end()
            raise StopAsyncIteration
        return item

    def _end(self) -> None:
        self._is_over = True
        self._network.calls.pop(self, None)

    def _cut(self) -> None:
        self._up.cut()
        self._down.cut()
        self._network.calls.pop(self, None)

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.cancel()

    def _at_client(self, item: Any) -> None:
        content = item.SerializeToString() if isinstance(item, Message) else b""
        self._network.trace.note(f"{self.name} brings {_name(item)}", content)
        self._responses.put_nowait(item)

    def _at_server(self, item: Any) -> None:
        if item is _OPEN:
            handler = self._lookup()
            if handler is None:
                self._down.send(_failure(grpc.StatusCode.UNAVAILABLE, "connection refused"))
            else:
                self._server = self._network.loop.create_task(self._serve(handler))
        elif item is _CANCEL:
            self._network.calls.pop(self, None)
            self._stop_server()
        else:
            self._requests.put_nowait(item)

    async def _serve(self, handler: Handler) -> None:
        try:
            async with contextlib.aclosing(handler(self._read_requests(), CallContext())) as responses:  # type: ignore[type-var]
                async for response in responses:
                    self._down.send(_copy(response))
                    await self._network.dawdle()
        except Aborted as end:
            self._down.send(end.error)
        else:
            self._down.send(_END)

    async def _read_requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()


class Network:
    """The wires of one world."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, weather: Weather, trace: Trace) -> None:
        self.loop, self.rng, self.weather, self.trace = loop, rng, weather, trace
        self.calls: dict[Call, None] = {}
        """The open ones, oldest first."""
        self._inlets: dict[str, Callable[[bytes], None]] = {}
        self._token_wires: dict[tuple[str, str], Wire] = {}

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def delay_s(self) -> float:
        """A message's time under way: mostly short, at times long."""
        return self.weather.longest_delay_s * self.rng.random() ** 4

    def later(self, action: Callable[[], None]) -> None:
        """Does something after a message's time."""
        self.loop.call_later(self.delay_s(), action)

    async def dawdle(self) -> None:
        """A write that is taken at once, or not."""
        await asyncio.sleep(self.delay_s() if self.rng.random() < 0.1 else 0)

    # The token path.

    def bind(self, endpoint: str, inlet: Callable[[bytes], None]) -> None:
        """Tokens for this endpoint go there."""
        self._inlets[endpoint] = inlet

    def unbind(self, endpoint: str) -> None:
        """Nobody listens there any more."""
        del self._inlets[endpoint]

    def push(self, sender: str, endpoint: str, batch: bytes) -> None:
        """One message on the token path."""
        rng, weather = self.rng, self.weather
        if rng.random() < weather.token_loss:
            self.trace.note(f"tokens from {sender} to {endpoint} are lost", batch)
            return
        wire = self._token_wires.get((sender, endpoint))
        if wire is None or rng.random() < weather.token_reordering:
            wire = self._token_wires[sender, endpoint] = Wire(self, lambda data: self._deliver(endpoint, data))
        for _ in range(2 if rng.random() < weather.token_repeats else 1):
            wire.send(batch)

    def _deliver(self, endpoint: str, batch: bytes) -> None:
        self.trace.note(f"tokens reach {endpoint}", batch)
        inlet = self._inlets.get(endpoint)
        if inlet is not None:
            inlet(batch)


def _copy(message: Message) -> Message:
    """What the other side makes of a message."""
    return type(message).FromString(message.SerializeToString())


def _failure(code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]] = ()) -> grpc.aio.AioRpcError:
    """What a client's call raises."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details, None)


def _name(item: Any) -> str:
    if isinstance(item, grpc.aio.AioRpcError):
        return f"{item.code().name}: {item.details()}"
    if not isinstance(item, Message):
        return "the end"
    set_fields = [descriptor.name for descriptor, _ in item.ListFields()]
    return f"{type(item).__name__}({', '.join(set_fields)})"
