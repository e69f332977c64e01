"""HTTP around the OpenAI shapes: bounded bodies, JSON errors, request ids, and noticing a client that left.

Knows ASGI; knows nothing of what is asked or answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.tracing import HEADER
from router.errors import Cancelled, Exhausted, InternalError, InvalidRequest, RequestTooLarge, RouterError
from router.openai.json_pieces import loads_in_pieces
from router.openai.shapes import error_json
from router.requests import clean_request_id
from router.traces import INCOMING

T = TypeVar("T")

MOST_DISCARDED_BYTES = 128 * 2**20
LONGEST_DISCARD_S = 20.0
"""How much of a body that is refused is read, and for how long, so that its sender gets to read the answer."""

LARGE_BYTES = 2**18
"""Bodies beyond it are read beside the loop that all streams share, in one thread for all of them."""

_LARGE_BODIES = ThreadPoolExecutor(1, "large-bodies")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_REQUEST_ID_HEADER = "x-request-id"
_SCOPE_KEY = "octavo.request_id"
_SEND_KEY = "octavo.send"
_IGNORED_HEADER = "x-octavo-ignored-fields"
_IGNORED_KEY = "octavo.ignored_fields"


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestTooLarge before reading more than `max_bytes`, InvalidRequest, and
    Cancelled where the client leaves before its body has come.
    """
    data = await _read_body(request, max_bytes)
    if len(data) <= LARGE_BYTES:
        return _parsed(data, json.loads)
    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, _parsed, data, loads_in_pieces)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    pieces = request.stream()
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        # A client that waits for leave to send its body gets the answer now; any other is heard out, see discard.
        if "expect" not in request.headers and int(declared[:20]) <= MOST_DISCARDED_BYTES:
            await discard(pieces)
        _refuse_size(max_bytes)
    data = bytearray()
    try:
        async for piece in pieces:
            data += piece
            if len(data) > max_bytes:
                await discard(pieces)
                _refuse_size(max_bytes)
    except ClientDisconnect:
        raise Cancelled("the client is gone") from None
    return bytes(data)


def _parsed(data: bytes, loads: Callable[..., Any]) -> dict[str, Any]:
    try:
        body = loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest("body", "body is nested too deeply to be read") from None
    except ValueError as error:  # not JSON, or not UTF-8
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequest("body", f"body is not valid JSON in UTF-8{where}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", f"body must be a JSON object, got {type(body).__name__}")
    return body


async def body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """What is left of a body, as far as it comes."""
    more = True
    while more:
        message = await receive()
        more = message["type"] == "http.request" and message.get("more_body", False)
        yield message.get("body", b"")


async def discard(pieces: AsyncIterable[bytes]) -> None:
    """Read on for a bounded while and keep nothing, before a body is refused.

    Most clients send all of a body before they read the answer; a connection that is closed under them shows as a
    reset, and the answer is lost.
    """
    num_bytes = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(LONGEST_DISCARD_S):
            async for piece in pieces:
                num_bytes += len(piece)
                if num_bytes > MOST_DISCARDED_BYTES:
                    return


def _refuse_size(max_bytes: int) -> NoReturn:
    raise RequestTooLarge("body", f"body has more than {max_bytes} bytes, the limit (--max-message-bytes)")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def error_response(error: RouterError) -> Response:
    """An error with its status, in OpenAI's body."""
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, Exhausted) else None
    return JSONResponse(error_json(error), error.codes.http_status, headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; raises Cancelled then."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client is gone")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def dump(value: Mapping[str, Any]) -> str:
    """Compact JSON; text stays as it is."""
    return _ENCODER.encode(value)


def request_id_of(request: Request, body: Mapping[str, Any]) -> str:
    """What the request is called: by its header, else by its body, else by us. The response will say the same."""
    said = body.get("request_id")
    shown: str = request.scope[_SCOPE_KEY]
    if isinstance(said, str) and not clean_request_id(request.headers.get(_REQUEST_ID_HEADER, "")):
        shown = request.scope[_SCOPE_KEY] = clean_request_id(said) or shown
    return shown


def show_request_id(scope: Scope, shown_id: str) -> None:
    """Let the response say this request id."""
    scope[_SCOPE_KEY] = shown_id


def shown_id(scope: Scope) -> str:
    """The request id that the response will say; empty where responses say none."""
    found: str = scope.get(_SCOPE_KEY, "")
    return found


def name_ignored(request: Request, fields: Sequence[str]) -> None:
    """Let the response say which fields of the body had no effect."""
    if fields:
        request.scope[_IGNORED_KEY] = ",".join(fields)


class RequestIds:
    """Middleware: every response carries X-Request-Id, the client's own where it gave one; a crash becomes a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = clean_request_id(Headers(scope=scope).get(_REQUEST_ID_HEADER, ""))
        scope[_SCOPE_KEY] = given or secrets.token_hex(12)
        INCOMING.set(Headers(scope=scope).get(HEADER, ""))
        scope[_SEND_KEY] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers[_REQUEST_ID_HEADER] = scope[_SCOPE_KEY]
                if _IGNORED_KEY in scope:
                    headers[_IGNORED_HEADER] = scope[_IGNORED_KEY]
            await send(message)

        await self._app(scope, receive, send_with_id)


def body_sender(scope: Scope, send: Send) -> Send:
    """What sends a body by the shortest way: the middleware inside of `RequestIds` looks at a response's head alone."""
    direct: Send = scope.get(_SEND_KEY, send)
    return direct


class HeadAsGet:
    """Middleware: HEAD is answered as GET is. The server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def defect_of(request: Request) -> InternalError:
    """What a client hears of a defect of ours: the request id, and no internals."""
    return InternalError(f"internal error; request id {shown_id(request.scope)}")
