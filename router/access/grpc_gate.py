"""The gate on gRPC: an interceptor before every method, known or not. The health service alone is open without a key.

A refused call ends before its first message is read. Knows gRPC's handlers; knows no service but health by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from router.access.gate import CALLER, Gate
from router.access.networks import grpc_peer_address
from router.errors import RouterError

OPEN_PREFIX = "/grpc.health.v1.Health/"

Context = grpc.aio.ServicerContext[Any, Any]
Abort = Callable[[Context, RouterError], Awaitable[None]]
Handler = Any  # grpc.RpcMethodHandler, whose stubs differ between grpc and grpc.aio


class GrpcGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """`abort` ends a call with an error's status and details."""

    def __init__(self, gate: Gate, abort: Abort) -> None:
        self._gate = gate
        self._abort = abort

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        metadata = [(key, value) for key, value in details.invocation_metadata or () if isinstance(value, str)]
        forwarded_for = [value for key, value in metadata if key == "x-forwarded-for"]
        try:
            if not details.method.startswith(OPEN_PREFIX):
                # Calls have a task each, and their handler runs in it.
                CALLER.set(self._gate.identify([value for key, value in metadata if key == "authorization"]))
        except RouterError as error:
            return self._refuse(error)
        handler = await continuation(details)
        if handler is None or not self._gate.checks_addresses:
            return handler
        return self._behind_address(handler, forwarded_for)

    def _refuse(self, error: RouterError) -> Handler:
        """A handler that ends the call; of this kind, because it waits for no message."""

        async def refuse(requests: Any, context: Context) -> None:
            await self._abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _behind_address(self, handler: Handler, forwarded_for: list[str]) -> Handler:
        """The same handler for callers whose address may come in: the address is known to the call alone."""
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        inner = getattr(handler, kind)

        async def check(context: Context) -> None:
            try:
                self._gate.check_address(grpc_peer_address(context.peer()), forwarded_for)
            except RouterError as error:
                await self._abort(context, error)

        async def called(request: Any, context: Context) -> Any:
            await check(context)
            return await inner(request, context)

        async def iterated(request: Any, context: Context) -> Any:
            await check(context)
            async for response in inner(request, context):
                yield response

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        is_generator = inspect.isasyncgenfunction(inner)
        return make(iterated if is_generator else called, handler.request_deserializer, handler.response_serializer)
