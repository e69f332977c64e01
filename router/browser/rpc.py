"""The public service over Connect and gRPC-Web on the HTTP port.

The protocols are connectrpc's; every method is the native gRPC servicer's own. What of HTTP they must not meet (bodies
that are refused half read, bytes in headers, native gRPC without HTTP/2) is kept away here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec
from connectrpc.interceptor import MetadataInterceptor
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.descriptor import MethodDescriptor
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from octavo.v1 import inference_pb2 as pb
from router.browser.call import CallContext, stream, unary
from router.browser.json_codec import JsonCodec
from router.browser.paths import MOUNT_PATH, SERVICE
from router.browser.web_text import BINARY, WebText
from router.errors import RouterError, Unauthenticated
from router.grpc_api import InferenceServicer, abort
from router.openai.transport import body_pieces, discard, show_request_id

_JSON = JsonCodec()
_CODECS: tuple[Codec[Any, Any], ...] = (google_protobuf_binary_codec(), _JSON)
_SLOW_CODECS: Mapping[str, Codec[Any, Any]] = {_JSON.name(): _JSON}
_NATIVE = "application/grpc"


def make_rpc_app(servicer: InferenceServicer, max_message_bytes: int) -> ASGIApp:
    """An app for everything below MOUNT_PATH."""
    application = _Application(servicer, max_message_bytes)
    return _Transport(WebText(application))


def make_refusing_app(error: RouterError) -> ASGIApp:
    """An app that refuses a request for one of the methods in its own protocol, before its body is read."""
    return _Transport(WebText(_Application(None, 0, [_Refusing(error)])))


class _Application(ConnectASGIApplication[Any]):
    """connectrpc's application over our descriptors, where its own generator would write a class."""

    def __init__(
        self,
        servicer: InferenceServicer | None,
        max_message_bytes: int,
        interceptors: list[MetadataInterceptor[None]] | None = None,
    ) -> None:
        super().__init__(
            service=servicer,
            endpoints=_endpoints,
            interceptors=interceptors or [],
            read_max_bytes=max_message_bytes,
            compressions=(),  # tokens are small and go out one by one
            codecs=_CODECS,
        )

    @property
    def path(self) -> str:
        return MOUNT_PATH


class _Refusing(MetadataInterceptor[None]):
    def __init__(self, error: RouterError) -> None:
        self._error = error

    async def on_start(self, ctx: RequestContext[Any, Any]) -> None:
        if isinstance(self._error, Unauthenticated):
            ctx.response_headers["www-authenticate"] = 'Bearer realm="octavo"'
        context: Any = CallContext(ctx)
        await abort(context, self._error)


def _endpoints(servicer: InferenceServicer | None) -> Mapping[str, Any]:
    return {f"{MOUNT_PATH}/{method.name}": _endpoint(method, servicer) for method in SERVICE.methods}


def _endpoint(method: MethodDescriptor, servicer: InferenceServicer | None) -> Endpoint[Any, Any]:
    info: MethodInfo[Any, Any] = MethodInfo(
        name=method.name,
        service_name=SERVICE.full_name,
        input=getattr(pb, method.input_type.name),
        output=getattr(pb, method.output_type.name),
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=StreamType.SERVER_STREAM if method.server_streaming else StreamType.UNARY,
    )
    own: Any = getattr(servicer, method.name, None)
    if method.server_streaming:
        return Endpoint.server_stream(info, functools.partial(stream, own))
    return Endpoint.unary(info, functools.partial(unary, own, _SLOW_CODECS))


class _Transport:
    """Middleware: what connectrpc expects of HTTP, and what our clients expect of us."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type = Headers(scope=scope).get("content-type", "")
        if content_type.startswith(_NATIVE) and not content_type.startswith(BINARY):
            wrong_port = Response("gRPC is on the port of --grpc-port; here are Connect and gRPC-Web\n", 415)
            await wrong_port(scope, receive, send)
            return
        headers = [(name.lower(), value.decode("latin-1").encode()) for name, value in scope["headers"]]
        body_ended = False

        async def receive_noting_end() -> AsgiMessage:
            nonlocal body_ended
            message = await receive()
            body_ended = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_when_heard(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                if not body_ended and Headers(scope=scope).get("expect") is None:
                    await discard(body_pieces(receive_noting_end))
                shown = MutableHeaders(raw=message["headers"]).get("x-request-id")
                if shown is not None:
                    show_request_id(scope, shown)
            await send(message)

        await self._app({**scope, "headers": headers}, receive_noting_end, send_when_heard)
