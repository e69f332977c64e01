"""The gate on HTTP: middleware around every route, known or not. Health alone is open to those without a key.

Knows ASGI and where the paths of health are; knows no other route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.gate import CALLER, Gate
from router.access.networks import parse_address
from router.errors import RouterError, Unauthenticated
from router.openai.transport import body_pieces, discard, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key, exactly as written."""

_SAFE_METHODS = frozenset({"GET", "HEAD"})

RefusalWriter: TypeAlias = Callable[[Scope, RouterError], ASGIApp | None]
"""An app that says a refusal in another shape than OpenAI's; None where that one is right."""


class HttpGate:
    """Middleware. It stands inside what answers a browser's preflight, which carries no key, and around all else."""

    def __init__(self, app: ASGIApp, gate: Gate, write_refusal: RefusalWriter = lambda scope, error: None) -> None:
        self._app = app
        self._gate = gate
        self._write_refusal = write_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except RouterError as refusal:
            refuse = self._write_refusal(scope, refusal)
            if refuse is None:
                await _refuse(refusal, scope, receive, send)
            else:
                await refuse(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers, client = Headers(scope=scope), scope.get("client")
        peer = parse_address(client[0]) if client else None
        self._gate.check_address(peer, headers.getlist("x-forwarded-for"))
        if scope["path"] not in OPEN_PATHS:
            # A browser sends what it was told once with every later request, also with those that another site makes
            # it send: good enough for looking, not for asking.
            is_safe = scope.get("method") in _SAFE_METHODS
            CALLER.set(self._gate.identify(headers.getlist("authorization"), accept_basic=is_safe))


async def _refuse(refusal: RouterError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = Headers(scope=scope)
    if "expect" not in headers:
        await discard(body_pieces(receive))
    response = error_response(refusal)
    if isinstance(refusal, Unauthenticated):
        is_person = scope["method"] in _SAFE_METHODS and "text/html" in headers.get("accept", "")
        response.headers["www-authenticate"] = f'{"Basic" if is_person else "Bearer"} realm="octavo"'
    await response(scope, receive, send)
