"""What chat frontends and client libraries send of their own accord: taken, or refused by the name of the field."""

from __future__ import annotations

import datetime
import enum
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.fakes.router_stack import MODEL, in_loop, stack
from tests.fakes.scheduler import Attempt, speak
from tests.router.chat_models import write_hermes_model

Json = dict[str, Any]

ASKED: Json = {"role": "user", "content": "hi"}
ADD: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
OTHER: Json = {"type": "function", "function": {"name": "other"}}
TAKEN: dict[str, Json] = {
    "nothing said": {"stop": None, "n": None, "stream_options": None, "max_tokens": None, "logit_bias": None},
    "langchain": {"temperature": 0.7, "n": 1, "stream": False, "logprobs": False, "top_logprobs": 0, "tools": []},
    "librechat": {"user": "65f0", "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "stop": []},
    "open webui": {"stream": True, "stream_options": {"include_usage": True}, "seed": 0, "logit_bias": {"5": 1}},
    "openai's later fields": {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "modalities": ["text"],
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "verbosity": "medium",
        "max_completion_tokens": 5,
    },
    "obfuscation": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "no function": {"function_call": "none", "tool_choice": "none", "functions": []},
    "tools": {"tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": True},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}]},
    "an answer sent back": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "annotations": [], "audio": None},
            {"role": "user", "name": "bob", "content": "and?"},
        ]
    },
    "a call sent back": {
        "tools": [ADD],
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "name": "add", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
        ],
    },
}
REFUSED: dict[str, Json] = {
    "store": {"store": True},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "audio": {"modalities": ["text", "audio"], "audio": {"voice": "v", "format": "wav"}},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "web_search_options": {"web_search_options": {}},
    "service_tier": {"service_tier": "priority"},
    "reasoning_effort": {"reasoning_effort": "medium"},
    "verbosity": {"verbosity": "high"},
    "functions": {"functions": [{"name": "f"}]},
    "tools[0].type": {"tools": [{"type": "custom", "custom": {"name": "c"}}]},
    "messages[0].content[0].type": {
        "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]
    },
    "response_format.schema": {"response_format": {"type": "json_object", "schema": {"type": "object", "not": {}}}},
}


@in_loop
async def test_what_they_send_is_taken_and_all_of_it_is_known(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        made.say("Hello")
        for name, body in TAKEN.items():
            answer = await made.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [ASKED], **body})
            assert answer.status_code == 200, (name, answer.text)
            assert "x-octavo-ignored-fields" not in answer.headers, name
            assert "error" not in answer.text, name


@in_loop
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        for field, body in REFUSED.items():
            answer = await made.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [ASKED], **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert made.scheduler.requests == []


@pytest.mark.parametrize("calls", [[], None])
@in_loop
async def test_a_message_that_calls_nothing_is_one_without_calls(tmp_path: Path, calls: object) -> None:
    """Templates ask whether there are calls in many ways; `is defined` is one."""
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}CALLS{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "m").mkdir()
    directory = write_hermes_model(tmp_path / "m")
    (directory / "chat_template.jinja").write_text(template)
    async with stack(directory) as made:
        made.say("ok")
        turns = [ASKED, {"role": "assistant", "content": "there", "tool_calls": calls}, ASKED]
        await made.http.post("/v1/chat/completions", json={"messages": turns})
        prompt = made.tokenizer.decode(list(made.scheduler.requests[-1].prompt_token_ids))
        assert prompt == "hitherehi"


@in_loop
async def test_the_list_of_models_with_a_slash(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        first, second = [await made.http.get(path) for path in ("/v1/models", "/v1/models/")]
        assert first.json() == second.json()
        assert first.json()["data"][0]["id"] == MODEL


@in_loop
async def test_some_of_the_tools_may_be_called(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        few = [{"type": "function", "function": {"name": "add"}}] * 2

        async def ask(mode: str) -> Any:
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": few}}
            body = {"messages": [ASKED], "tools": [OTHER, ADD], "tool_choice": choice}
            answer = await made.http.post("/v1/chat/completions", json=body)
            return answer.json()["choices"][0]["message"]

        made.say('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        for mode, is_held in (("auto", False), ("required", True)):
            (call,) = (await ask(mode))["tool_calls"]
            assert call["function"]["name"] == "add"
            asked = made.scheduler.requests[-1]
            assert "[other][add]" in made.tokenizer.decode(list(asked.prompt_token_ids)), "all are shown"
            assert asked.sampling.HasField("grammar") is is_held
        made.say('<tool_call>{"name": "other", "arguments": {}}</tool_call>')
        assert "tool_calls" not in await ask("auto")


class Color(enum.Enum):
    red = "red"
    blue = "blue"


class Step(BaseModel):
    what: str = Field(description="What to do.")
    kind: Literal["a", "b"]
    score: float = Field(ge=0, le=1)
    when: datetime.datetime | None = None
    code: str = Field(pattern="^[a-z]+$")


class Plan(BaseModel):
    steps: list[Step]
    color: Color
    note: str | None
    tags: list[str] = []


@in_loop
async def test_the_openai_package_parses_into_models_of_pydantic(model_dir: Path) -> None:
    plan = Plan(steps=[Step(what="w", kind="a", score=0.5, code="x")], color=Color.blue, note=None)

    async def answer(attempt: Attempt) -> None:
        assert attempt.request.sampling.HasField("grammar")
        await speak([2 + byte for byte in plan.model_dump_json().encode()])(attempt)

    async with (
        stack(model_dir, answer) as made,
        AsyncOpenAI(base_url=f"{made.base_url}/v1", api_key="unused", max_retries=0) as api,
    ):
        asked: Any = {"model": MODEL, "messages": [ASKED], "response_format": Plan}
        found = await api.chat.completions.parse(**asked)
        assert found.choices[0].message.parsed == plan
        async with api.chat.completions.stream(**asked) as stream:
            events = [event.type async for event in stream]
            assert (await stream.get_final_completion()).choices[0].message.parsed == plan
        assert {"content.delta", "content.done", "chunk"} <= set(events)
        assert json.loads(found.choices[0].message.content or "") == plan.model_dump(mode="json")


@in_loop
async def test_a_schema_beside_json_object_is_heard(model_dir: Path) -> None:
    """As llama.cpp's server and others take it."""
    async with stack(model_dir) as made:
        made.say('{"a": 1}')
        schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
        bodies: list[Json] = [
            {"type": "json_object", "schema": schema},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        ]
        for form in bodies:
            body = {"messages": [ASKED], "response_format": form}
            assert (await made.http.post("/v1/chat/completions", json=body)).status_code == 200
        first, second = [request.sampling.grammar for request in made.scheduler.requests]
        assert first == second
