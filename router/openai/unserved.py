"""Endpoints that need another kind of model than those served: they exist, and say so.

A model that generates text has no embedding worth the name; making one up would be worse than refusing.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.errors import InvalidRequest, check_text
from router.front import FrontDoor
from router.openai.transport import read_json

_NEEDED_FIELD = {
    "/v1/embeddings": "input",
    "/v1/rerank": "documents",
    "/rerank": "documents",
    "/v2/rerank": "documents",
    "/score": "text_1",
    "/v1/score": "text_1",
    "/pooling": "input",
    "/classify": "input",
}
_MAKES = {"input": "embeddings or classes", "documents": "rankings", "text_1": "scores"}


def add_unserved_routes(app: FastAPI, front: FrontDoor, max_body_bytes: int) -> None:
    """Add a route for each of them."""

    async def refuse(request: Request) -> Response:
        body = await read_json(request, max_body_bytes)
        field = _NEEDED_FIELD[request.url.path]
        if body.get(field) is None:
            raise InvalidRequest(field, f"{field} is missing")
        name = front.catalogue.model_of(check_text("model", body.get("model") or ""))
        raise InvalidRequest(
            "model",
            f"model {name!r} generates text and makes no {_MAKES[field]}, and no other model served here does; "
            "serve a model of that kind, or use /v1/completions or /v1/chat/completions",
        )

    for path in _NEEDED_FIELD:
        app.add_api_route(path, refuse, methods=["POST"], response_model=None)
