"""A check before a gRPC method of an asyncio server: the call knows who calls, what an interceptor sees does not.

Knows gRPC's four kinds of handlers; knows no service and no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose stubs differ between grpc and grpc.aio
Check = Callable[[Context], Awaitable[None]]


def guarded(handler: Handler, check: Check) -> Handler:
    """The same handler behind `check`, which ends the call by `context.abort` where it may not go on."""
    kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
    inner = getattr(handler, kind)

    async def called(request: Any, context: Context) -> Any:
        await check(context)
        return await inner(request, context)

    async def iterated(request: Any, context: Context) -> Any:
        await check(context)
        async for response in inner(request, context):
            yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    outer = iterated if inspect.isasyncgenfunction(inner) else called
    return make(outer, handler.request_deserializer, handler.response_serializer)


def refusing(refuse: Check) -> Handler:
    """A handler that ends every call, before its first message is read."""

    async def end(requests: Any, context: Context) -> None:
        await refuse(context)

    return grpc.stream_stream_rpc_method_handler(end)


def _word(streaming: bool) -> str:
    return "stream" if streaming else "unary"
