"""The HTTP surface: OpenAI's endpoints, health, readiness and version, as one ASGI app.

Routes to `schema` (bodies in), the front door (answers), and `chat`/`completions` (bodies out). Every error leaves in
OpenAI's shape.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Any, TypeAlias

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.access.gate import Gate
from router.access.http_gate import HttpGate
from router.errors import Cancelled, RouterError
from router.front import FrontDoor
from router.openai.chat import ChatFormat
from router.openai.completions import CompletionFormat
from router.openai.schema import HttpRequest, read_chat, read_completion
from router.openai.shapes import Json
from router.openai.transport import (
    EventStream,
    RequestIds,
    crash_response,
    dump,
    error_response,
    read_json,
    request_id_of,
    unless_gone,
)
from router.prepared import Prepared
from router.requests import AnswerBuilder, Usage

_LOG = logging.getLogger(__name__)

Format: TypeAlias = ChatFormat | CompletionFormat


def make_app(front: FrontDoor, max_body_bytes: int, gate: Gate | None = None) -> FastAPI:
    """The app of one router."""
    app = FastAPI(title="Octavo", version=version("octavo"), docs_url="/docs", redoc_url=None)
    app.add_middleware(HttpGate, gate=gate or Gate())  # first, so innermost: around every route, and no more
    app.add_middleware(RequestIds)
    _add_error_handlers(app, front)
    _add_status_routes(app, front)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = read_completion(await read_json(request, max_body_bytes), request_id_of(request))
        prepared = await front.prepare(asked.request)
        text = front.require_text()
        form = CompletionFormat(prepared, int(time.time()), text.tokenizer, echo_logprobs=asked.echo_logprobs)
        return await _respond(front, request, asked, prepared, form)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = read_chat(await read_json(request, max_body_bytes), request_id_of(request))
        prepared = await front.prepare(asked.request)
        return await _respond(front, request, asked, prepared, ChatFormat(prepared, int(time.time())))

    return app


async def _respond(
    front: FrontDoor, request: Request, asked: HttpRequest, prepared: Sequence[Prepared], form: Format
) -> Response:
    if asked.stream:
        chunks = _chunks(front, prepared, form, include_usage=asked.include_usage)
        return EventStream(chunks, on_error=front.metrics.refused)
    body = await unless_gone(request.receive, _whole(front, prepared, form))
    return Response(dump(body), media_type="application/json")


async def _whole(front: FrontDoor, prepared: Sequence[Prepared], form: Format) -> Json:
    builders = [AnswerBuilder() for _ in prepared]
    async with front.answer_all(prepared) as events:
        async for position, event in events:
            builders[position].add(event)
    return form.body([builder.build() for builder in builders])


@contextlib.asynccontextmanager
async def _chunks(
    front: FrontDoor, prepared: Sequence[Prepared], form: Format, *, include_usage: bool
) -> AsyncIterator[AsyncIterator[Json]]:
    async with front.answer_all(prepared) as events:

        async def chunks() -> AsyncIterator[Json]:
            usages: list[Usage] = []
            async for position, event in events:
                if isinstance(event, Usage):
                    usages.append(event)
                for chunk in form.chunks(position, event):
                    yield chunk
            if include_usage:
                yield form.usage_chunk(reduce(add, usages))

        yield chunks()


def make_health_app(front: FrontDoor) -> FastAPI:
    """An app that says how the router is and nothing else, for a port without keys and TLS."""
    app = FastAPI(openapi_url=None)
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
    async def models() -> Json:
        served = front.served()
        entry = {"id": front.model, "object": "model", "created": started, "owned_by": "octavo"}
        if served is None:
            return {"object": "list", "data": []}
        return {"object": "list", "data": [{**entry, "max_model_len": served.info.max_model_len}]}


def _add_error_handlers(app: FastAPI, front: FrontDoor) -> None:
    async def on_router_error(request: Request, error: Any) -> Response:
        front.metrics.refused(error)
        if isinstance(error, Cancelled):
            return Response(status_code=error.codes.http_status)  # nobody reads it
        return error_response(error)

    async def on_http_error(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        body = {"error": {"message": message, "type": kind, "param": None, "code": error.status_code}}
        return JSONResponse(body, error.status_code, error.headers)

    async def on_crash(request: Request, error: Exception) -> Response:
        return crash_response(request)

    app.add_exception_handler(RouterError, on_router_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)
