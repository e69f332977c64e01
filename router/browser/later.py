"""Connect and gRPC-Web, made when the first request for them comes: until then connectrpc need not be imported.

Knows when; what is made is `rpc`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.process import in_thread
from router.browser.paths import PATHS
from router.errors import RouterError
from router.grpc_api import InferenceServicer


class _Later:
    """An app that is made when it is first called: the first of all in a thread, for that one imports connectrpc."""

    def __init__(self, make: Callable[[], ASGIApp]) -> None:
        self._make = make
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            is_imported = "router.browser.rpc" in sys.modules
            self._app = self._make() if is_imported else await in_thread(self._make, "rpc")
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
