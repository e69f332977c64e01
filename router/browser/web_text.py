"""gRPC-Web in base64 (application/grpc-web-text), which Google's client uses to stream, over the binary form.

Works on bodies alone: what is inside them is the application's behind it. Knows ASGI.
"""

from __future__ import annotations

import base64
import binascii

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TEXT, BINARY = "application/grpc-web-text", "application/grpc-web"


def is_web_text(content_type: str) -> bool:
    """Whether a body of this type is base64."""
    return content_type == TEXT or content_type.startswith(TEXT + "+")


class WebText:
    """Middleware for requests of that type; others pass as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type = Headers(scope=scope).get("content-type", "")
        if not is_web_text(content_type):
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["content-type"] = BINARY + content_type.removeprefix(TEXT)
        rest = b""

        async def receive_decoded() -> Message:
            nonlocal rest
            message = await receive()
            if message["type"] != "http.request":
                return message
            rest += message.get("body", b"")
            whole = len(rest) // 4 * 4
            body, rest = _decode(rest[:whole]), rest[whole:]
            if rest and not message.get("more_body", False):
                raise _bad("it ends within four characters")
            return {**message, "body": body}

        async def send_encoded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                headers["content-type"] = TEXT + headers.get("content-type", BINARY).removeprefix(BINARY)
                message = {**message, "headers": headers.raw}
            elif message["type"] == "http.response.body":
                # Each piece is padded, so that the client can read it when it comes.
                message = {**message, "body": base64.b64encode(message.get("body", b""))}
            await send(message)

        await self._app(scope, receive_decoded, send_encoded)


def _decode(text: bytes) -> bytes:
    """Base64 in pieces, each perhaps padded. Raises ConnectError."""
    decoded = bytearray()
    while text:
        padded = text.find(b"=")
        end = len(text) if padded < 0 else (padded // 4 + 1) * 4
        try:
            decoded += binascii.a2b_base64(text[:end], strict_mode=True)
        except binascii.Error as error:
            raise _bad(str(error)) from None
        text = text[end:]
    return bytes(decoded)


def _bad(reason: str) -> ConnectError:
    return ConnectError(Code.INVALID_ARGUMENT, f"body is no base64: {reason}")
