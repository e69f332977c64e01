"""The official openai package against the HTTP surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes.router_stack import MODEL, Stack, in_loop, stack
from tests.router.chat_models import write_hermes_model, write_thinking_model


def client(made: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{made.base_url}/v1", api_key="unused", max_retries=0)


@in_loop
async def test_chat(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        made.say("Hello there")
        answer = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "Hello there"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("Hello there") + 1
        assert answer.usage.prompt_tokens == len(made.scheduler.requests[0].prompt_token_ids)


@in_loop
async def test_chat_stream_equals_the_whole_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        made.say("Grüße 🌶 and more", chunk=3)
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße 🌶 and more"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert all(chunk.usage is None for chunk in chunks[:-1])


@in_loop
async def test_completions_of_several_prompts(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        made.say("ok")
        answer = await api.completions.create(model=MODEL, prompt=["a", "bc"], n=2, max_tokens=8)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in answer.choices} == {"ok"}
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
        stream = await api.completions.create(model=MODEL, prompt=["a", "bc"], n=2, max_tokens=8, stream=True)
        texts = dict.fromkeys(range(4), "")
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert set(texts.values()) == {"ok"}


@in_loop
async def test_models(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        assert [model.id async for model in api.models.list()] == [MODEL]


@in_loop
async def test_errors_have_openais_classes(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model=MODEL, prompt="a", temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await api.completions.create(model="other", prompt="a")


TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@in_loop
async def test_tools(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made, client(made) as api:
        made.say('Sure.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        question: Any = {"role": "user", "content": "hi"}
        answer = await api.chat.completions.create(model=MODEL, messages=[question], tools=[TOOL])
        message = answer.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        turns: Any = [question, message, result]
        async with api.chat.completions.stream(model=MODEL, messages=turns, tools=[TOOL]) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        assert final.message.tool_calls[0].function.arguments == '{"a": 1}'


@in_loop
async def test_thinking(tmp_path: Path) -> None:
    async with stack(write_thinking_model(tmp_path)) as made, client(made) as api:
        made.say("hm</think>Four.")
        answer = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "2+2?"}])
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "Four.")


@in_loop
async def test_logprobs_best_of_and_a_model_by_name(model_dir: Path) -> None:
    async with stack(model_dir) as made, client(made) as api:
        made.say("é")
        answer = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert bytes(byte for entry in logprobs.content for byte in entry.bytes or ()) == "é".encode()
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        ranked = await api.completions.create(model=MODEL, prompt="a", best_of=3, n=2)
        assert [choice.index for choice in ranked.choices] == [0, 1]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.BadRequestError, match="generates text"):
            await api.embeddings.create(model=MODEL, input="a")
