"""The health service towards those who watch it, which one that takes nothing must not keep from the others."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from octavo.grpc_health import Health

NOT_SERVING, SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


class Watcher:
    """The context of a call of Watch."""

    def __init__(self, health: Health, service: str) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()
        context: Any = self
        request = health_pb2.HealthCheckRequest(service=service)
        self.call = asyncio.ensure_future(health.Watch(request, context))

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        await self.told.put(response.status)


class Deaf(Watcher):
    """Takes nothing."""

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        await super().write(response)
        await asyncio.get_running_loop().create_future()


def test_changes_are_told_whoever_else_takes_nothing() -> None:
    async def watch() -> None:
        health = Health()
        deaf, whole, late = Deaf(health, ""), Watcher(health, ""), Watcher(health, "late")
        assert [await one.told.get() for one in (deaf, whole, late)] == [SERVING, SERVING, UNKNOWN]
        health.set("", NOT_SERVING)
        health.set("late", SERVING)
        assert [await one.told.get() for one in (whole, late)] == [NOT_SERVING, SERVING]
        health.set("", NOT_SERVING)
        health.set("", SERVING)
        assert await whole.told.get() == SERVING
        assert whole.told.empty()
        for one in (deaf, whole, late):
            one.call.cancel()

    asyncio.run(asyncio.wait_for(watch(), 30))
