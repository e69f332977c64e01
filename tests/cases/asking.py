"""Asks a running stack on every path there is, and finds the paths in agreement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from octavo import Client
from octavo.client.errors import Exhausted, InvalidArgument
from tests.e2e.stack import Stack, children_of

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Said:
    """An answer's one choice."""

    text: str
    finish: str
    num_tokens: int


class Asker:
    """A stack, and what a client does with it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.http = httpx2.Client(base_url=stack.http, timeout=TIMEOUT_S)
        self._pids = children_of(stack.process.pid)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content, headers={"content-type": "application/json", **headers})

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def complete(self, prompt: str | list[int], **options: Any) -> Said:
        """A completion, whole and streamed, over HTTP and gRPC: four times the same."""
        body = {"prompt": prompt, **options}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        said = Said(choice["text"], choice["finish_reason"], answer.json()["usage"]["completion_tokens"])
        chunks = self.chunks("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        *parts, last = chunks
        ends = [part["choices"][0]["finish_reason"] for part in parts]
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert Said(text, ends[-1], last["usage"]["completion_tokens"]) == said
        assert not any(ends[:-1])
        with Client(self.stack.grpc) as client:
            result = client.generate(prompt, **options)
            stream = client.generate(prompt, **options, stream=True)
            streamed = "".join(delta.text for delta in stream)
        for found in (result, stream.result):
            assert Said(found.text, found.choices[0].finish_reason, found.usage.completion_tokens) == said
        assert streamed == said.text
        return said

    def refuse(self, prompt: object, param: str, **options: Any) -> str:
        """A completion that both surfaces refuse for the same field; the message."""
        answer = self.post("/v1/completions", {"prompt": prompt, **options})
        error = answer.json()["error"]
        assert (answer.status_code in (400, 413), error["param"]) == (True, param), answer.text
        with Client(self.stack.grpc) as client, pytest.raises((InvalidArgument, Exhausted)) as refusal:
            client.generate(prompt, **options)  # type: ignore[call-overload]
        assert (refusal.value.field, refusal.value.message) == (param, error["message"])
        message: str = error["message"]
        return message

    def refuse_chat(self, param: str, **body: Any) -> str:
        """A chat that HTTP refuses for this field; the message."""
        answer = self.post("/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        message: str = error["message"]
        return message

    def assert_alive(self) -> None:
        """Healthy, with the processes there were, and able to answer."""
        assert self.http.get("/health").status_code == 200
        assert self.stack.ready()[0] == 200
        assert children_of(self.stack.process.pid) == self._pids
        answer = self.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 4
