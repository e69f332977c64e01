"""Constrained requests on both surfaces: the grammar reaches the scheduler, a bad one does not, and none is logged."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from octavo.internal.v1 import types_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import in_loop, stack
from tests.fakes.scheduler import Attempt

CANARY = "canary7193"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {CANARY: {"type": "string"}}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BAD_SCHEMA = {**SCHEMA, CANARY: {}, "dependentSchemas": {}}
GRAMMAR_ERROR = types_pb2.FINISH_REASON_GRAMMAR_ERROR


@in_loop
async def test_grammars_reach_the_scheduler(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("{}")
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES, "response_format": WRAPPED, "n": 2}),
            ("/v1/completions", {"prompt": ["a", "b"], "response_format": WRAPPED}),
            ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA, "stream": True}),
        ):
            answer = await made.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        asked = [request.sampling.grammar for request in made.scheduler.requests]
        assert [grammar.kind for grammar in asked] == [types_pb2.GRAMMAR_KIND_JSON_SCHEMA] * 5
        assert {json.loads(grammar.text).keys() >= SCHEMA.keys() for grammar in asked} == {True}
        await made.http.post("/v1/completions", json={"prompt": "a"})
        assert not made.scheduler.requests[-1].sampling.HasField("grammar")


@in_loop
async def test_f66_what_a_schema_points_at_is_never_fetched(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    callers: list[object] = []
    listener = await asyncio.start_server(lambda reader, writer: callers.append(writer), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/schema.json"
    async with stack(model_dir) as made, listener:
        for place in (url, (tmp_path / "schema.json").as_uri(), str(tmp_path / "schema.json"), "schema.json"):
            for schema in ({"$ref": place}, {"$schema": place}, {"items": {"$ref": f"{place}#/a"}, "type": "array"}):
                form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
                body = {"messages": MESSAGES, "response_format": form}
                answer = await made.http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400, schema
                assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
        assert callers == []
        assert made.scheduler.requests == []


@in_loop
async def test_bad_grammars_are_refused_by_their_field_and_not_logged(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD_SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": CANARY + "("}}, "structured_outputs.regex"),
        ({"guided_grammar": f"start: {CANARY}"}, "guided_grammar"),
    ]
    async with stack(model_dir) as made:
        for body, field in bad:
            answer = await made.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert field in error["message"]
        assert made.scheduler.requests == []
    assert CANARY not in caplog.text


@in_loop
async def test_grpc_speaks_of_its_own_fields(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ab")
        stub: Any = pb_grpc.InferenceServiceStub(made.channel)

        def ask(**constraint: Any) -> pb.GenerateUnaryRequest:
            sampling = pb.SamplingParams(structured_output=pb.StructuredOutput(**constraint))
            return pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a", sampling=sampling))

        answer = await stub.GenerateUnary(ask(regex="[ab]+"))
        assert answer.choices[0].content.text == "ab"
        assert made.scheduler.requests[0].sampling.grammar.text == "[ab]+"
        for options, spaced in (
            ({}, {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}),
            ({"disable_any_whitespace": True}, {"whitespace_flexible": False}),
            ({"whitespace_pattern": " ", "disable_any_whitespace": True}, {"whitespace_pattern": " "}),
        ):
            await stub.GenerateUnary(ask(json_object=True, **options))
            sent = json.loads(made.scheduler.requests.pop().sampling.grammar.text)
            assert sent["x-guidance"] == spaced
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GenerateUnary(ask(regex="[ab"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling.structured_output.regex" in str(refused.value.details())
        assert len(made.scheduler.requests) == 1


@in_loop
async def test_an_answer_that_cannot_go_on_fails_by_its_grammars_field(model_dir: Path) -> None:
    async def stuck(attempt: Attempt) -> None:
        await attempt.scheduled()
        await attempt.tokens(0, [5, 6])
        await attempt.tokens(2, [], GRAMMAR_ERROR)
        await attempt.finished(2, GRAMMAR_ERROR)

    async with stack(model_dir, stuck) as made:
        answer = await made.http.post("/v1/completions", json={"prompt": "a", "guided_regex": "a+"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "guided_regex")
        assert "after 2 tokens" in error["message"]


@in_loop
async def test_a_model_without_end_tokens_takes_no_grammar(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        del made.scheduler.info.end_token_ids[:]
        made.scheduler.announce()
        while made.router.front.models()[0].info.end_token_ids:
            await made.http.get("/health")  # the word is on its way
        answer = await made.http.post("/v1/completions", json={"prompt": "a", "guided_regex": "a+"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
        assert "no end token" in answer.json()["error"]["message"]
