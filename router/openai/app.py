"""The HTTP surface: OpenAI's endpoints, health, readiness and version, as one ASGI app.

Routes to `schema` (bodies in), the front door (answers), and `chat`/`completions` (bodies out). Every error leaves in
OpenAI's shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.access.gate import Gate
from router.access.http_gate import HttpGate, RefusalWriter
from router.errors import RouterError, Unavailable
from router.front import FrontDoor
from router.openai.answers import respond
from router.openai.chat import ChatFormat
from router.openai.completions import CompletionFormat
from router.openai.openapi import CHAT_BODY, COMPLETION_BODY
from router.openai.schema import HttpRequest, read_chat, read_completion
from router.openai.shapes import Json
from router.openai.tokenizing import add_tokenizing_routes
from router.openai.transport import (
    HeadAsGet,
    RequestIds,
    defect_of,
    error_response,
    name_ignored,
    read_json,
    request_id_of,
    shown_id,
)
from router.openai.unserved import add_unserved_routes
from router.readiness import ListedModel

_LOG = logging.getLogger(__name__)


def make_app(
    front: FrontDoor,
    max_body_bytes: int,
    gate: Gate | None = None,
    write_refusal: RefusalWriter = lambda scope, error: None,
) -> FastAPI:
    """The app of one router. `write_refusal` words refusals of the gate for what is added beside OpenAI's API."""
    # A redirect would name whatever host and scheme a proxy happened to ask with.
    app = FastAPI(title="Octavo", version=version("octavo"), docs_url="/docs", redoc_url=None, redirect_slashes=False)
    # First, so innermost: around every route, and no more.
    app.add_middleware(HttpGate, gate=gate or Gate(), write_refusal=write_refusal)
    app.add_middleware(RequestIds)
    app.add_middleware(HeadAsGet)
    _add_error_handlers(app, front)
    _add_status_routes(app, front)

    @app.post("/v1/completions", openapi_extra=COMPLETION_BODY)
    async def completions(request: Request) -> Response:
        asked = await read(request, read_completion)
        prepared = await front.prepare(asked.request)
        writer = CompletionFormat(prepared, int(time.time()), asked.form)
        return await respond(front, request, asked.form, prepared, writer)

    @app.post("/v1/chat/completions", openapi_extra=CHAT_BODY)
    async def chat_completions(request: Request) -> Response:
        asked = await read(request, read_chat)
        prepared = await front.prepare(asked.request)
        writer = ChatFormat(prepared, int(time.time()), asked.form)
        return await respond(front, request, asked.form, prepared, writer)

    async def read(request: Request, schema: Callable[[Mapping[str, Any], str], HttpRequest]) -> HttpRequest:
        body = await read_json(request, max_body_bytes)
        asked = schema(body, request_id_of(request, body))
        name_ignored(request, asked.ignored_fields)
        return asked

    add_tokenizing_routes(app, front, max_body_bytes)
    add_unserved_routes(app, front, max_body_bytes)
    return app


def make_health_app(front: FrontDoor) -> FastAPI:
    """An app that says how the router is and nothing else, for a port without keys and TLS."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(HeadAsGet)
    _add_health_routes(app, front)
    _add_error_handlers(app, front)
    return app


def _add_health_routes(app: FastAPI, front: FrontDoor) -> None:
    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        found = front.readiness()
        body = {
            "ready": found.ready,
            "reason": found.reason,
            "phases": list(found.phases),
            "models": list(found.models),
            "reasons": dict(found.reasons),
        }
        return JSONResponse(body, 200 if found.ready else 503)


def _add_status_routes(app: FastAPI, front: FrontDoor) -> None:
    _add_health_routes(app, front)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, content_type = front.metrics.set.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @app.get("/version")
    async def show_version() -> Json:
        return {"version": version("octavo")}

    started = int(time.time())

    @app.get("/v1/models")
    @app.get("/v1/models/")
    async def models() -> Json:
        return {"object": "list", "data": list(map(entry, front.models()))}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Json:
        front.catalogue.model_of(model_id)
        found = [listed for listed in front.models() if listed.name == model_id]
        if not found:
            raise Unavailable(f"not ready: {front.readiness().reason}")
        return entry(found[0])

    def entry(listed: ListedModel) -> Json:
        shown: Json = {
            "id": listed.name,
            "object": "model",
            "created": started,
            "owned_by": "octavo",
            "root": listed.name,
            "parent": None,
            "max_model_len": listed.info.max_model_len,
        }
        return shown if listed.weights is None else {**shown, "weights": dict(listed.weights)}


def _add_error_handlers(app: FastAPI, front: FrontDoor) -> None:
    async def on_router_error(request: Request, error: Any) -> Response:
        front.refused(error, shown_id(request.scope))
        return error_response(error)

    async def on_http_error(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        body = {"error": {"message": message, "type": kind, "param": None, "code": error.status_code}}
        return JSONResponse(body, error.status_code, error.headers)

    async def on_crash(request: Request, error: Exception) -> Response:
        defect = defect_of(request)
        # The traceback is uvicorn's to log, which knows no request id.
        _LOG.error("HTTP: %s (%s)", defect.message, type(error).__name__)
        front.metrics.refused(defect)
        return error_response(defect)

    app.add_exception_handler(RouterError, on_router_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)
