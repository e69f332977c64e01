"""What a request may ask for: each cap by its option, and a body that is too big, whose sender reads the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.client import AsyncClient, InvalidArgument
from router.access.admission import check_caps
from router.access.options import AccessOptions
from router.errors import InvalidRequest
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest
from router.sampling import SamplingRequest
from router.structured.spec import GrammarKind, GrammarSpec
from router.text.prompt import ChatOptions
from tests.fakes.router_stack import Stack, in_loop, stack
from tests.router.chat_models import write_hermes_model

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("option", "limit", "path", "body", "field", "value"),
    [
        ("max_n", 2, "completions", {"n": 3}, "n", "3"),
        ("max_n", 2, "chat/completions", {"n": 3}, "n", "3"),
        ("max_logprobs", 3, "completions", {"logprobs": 4}, "logprobs", "4"),
        ("max_logprobs", 3, "completions", {"prompt_logprobs": 4}, "prompt_logprobs", "4"),
        ("max_logprobs", 3, "chat/completions", {"logprobs": True, "top_logprobs": 4}, "logprobs", "4"),
        ("max_stop_strings", 2, "completions", {"stop": ["a", "b", "c"]}, "stop", "3"),
        ("max_stop_chars", 5, "completions", {"stop": "abcdef"}, "stop", "6"),
        ("max_stop_chars", 5, "completions", {"stop": ["a", "abcdef"]}, "stop[1]", "6"),
        ("max_messages", 2, "chat/completions", {"messages": CHAT * 3}, "messages", "3"),
        ("max_prompts", 2, "completions", {"prompt": ["a", "b", "c"]}, "prompt", "3"),
        ("max_prompt_tokens", 4, "completions", {"prompt": [1, 2, 3, 4, 5]}, "prompt", "5"),
        ("max_prompt_tokens", 4, "completions", {"prompt": ["a", "abcde"]}, "prompt[1]", "5"),
    ],
)
@in_loop
async def test_each_cap_names_field_value_and_limit(
    model_dir: Path, option: str, limit: int, path: str, body: dict[str, Any], field: str, value: str
) -> None:
    base: dict[str, Any] = {"prompt": "abc"} if path == "completions" else {"messages": CHAT}
    config: dict[str, Any] = {option: limit}
    async with stack(model_dir, **config) as made:
        made.say("ok")
        for stream in (False, True):
            if stream and "prompt_logprobs" in body:
                continue
            answer = await made.http.post(f"/v1/{path}", json={**base, **body, "stream": stream})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == field
            assert f"--{option.replace('_', '-')}" in error["message"]
            assert str(limit) in error["message"]
            assert value in error["message"]
        assert made.scheduler.requests == []
        assert (await made.http.post(f"/v1/{path}", json=base)).status_code in (200, 400)


@in_loop
async def test_the_caps_hold_on_grpc_too(model_dir: Path) -> None:
    async with stack(model_dir, max_n=2, max_prompt_tokens=4) as made, AsyncClient(made.grpc_address) as client:
        with pytest.raises(InvalidArgument, match="--max-n") as refused:
            await client.generate("abc", n=3)
        assert refused.value.field == "n"
        with pytest.raises(InvalidArgument, match="--max-prompt-tokens"):
            await client.generate([1, 2, 3, 4, 5])


def caught(prompt: CompletionPrompt | ChatPrompt, **more: Any) -> InvalidRequest | None:
    """What `check_caps` says of a request."""
    options = more.pop("options", AccessOptions())
    try:
        check_caps(GenerationRequest(prompt, **more), options)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_prompts_and_their_answers_have_a_cap_together(name: str) -> None:
    prompts = CompletionPrompt(["a"] * 20)
    options = AccessOptions(max_prompts=20, max_n=10)
    assert caught(prompts, options=options) is None
    found = caught(prompts, sampling=SamplingRequest(**{name: 2}), options=options)
    assert found is not None
    assert (found.field, "are 40; at most 20" in found.message) == ("n", True)
    one = CompletionPrompt("a")
    assert caught(one, sampling=SamplingRequest(**{name: 10}), options=AccessOptions(max_prompts=1, max_n=10)) is None


def test_tools_and_grammars_have_caps() -> None:
    options = AccessOptions(max_tools=2, max_grammar_bytes=10)
    tools = ChatPrompt(CHAT, ChatOptions(tools=[{}] * 3))
    found = caught(tools, options=options)
    assert found is not None
    assert (found.field, "at most 2 tools" in found.message) == ("tools", True)
    grammar = GrammarSpec(GrammarKind.REGEX, "é" * 6, "response_format.json_schema")
    found = caught(ChatPrompt(CHAT), grammar=grammar, options=options)
    assert found is not None
    assert found.field == "response_format.json_schema"
    assert "got 12" in found.message


@in_loop
async def test_the_schemas_of_tools_that_must_be_called_count_as_a_grammar(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": "x" * 60}}}
    async with stack(write_hermes_model(tmp_path), max_grammar_bytes=50) as made:
        made.say("ok")
        body: dict[str, Any] = {"messages": CHAT, "tools": [tool]}
        assert (answer := await made.http.post("/v1/chat/completions", json=body)).status_code == 200, answer.text
        answer = await made.http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
        assert answer.status_code == 400
        assert "--max-grammar-bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("odd", [None, True, "5", 5.5, [], {}, object()])
def test_what_is_no_count_is_left_to_the_fields_own_rules(odd: Any) -> None:
    sampling = SamplingRequest(n=odd, logprobs=odd, stop=odd)
    assert caught(CompletionPrompt(odd), sampling=sampling) is None
    assert caught(ChatPrompt(odd, ChatOptions(tools=odd)), sampling=sampling) is None


@in_loop
async def test_a_request_ends_by_the_servers_timeout_or_the_clients_if_that_is_shorter(model_dir: Path) -> None:
    # Long, so that no stall of the machine shows in what is left of them. gRPC tells a timeout in three digits, rounded
    # up: 1500 s and a clock's tick are 1510 s to the server.
    served_s, asked_s, told_s = 5000.0, 1500.0, 1510.0
    async with stack(model_dir, request_timeout=served_s) as made:
        made.say("ok")
        assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        async with AsyncClient(made.grpc_address) as client:
            await client.generate("a", timeout_s=asked_s)
            await client.generate("a", timeout_s=10 * served_s)
        deadlines_s = [request.deadline_ns / 1e9 for request in made.scheduler.requests]
        assert [deadline_s > 1000 for deadline_s in deadlines_s] == [True] * 3
        assert deadlines_s[1] <= told_s < deadlines_s[0] <= served_s
        assert told_s < deadlines_s[2] <= served_s


async def exchange(made: Stack, head: str, body_bytes: int) -> tuple[int, dict[str, Any], int]:
    """Send a head and zeros as plain clients do, all of it before reading: (status, body, bytes that went out)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
    try:
        writer.write(head.encode("ascii"))
        sent, piece = 0, b"0" * 2**18
        while sent < body_bytes:
            writer.write(piece[: body_bytes - sent])
            await writer.drain()
            sent += min(len(piece), body_bytes - sent)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        return int(answer.split()[1]), json.loads(await reader.readexactly(length)), sent
    finally:
        writer.close()


