"""gRPC has what HTTP has: tools, thinking, ranks, echo, constraints, tokens; and the client with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.client import AsyncClient, InvalidArgument, NotFound
from octavo.v1 import inference_pb2 as pb
from tests.fakes.router_stack import CONTEXT, MODEL, in_loop, stack
from tests.router.chat_models import write_hermes_model, write_thinking_model
from tests.router.test_completions_api import speak_by_seed
from tests.router.test_grpc import refusal, stub

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@in_loop
async def test_tools_both_ways(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made, AsyncClient(made.grpc_address) as client:
        made.say("Sure. " + CALL)
        whole = await client.chat(MESSAGES, tools=[TOOL])
        async with await client.chat(MESSAGES, tools=[TOOL], stream=True) as stream:
            texts = [delta.text async for delta in stream]
        streamed = stream.result
        for result in (whole, streamed):
            (choice,) = result.choices
            assert (choice.text, choice.finish_reason) == ("Sure.", "tool_calls")
            (call,) = choice.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        assert "".join(texts) == "Sure."
        turns = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await client.chat(turns, tools=[TOOL], tool_choice="none")
        prompt = made.tokenizer.decode(list(made.scheduler.requests[-1].prompt_token_ids))
        assert '"a": 1' in prompt
        assert "tool: 2" in prompt
        assert "[add]" not in prompt
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            await client.chat(MESSAGES, tools=[TOOL], tool_choice=choice)
            assert "<tool_call>" in made.scheduler.requests[-1].sampling.grammar.text
        with pytest.raises(ValueError, match="tool_choice"):
            await client.chat(MESSAGES, tools=[TOOL], tool_choice="any")


@in_loop
async def test_thinking_and_template_variables(tmp_path: Path) -> None:
    async with stack(write_thinking_model(tmp_path)) as made, AsyncClient(made.grpc_address) as client:
        made.say("hm</think>Four.")
        (choice,) = (await client.chat(MESSAGES)).choices
        assert (choice.reasoning, choice.text) == ("hm", "Four.")
        (choice,) = (await client.chat(MESSAGES, hide_reasoning=True)).choices
        assert (choice.reasoning, choice.text) == ("", "Four.")
        made.say("hm</think>[4]")
        (choice,) = (await client.chat(MESSAGES, structured_output={"regex": r"\[\d\]"})).choices
        assert (choice.reasoning, choice.text) == ("hm", "[4]")
        assert made.scheduler.requests[-1].sampling.grammar.thinking.is_open
        made.say("Four.")
        (choice,) = (await client.chat(MESSAGES, template_variables={"enable_thinking": False})).choices
        assert (choice.reasoning, choice.text) == ("", "Four.")


@in_loop
async def test_the_likeliest_of_best_of(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        speak_by_seed(made)
        result = await client.generate("x", best_of=4, seed=7)
        said = sorted("abcdefgh"[request.sampling.seed % 8] for request in made.scheduler.requests)
        assert len(said) == 4
        assert [choice.text for choice in result.choices] == said[:1]
        assert result.choices[0].logprobs == ()
        with pytest.raises(InvalidArgument, match="best_of") as refused:
            async for _ in await client.generate("x", best_of=4, stream=True):
                pass
        assert refused.value.field == "best_of"


@in_loop
async def test_echo_and_the_shown_stop(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        made.say("cdef")
        whole = await client.generate("ab", echo=True, n=2, stop="e", include_stop_string=True)
        assert [choice.text for choice in whole.choices] == ["abcde", "abcde"]
        assert whole.choices[0].token_ids == tuple(made.ids("cde"))
        stream = await client.generate("ab", echo=True, stream=True)
        assert "".join([delta.text async for delta in stream]) == "abcdef"
        await client.generate("abc", truncate_prompt_tokens=2, add_special_tokens=False)
        assert list(made.scheduler.requests[-1].prompt_token_ids) == made.ids("bc")


@in_loop
async def test_constraints(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        made.say("{}")
        for asked in ({"json_schema": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a", "b"]}):
            await client.generate("x", structured_output=asked)
            assert made.scheduler.requests[-1].sampling.HasField("grammar")


@in_loop
async def test_tokens_and_texts(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        found = await client.tokenize("aé")
        assert (list(found.token_ids), found.texts, found.max_model_len) == (
            made.ids("aé"),
            ("a", "\ufffd", "\ufffd"),
            CONTEXT,
        )
        assert await client.detokenize(found.token_ids) == "aé"
        chat = await client.tokenize(MESSAGES)
        made.say("ok")
        await client.chat(MESSAGES)
        assert list(chat.token_ids) == list(made.scheduler.requests[-1].prompt_token_ids)
        with pytest.raises(InvalidArgument) as refused:
            await client.detokenize([made.tokenizer.vocab_size])
        assert refused.value.field == "tokens[0]"
        async with AsyncClient(made.grpc_address, model="other") as stranger:
            with pytest.raises(NotFound, match=MODEL):
                await stranger.tokenize("a")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [pb.Tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [pb.Tool(name="f", parameters_json="{")]}, "tools[0].parameters_json"),
    ({"tools": [pb.Tool(name="f", parameters_json="[]")]}, "tools[0].function.parameters"),
    ({"tool_choice": pb.ToolChoice(name="f")}, "tool_choice"),
    ({"template_variables_json": "[1]"}, "template_variables_json"),
    ({"documents_json": "["}, "documents_json"),
    ({"output": pb.OutputOptions(echo=True)}, "echo"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]


@in_loop
async def test_refusals_name_their_field(tmp_path: Path) -> None:
    async with stack(write_hermes_model(tmp_path)) as made:
        for more, field in BAD:
            request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], **more)
            code, message, found = await refusal(stub(made).Chat(request))
            assert (code, found) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert message.startswith(field.split("[")[0])
        silent = pb.ChatRequest(messages=[pb.ChatMessage(role="user")])
        assert (await refusal(stub(made).Chat(silent)))[2] == "messages[0].content"
        assert (await refusal(stub(made).Tokenize(pb.TokenizeRequest())))[2] == "prompt"
        assert made.scheduler.requests == []


@in_loop
async def test_the_request_id_comes_back_as_metadata(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        unary = pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a"))
        call = stub(made).GenerateUnary(unary, metadata=(("x-request-id", "mine"),))
        assert (await call).request_id == "mine"
        assert ("x-request-id", "mine") in list(await call.initial_metadata())
        assert made.scheduler.requests[-1].request_id == "mine"


@in_loop
async def test_a_deadline_goes_down_and_comes_back(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        await stub(made).GenerateUnary(pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a")), timeout=15)
        assert 0 < made.scheduler.requests[-1].deadline_ns <= 15e9
