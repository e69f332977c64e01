"""Connect and gRPC-Web, made when the first request for them comes: until then connectrpc need not be imported.

Knows when; what is made is `rpc`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.process import in_thread
from router.browser.paths import PATHS
from router.errors import RouterError
from router.grpc_api import InferenceServicer


class _Later:
    """An app that is made, in a thread beside the event loop, when it is first called."""

    def __init__(self, make: Callable[[], ASGIApp]) -> None:
        self._make = make
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = await in_thread(self._make, "rpc")
        await self._app(scope, receive, send)


def make_rpc_app(servicer: InferenceServicer, max_message_bytes: int) -> ASGIApp:
    """An app for everything below MOUNT_PATH."""

    def make() -> ASGIApp:
        from router.browser import rpc

        return rpc.make_rpc_app(servicer, max_message_bytes)

    return _Later(make)


def write_refusal(scope: Scope, error: RouterError) -> ASGIApp | None:
    """An app that refuses the request in its own protocol, before its body is read; None where it is none of ours."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
        return None

    def make() -> ASGIApp:
        from router.browser import rpc

        return rpc.make_refusing_app(error)

    return _Later(make)
