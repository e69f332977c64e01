"""The standard health service of an asyncio server, every method of it.

The library's servicer leaves List out, and gRPC logs each call of what is left out as a defect: strangers could fill
the log, since health needs no key. Knows no service by name.
"""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from octavo.grpc_guard import Context


class Health(HealthServicer):  # type: ignore[misc]  # missing from the stubs
    """Says of each service what was last `set` of it."""

    def __init__(self) -> None:
        super().__init__()
        self._words: dict[str, Any] = {}

    async def set(self, service: str, status: Any) -> None:
        self._words[service] = status
        await super().set(service, status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        found = {name: health_pb2.HealthCheckResponse(status=word) for name, word in self._words.items()}
        return health_pb2.HealthListResponse(statuses=found)
