"""Chat over HTTP beyond plain text: tools in every format, thinking, what is reported on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.router_stack import Stack, in_loop, stack, write_text_model
from tests.fakes.scheduler import Attempt
from tests.router.chat_models import (
    write_hermes_model,
    write_llama_model,
    write_mistral_model,
    write_thinking_model,
)

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ARGUMENTS = '{"a": 1, "b": "}"}'
Json = dict[str, Any]


async def post(made: Stack, **body: Any) -> Json:
    answer = await made.http.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


async def refused(made: Stack, **body: Any) -> Json:
    answer = await made.http.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert answer.status_code == 400, answer.text
    error: Json = answer.json()["error"]
    return error


async def chunks(made: Stack, path: str = "/v1/chat/completions", **body: Any) -> list[Json]:
    given = {"messages": [USER]} if "chat" in path else {}
    answer = await made.http.post(path, json={**given, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def join_message(parts: list[Json]) -> Json:
    """What a client makes of the deltas of choice 0."""
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
    for part in parts:
        for choice in part["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({**call["function"], "id": call["id"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_hermes_model, 'Sure.\n<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'),
        (write_mistral_model, 'Sure. [TOOL_CALLS] [{"name": "add", "arguments": %s}]'),
        (write_mistral_model, "Sure. [TOOL_CALLS]add%s"),
        (write_llama_model, 'Sure. <|python_tag|>{"name": "add", "parameters": %s}'),
    ],
)
@in_loop
async def test_a_tool_is_called(tmp_path: Path, write: Callable[[Path], Path], said: str) -> None:
    async with stack(write(tmp_path)) as made:
        made.say(said % ARGUMENTS)
        (choice,) = (await post(made, tools=[TOOL]))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Sure."
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": ARGUMENTS})

        parts = await chunks(made, tools=[TOOL])
        joined = join_message(parts)
        assert joined["content"] == "Sure."
        assert [(c["name"], c["arguments"]) for c in joined["tool_calls"]] == [("add", ARGUMENTS)]
        assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"

        # The turn goes back into the conversation, with its result.
        answered = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        assert (await post(made, messages=answered, tools=[TOOL]))["choices"]
        prompt = made.tokenizer.decode(list(made.scheduler.requests[-1].prompt_token_ids), skip_special_tokens=False)
        assert "[add]" in prompt
        assert '"a": 1' in prompt


@in_loop
async def test_without_tools_nothing_is_a_call(tmp_path: Path) -> None:
    said = f'<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>'
    async with stack(write_hermes_model(tmp_path)) as made:
        made.say(said)
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            (choice,) = (await post(made, **more))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
            assert "tool_calls" not in choice["message"]
        prompts = [made.tokenizer.decode(list(r.prompt_token_ids)) for r in made.scheduler.requests]
        assert not any("[add]" in prompt for prompt in prompts)
        # A call of what was not offered is text as well.
        other = {"type": "function", "function": {"name": "other"}}
        (choice,) = (await post(made, tools=[other]))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")


@in_loop
async def test_one_call_at_a_time_ends_the_answer(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    async with stack(write_hermes_model(tmp_path)) as made:
        made.say(call * 2)
        both = (await post(made, tools=[TOOL]))["choices"][0]["message"]["tool_calls"]
        assert len(both) == 2
        assert len({one["id"] for one in both}) == 2

        async def call_twice_and_go_on(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, made.ids(call * 2))
            await asyncio.get_running_loop().create_future()

        made.scheduler.behave = call_twice_and_go_on
        (choice,) = (await post(made, tools=[TOOL], parallel_tool_calls=False))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)


@in_loop
async def test_a_call_cut_short_keeps_what_there_is(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        made.say('<tool_call>{"name": "add", "arguments": {"a": 12345}}')
        (choice,) = (await post(made, tools=[TOOL], max_tokens=48))["choices"]
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith('{"a": 1')


BAD_TOOLS: list[tuple[Json, str]] = [
    ({"tools": "add"}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "add"}}, "function_call"),
    *(
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}},
            },
            path,
        )
        for mode, tools, path in (
            ("auto", [], "tool_choice"),
            ("none", [{"type": "function", "function": {"name": "add"}}], "tool_choice"),
            ("auto", [{"type": "function"}], "tool_choice.allowed_tools.tools[0]"),
            (
                "required",
                [{"type": "function", "function": {"name": "sub"}}],
                "tool_choice.allowed_tools.tools[0].function.name",
            ),
        )
    ),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
]


@in_loop
async def test_bad_tools_are_refused_by_their_path(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        for body, param in BAD_TOOLS:
            error = await refused(made, **body)
            assert error["param"] == param, body
            assert error["message"].startswith(param.split("[")[0])
        assert made.scheduler.requests == []


@in_loop
async def test_tools_need_a_template_that_shows_them(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        error = await refused(made, tools=[TOOL])
        assert error["param"] == "tools"
        assert "template" in error["message"]
        made.say("ok")
        assert (await post(made, tools=[TOOL], tool_choice="none"))["choices"][0]["message"]["content"] == "ok"


@in_loop
async def test_calls_are_content_for_a_template_that_knows_none(model_dir: Path) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]}  # fmt: skip
    async with stack(model_dir) as made:
        made.say("ok")
        await post(made, messages=[USER, turn, {"role": "tool", "tool_call_id": "c1", "content": "two"}])
        prompt = made.tokenizer.decode(list(made.scheduler.requests[0].prompt_token_ids))
        assert 'assistant: {"name": "f", "arguments": {"a": 1}}\n' in prompt
        assert "tool: two" in prompt


@in_loop
async def test_a_required_call_is_ruled_by_a_grammar(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        made.say('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named):
            answer = await post(made, tools=[TOOL], tool_choice=choice)
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            grammar = made.scheduler.requests[-1].sampling.grammar
            assert "<tool_call>" in grammar.text
            assert "add" in grammar.text


@in_loop
async def test_thinking_is_split_off(tmp_path: Path) -> None:
    async with stack(write_thinking_model(tmp_path)) as made:
        made.say("\nhm, hm\n</think>\n\nFour.")
        message = (await post(made))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm, hm", "Four.")
        joined = join_message(await chunks(made))
        assert (joined["reasoning_content"], joined["content"]) == ("hm, hm", "Four.")
        message = (await post(made, include_reasoning=False))["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "Four.")

        made.say("Four.")
        message = (await post(made, chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "Four.")
        made.say('hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call>')
        choice = (await post(made, tools=[TOOL]))["choices"][0]
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


@in_loop
async def test_a_constrained_answer_is_thought_about(tmp_path: Path) -> None:
    json_object: dict[str, Any] = {"response_format": {"type": "json_object"}}
    async with stack(write_thinking_model(tmp_path)) as made:
        made.say('{"hm": 1}</think>\n\n{}')
        message = (await post(made, **json_object))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ('{"hm": 1}', "{}")
        thinking = made.scheduler.requests[-1].sampling.grammar.thinking
        assert (thinking.opener, thinking.closer, thinking.is_open) == ("<think>", "</think>", True)
        assert not thinking.HasField("closer_id"), "no special token"

        made.say('hm</think>\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
        message = (await post(made, tools=[TOOL], tool_choice="required"))["choices"][0]["message"]
        assert (message["reasoning_content"], message["tool_calls"][0]["function"]["name"]) == ("hm", "add")
        assert made.scheduler.requests[-1].sampling.grammar.thinking.is_open

        made.say("{}")
        for body in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"messages": [USER, {"role": "assistant", "content": "{"}], "continue_final_message": True},
        ):
            message = (await post(made, **body, **json_object))["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (None, "{}")
            grammar = made.scheduler.requests[-1].sampling.grammar
            assert grammar.text
            assert not grammar.HasField("thinking")


@in_loop
async def test_thinking_that_no_template_opens_and_special_tokens_mark(tmp_path: Path) -> None:
    marks = ["[THINK]", "[/THINK]"]
    directory = write_text_model(tmp_path, specials=marks)
    async with stack(directory, reasoning_parser="mistral") as made:
        made.say("[THINK]hm[/THINK]ab")
        message = (await post(made, structured_outputs={"regex": "[ab]+"}))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "ab")
        thinking = made.scheduler.requests[-1].sampling.grammar.thinking
        assert [thinking.opener_id, thinking.closer_id] == [made.tokenizer.token_id(mark) for mark in marks]
        assert not thinking.is_open


@in_loop
async def test_thinking_is_text_where_nobody_asked_for_a_parser(tmp_path: Path) -> None:
    async with stack(write_thinking_model(tmp_path), reasoning_parser="none") as made:
        made.say("hm</think>Four.")
        assert (await post(made))["choices"][0]["message"]["content"] == "hm</think>Four."


@in_loop
async def test_token_ids_metrics_and_usage_on_request(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("abc")
        plain = await post(made)
        assert not {"metrics", "token_ids"} & plain["choices"][0].keys()
        assert "prompt_token_ids" not in plain
        full = await post(made, return_token_ids=True, return_metrics=True)
        prompt_ids = list(made.scheduler.requests[-1].prompt_token_ids)
        assert (full["prompt_token_ids"], full["choices"][0]["token_ids"]) == (prompt_ids, made.ids("abc"))
        assert full["choices"][0]["metrics"]["attempts"] == 1

        parts = await chunks(
            made,
            return_token_ids=True,
            return_metrics=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        assert parts[0]["prompt_token_ids"] == prompt_ids
        ids = [i for part in parts for choice in part["choices"] for i in choice.get("token_ids", ())]
        assert ids == made.ids("abc")
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert all(part["usage"]["prompt_tokens"] == len(prompt_ids) for part in parts)
        assert parts[-2]["choices"][0]["metrics"]["replica"]
        parts = await chunks(made, stream_options={"include_usage": True})
        assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        parts = await chunks(made)
        assert not any("usage" in part for part in parts)


@in_loop
async def test_what_openai_requires_of_an_answer_is_there(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        (choice,) = (await post(made, logprobs=True))["choices"]
        assert {"role", "content", "refusal"} <= choice["message"].keys()
        assert choice["logprobs"].keys() == {"content", "refusal"}
        assert (choice["message"]["refusal"], choice["logprobs"]["refusal"]) == (None, None)


@in_loop
async def test_logprobs_name_tokens_by_id_on_request(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("é")
        entries = (await post(made, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é"
        answer = await post(made, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in made.ids("é")]


@in_loop
async def test_prompts_are_cut_on_request(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        for value in (0, -2, 1.5, True, "8", 10**6):
            assert (await refused(made, truncate_prompt_tokens=value))["param"] == "truncate_prompt_tokens"
        await post(made)
        whole = list(made.scheduler.requests[-1].prompt_token_ids)
        await post(made, truncate_prompt_tokens=5)
        assert list(made.scheduler.requests[-1].prompt_token_ids) == whole[-5:]
        long = [{"role": "user", "content": "x" * 300}]
        await post(made, messages=long, truncate_prompt_tokens=-1, max_tokens=6)
        assert len(made.scheduler.requests[-1].prompt_token_ids) == 250


@in_loop
async def test_f08_each_choice_has_one_role_and_one_finish(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("abcde")
        for options, with_usage in (({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)):
            parts = await chunks(made, n=2, max_tokens=5, stream_options=options)
            for index in (0, 1):
                own = [c for part in parts for c in part["choices"] if c["index"] == index]
                assert sum("role" in choice["delta"] for choice in own) == 1
                assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
            assert (parts[-1]["choices"] == []) is with_usage
            if with_usage:
                assert parts[-1]["usage"]["completion_tokens"] == 10
        error = await refused(made, stream_options={"include_usage": True})
        assert error["param"] == "stream_options"
