"""What may end a call of an asyncio server before its method runs: a check of who calls, which an interceptor does not
see, and bytes that are no message.

Knows gRPC's four kinds of handlers; knows no service and no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose stubs differ between grpc and grpc.aio
Check = Callable[[Context], Awaitable[None]]


def guarded(handler: Handler, check: Check) -> Handler:
    """The same handler behind `check`, which ends the call by `context.abort` where it may not go on."""
    return _behind(handler, handler.request_deserializer, lambda request, context: check(context))


def readable(handler: Handler, refuse: Check) -> Handler:
    """The same handler, where `refuse` ends a call whose bytes are not its message; gRPC itself takes that for a defect
    of the server. Methods that read a stream stay as they are.
    """
    if handler.request_streaming:
        return handler
    unreadable = object()

    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return unreadable

    async def check(request: Any, context: Context) -> None:
        if request is unreadable:
            await refuse(context)

    return _behind(handler, read, check)


def _behind(
    handler: Handler, read: Callable[[bytes], Any] | None, check: Callable[[Any, Context], Awaitable[None]]
) -> Handler:
    kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
    inner = getattr(handler, kind)

    async def called(request: Any, context: Context) -> Any:
        await check(request, context)
        return await inner(request, context)

    async def iterated(request: Any, context: Context) -> Any:
        await check(request, context)
        async for response in inner(request, context):
            yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    outer = iterated if inspect.isasyncgenfunction(inner) else called
    return make(outer, read, handler.response_serializer)


def refusing(refuse: Check) -> Handler:
    """A handler that ends every call, before its first message is read."""

    async def end(requests: Any, context: Context) -> None:
        await refuse(context)

    return grpc.stream_stream_rpc_method_handler(end)


def _word(streaming: bool) -> str:
    return "stream" if streaming else "unary"