def head(path: str, *lines: str) -> str:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: x", *lines, "", ""))


@pytest.mark.parametrize("size", [27_000_000, 2**16 + 1])
@in_loop
async def test_a_body_over_the_limit_is_answered_although_its_sender_never_looks_up(model_dir: Path, size: int) -> None:
    async with stack(model_dir, max_message_bytes=2**16) as made:
        status, body, sent = await exchange(made, head("/v1/completions", f"content-length: {size}"), size)
        assert (status, sent) == (413, size)
        assert body["error"]["param"] == "body"
        assert "65536" in body["error"]["message"]
        assert "--max-message-bytes" in body["error"]["message"]


@in_loop
async def test_a_big_body_without_a_key_is_answered_too(model_dir: Path) -> None:
    async with stack(model_dir, api_key="k") as made:
        size = 5_000_000
        status, body, sent = await exchange(made, head("/v1/completions", f"content-length: {size}"), size)
        assert (status, sent, body["error"]["type"]) == (401, size, "authentication_error")


@in_loop
async def test_who_asks_before_sending_a_big_body_is_answered_at_once(model_dir: Path) -> None:
    async with stack(model_dir, max_message_bytes=2**16) as made:
        asked = head("/v1/completions", "content-length: 27000000", "expect: 100-continue")
        status, body, _ = await exchange(made, asked, 0)
        assert (status, body["error"]["type"]) == (413, "request_too_large")


@in_loop
async def test_a_body_too_big_to_be_heard_out_is_refused_at_once(model_dir: Path) -> None:
    async with stack(model_dir, max_message_bytes=2**16) as made:
        status, _, _ = await exchange(made, head("/v1/completions", "content-length: 99000000000"), 0)
        assert status == 413


@in_loop
async def test_a_priority_that_is_none_is_no_keys_fault_where_there_are_no_keys(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        answer = await made.http.post("/v1/completions", json={"prompt": "a", "priority": 2**40})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        assert "key" not in answer.json()["error"]["message"]
