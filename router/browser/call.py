"""One call of the public service over HTTP, as the servicer of native gRPC sees it.

Gives the servicer the part of a gRPC context that it uses, and carries what it writes to the connection. Knows
connectrpc's request context and gRPC's statuses; knows no method and no message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Never, TypeAlias

import grpc
from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.request import RequestContext
from google.protobuf.message import Message
from google.rpc import status_pb2
from protobuf.wkt import Any as PackedAny

MOST_WAITING_MESSAGES = 16
"""Messages that wait for a slow connection before the call waits too."""

LARGE_BYTES = 2**14
"""Answers from this size on are encoded beside the loop that all streams share, where that is slow."""

_DETAILS_KEY = "grpc-status-details-bin"

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
Method: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


class CallContext:
    """What a servicer's method may ask of its context. `abort` raises ConnectError."""

    def __init__(self, request: RequestContext[Any, Any], pipe: _Pipe | None = None) -> None:
        self._request = request
        self._pipe = pipe

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, of connect-timeout-ms or grpc-timeout."""
        remaining_ms = self._request.timeout_ms
        return None if remaining_ms is None else max(0.0, remaining_ms / 1000)

    def invocation_metadata(self) -> Metadata:
        return tuple(self._request.request_headers.allitems())

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        for key, value in metadata:
            if isinstance(value, str):
                self._request.response_headers[key] = value

    async def write(self, message: Message) -> None:
        assert self._pipe is not None, "only streaming methods write"
        await self._pipe.put(message)

    async def abort(self, code: grpc.StatusCode, message: str = "", trailing_metadata: Metadata = ()) -> Never:
        for key, value in trailing_metadata:
            if isinstance(value, str):
                self._request.response_headers[key] = value
        packed = [value for key, value in trailing_metadata if key == _DETAILS_KEY and isinstance(value, bytes)]
        details = status_pb2.Status.FromString(packed[0]).details if packed else ()
        raise ConnectError(
            _code(code), message, [ErrorDetail(PackedAny(type_url=one.type_url, value=one.value)) for one in details]
        )


async def unary(
    method: Method, codecs: Mapping[str, Codec[Any, Any]], request: Message, context: RequestContext[Any, Any]
) -> Any:
    """The method's answer, a large one in the bytes that go out. Raises ConnectError with its status."""
    answer: Message = await method(request, CallContext(context))
    encoding = context.request_headers.get("content-type", "").partition(";")[0].rpartition("/")[2].rpartition("+")[2]
    slow = codecs.get(encoding)
    if slow is not None and answer.ByteSize() > LARGE_BYTES:
        return await asyncio.to_thread(slow.encode, answer)
    return answer


async def stream(method: Method, request: Message, context: RequestContext[Any, Any]) -> AsyncIterator[Message]:
    """What the method writes; closing this early cancels it. Raises ConnectError with its status."""
    pipe = _Pipe()
    call = asyncio.ensure_future(method(request, CallContext(context, pipe)))
    call.add_done_callback(lambda _: pipe.end())
    try:
        async for message in pipe:
            yield message
        await call
    finally:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await call


class _Pipe:
    """Between a call's task and its connection, so that a slow client holds up its own call alone."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._ended = False

    async def put(self, message: Message) -> None:
        while len(self._messages) >= MOST_WAITING_MESSAGES:
            self._emptied.clear()
            await self._emptied.wait()
        self._messages.append(message)
        self._filled.set()

    def end(self) -> None:
        self._ended = True
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                yield self._messages.popleft()
                self._emptied.set()
            if self._ended:
                return
            self._filled.clear()
            await self._filled.wait()


def _code(code: grpc.StatusCode) -> Code:
    return Code.CANCELED if code is grpc.StatusCode.CANCELLED else Code[code.name]
