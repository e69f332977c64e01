"""/tokenize and /detokenize, in vLLM's shapes: what the model's tokenizer makes of text, ids and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from router.errors import InvalidRequest, check_text
from router.front import FrontDoor
from router.openai.openapi import DETOKENIZE_BODY, TOKENIZE_BODY
from router.openai.schema import chat_prompt
from router.openai.shapes import Json
from router.openai.transport import read_json
from router.requests import ChatPrompt, CompletionPrompt
from router.sampling_rules import check_flag


def add_tokenizing_routes(app: FastAPI, front: FrontDoor, max_body_bytes: int) -> None:
    """Add both routes."""

    @app.post("/tokenize", openapi_extra=TOKENIZE_BODY)
    async def tokenize(request: Request) -> Json:
        body = await read_json(request, max_body_bytes)
        shows_texts = check_flag("return_token_strs", body.get("return_token_strs"), default=False)
        found = await front.tokenize(_model(body), _prompt(body))
        return {
            "count": len(found.token_ids),
            "max_model_len": found.max_model_len,
            "tokens": list(found.token_ids),
            "token_strs": list(found.token_texts) if shows_texts else None,
        }

    @app.post("/detokenize", openapi_extra=DETOKENIZE_BODY)
    async def detokenize(request: Request) -> Json:
        body = await read_json(request, max_body_bytes)
        if "tokens" not in body:
            raise InvalidRequest("tokens", "tokens is missing")
        skips = check_flag("skip_special_tokens", body.get("skip_special_tokens"), default=False)
        return {"prompt": await front.detokenize(_model(body), body["tokens"], skip_special_tokens=skips)}


def _model(body: Mapping[str, Any]) -> str:
    return check_text("model", body.get("model") or "")


def _prompt(body: Mapping[str, Any]) -> CompletionPrompt | ChatPrompt:
    given = {name: value for name, value in body.items() if value is not None}
    if "messages" in given:
        if "prompt" in given:
            raise InvalidRequest("prompt", "prompt and messages are both given; give one of them")
        return chat_prompt(given)
    if not isinstance(given.get("prompt"), str):
        raise InvalidRequest("prompt", "prompt must be text; a conversation is given as messages")
    adds = check_flag("add_special_tokens", given.get("add_special_tokens"), default=True)
    return CompletionPrompt(given["prompt"], adds)
