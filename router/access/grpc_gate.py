"""The gate on gRPC: an interceptor before every method, known or not. The health service alone is open without a key.

A refused call ends before its first message is read. Knows gRPC's handlers; knows no service but health by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from octavo.grpc_guard import Context, Handler, guarded, refusing
from router.access.gate import CALLER, Gate
from router.access.networks import grpc_peer_address
from router.errors import RouterError

OPEN_PREFIX = "/grpc.health.v1.Health/"

Abort = Callable[[Context, RouterError], Awaitable[None]]


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
            refusal = error  # the name of an except clause ends with it
            return refusing(lambda context: self._abort(context, refusal))
        handler = await continuation(details)
        if handler is None or not self._gate.checks_addresses:
            return handler

        async def check(context: Context) -> None:
            try:
                self._gate.check_address(grpc_peer_address(context.peer()), forwarded_for)
            except RouterError as error:
                await self._abort(context, error)

        return guarded(handler, check)
