"""Asks any server of OpenAI's HTTP API: /v1/completions or /v1/chat/completions, streamed, with usage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from octavo.bench.http import HttpClient
from octavo.bench.records import Answer, AskError, BenchRequest
from octavo.bench.sampling import Sampling

_DONE = b"[DONE]"


class OpenAITarget:
    """`extra` are further fields of each request. Tokens are counted by messages, and at the end by the usage."""

    def __init__(
        self, client: HttpClient, label: str, model: str, sampling: Sampling, extra: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._label = label
        self._model = model
        self._sampling = sampling
        self._extra = dict(extra)

    @property
    def label(self) -> str:
        return self._label

    async def find_model(self) -> None:
        """Where no model was named, take the first one that the server lists. Raises AskError."""
        if self._model:
            return
        listed = await self._client.ask("/v1/models")
        try:
            self._model = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise AskError("no model", "/v1/models lists none; name one with --model") from None

    async def ask(self, request: BenchRequest, note_tokens: Callable[[int], None]) -> Answer:
        path, body = self._message(request)
        usage: Mapping[str, Any] = {}
        has_ended = False
        async with aclosing(self._client.events(path, body)) as events:
            async for data in events:
                if data == _DONE:
                    has_ended = True
                    continue
                event = _event(data)
                if any(_holds_tokens(choice) for choice in event.get("choices") or ()):
                    note_tokens(1)
                usage = event.get("usage") or usage
        if not has_ended:
            raise AskError("cut", "the stream ended without [DONE]")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))

    async def tokenize(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "content": text, "add_special_tokens": False}
        found = await self._client.ask("/tokenize", body)
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise AskError("no tokens", "/tokenize answered without token ids")
        return tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        found = await self._client.ask("/detokenize", {"model": self._model, "tokens": list(token_ids)})
        text = found.get("prompt", found.get("content")) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise AskError("no text", "/detokenize answered without text")
        return text

    async def close(self) -> None:
        self._client.close()

    def _message(self, request: BenchRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._sampling.ignore_eos:
            body["ignore_eos"] = True
        if request.priority:
            body["priority"] = request.priority
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        body |= self._extra
        if not self._sampling.is_chat:
            prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
            return "/v1/completions", {**body, "prompt": prompt}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": request.prompt}]}


def _event(data: bytes) -> Mapping[str, Any]:
    """Raises AskError for an event that is an error or no JSON object."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise AskError("not JSON", f"an event holds {data[:80]!r}")
    if error := event.get("error"):
        raise AskError("error event", str(error.get("message", error) if isinstance(error, dict) else error)[:300])
    return event


def _holds_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether a choice brings text of any kind; a chat's first message may bring its role alone."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))
