"""The standard health service of an asyncio server, every method of it.

The library's servicer leaves List out, and gRPC logs each call of what is left out as a defect: strangers could fill
the log, since health needs no key. It also writes to watchers under a lock that `set` waits for: one that takes nothing
would keep the word from all others. Knows no service by name.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.grpc_guard import Context

Response: TypeAlias = health_pb2.HealthCheckResponse
Status: TypeAlias = Any  # health_pb2.HealthCheckResponse.ServingStatus, which the stubs leave out


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # missing from the stubs
    """Says of each service what was last `set` of it. The server as a whole, named "", serves until told otherwise."""

    def __init__(self) -> None:
        self._words: dict[str, Status] = {"": Response.SERVING}
        self._changed = asyncio.Event()

    def set(self, service: str, status: Status) -> None:
        """Whoever watches the service is told, as soon as it takes that."""
        self._words[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Response:
        status = self._words.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Response(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        found = {name: Response(status=word) for name, word in self._words.items()}
        return health_pb2.HealthListResponse(statuses=found)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last: Status | None = None
        while True:
            changed, status = self._changed, self._words.get(request.service, Response.SERVICE_UNKNOWN)
            if status != last:
                last = status
                await context.write(Response(status=status))
            else:
                await changed.wait()
