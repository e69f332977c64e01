"""Connect and gRPC-Web against native gRPC: the same calls have the same answers and the same ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import CONTEXT, MODEL, Stack, in_loop
from tests.fakes.router_stack import stack as router_stack
from tests.fakes.scheduler import Attempt
from tests.fakes.web_rpc import Ended, Form, call, frames, stream

ID = {"x-request-id": "mine"}
CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi ✓")], sampling=pb.SamplingParams(seed=7))
GENERATE = pb.GenerateRequest(
    text="abc",
    sampling=pb.SamplingParams(n=2, max_tokens=9, seed=-(2**63)),
    output=pb.OutputOptions(logprobs=2, prompt_logprobs=1),
)


async def native(made: Stack, method: str, request: Any) -> Ended:
    """The call over gRPC itself."""
    made_call = getattr(pb_grpc.InferenceServiceStub(made.channel), method)(request, metadata=tuple(ID.items()))
    ended = Ended()
    try:
        if hasattr(made_call, "read"):
            ended.messages = [message async for message in made_call]
        else:
            ended.messages = [await made_call]
    except grpc.aio.AioRpcError as error:
        ended.code, ended.message = error.code().value[0], error.details() or ""
        metadata: Any = error.trailing_metadata() or ()
        packed = [value for key, value in metadata if key == "grpc-status-details-bin"]
        details = status_pb2.Status.FromString(packed[0]).details if packed else ()
        ended.details = [(one.type_url.rpartition("/")[2], one.value) for one in details]
    return ended


def choices_apart(messages: list[Any]) -> list[list[Any]]:
    """The events of each choice in order, then the others: choices of one request race each other, and how many tokens
    a delta holds is a matter of time, so deltas are joined.
    """
    parts: dict[int, list[Any]] = {}
    for message in messages:
        kind = message.WhichOneof("event")
        part = parts.setdefault(getattr(message, kind).index if kind in ("delta", "finished") else -1, [])
        if kind == "delta" and part:
            part[-1].delta.text += message.delta.text
            assert part[-1].delta.start_index + len(part[-1].delta.token_ids) == message.delta.start_index
            part[-1].delta.token_ids.extend(message.delta.token_ids)
            part[-1].delta.logprobs.extend(message.delta.logprobs)
        else:
            part.append(message)
    return [part for _, part in sorted(parts.items())]


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_streams_are_those_of_grpc(model_dir: Path, form: Form) -> None:
    async with router_stack(model_dir) as made:
        made.say("héllo 👋 wörld")
        for method, request in (("Chat", CHAT), ("Generate", GENERATE)):
            expected = await native(made, method, request)
            found = await call(made.http, form, method, request, ID)
            assert found.code == expected.code == 0
            assert choices_apart(found.messages) == choices_apart(expected.messages)
            assert found.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_whole_answers_are_those_of_grpc(model_dir: Path, form: Form) -> None:
    requests = {
        "ChatUnary": pb.ChatUnaryRequest(request=CHAT),
        "GenerateUnary": pb.GenerateUnaryRequest(request=GENERATE),
        "ListModels": pb.ListModelsRequest(),
        "Tokenize": pb.TokenizeRequest(text="grün"),
        "Detokenize": pb.DetokenizeRequest(token_ids=[2 + ord("o"), 2 + ord("k")]),
    }
    async with router_stack(model_dir) as made:
        made.say("ok ✓")
        for method, request in requests.items():
            expected = await native(made, method, request)
            found = await call(made.http, form, method, request, ID)
            assert (found.code, found.messages) == (0, expected.messages), method
            assert len(found.messages) == 1


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_refusals_are_those_of_grpc(model_dir: Path, form: Form) -> None:
    async with router_stack(model_dir) as made:
        hot = pb.SamplingParams(temperature=9)
        requests: list[tuple[str, Any, grpc.StatusCode]] = [
            ("Generate", pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            ("Chat", pb.ChatRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            ("Generate", pb.GenerateRequest(text="a", sampling=hot), grpc.StatusCode.INVALID_ARGUMENT),
            (
                "GenerateUnary",
                pb.GenerateUnaryRequest(
                    request=pb.GenerateRequest(text="é", sampling=pb.SamplingParams(max_tokens=CONTEXT))
                ),
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            ("Chat", pb.ChatRequest(model="né", messages=CHAT.messages), grpc.StatusCode.NOT_FOUND),
            ("Tokenize", pb.TokenizeRequest(model="no", text="a"), grpc.StatusCode.NOT_FOUND),
        ]
        for method, request, code in requests:
            expected = await native(made, method, request)
            found = await call(made.http, form, method, request, ID)
            assert (found.code, found.message, found.details) == (expected.code, expected.message, expected.details)
            assert (found.code, found.messages) == (code.value[0], [])
            assert any(name == "google.rpc.RequestInfo" for name, _ in found.details)
        assert made.scheduler.requests == []


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_a_full_queue_says_when_to_come_back(model_dir: Path, form: Form) -> None:
    async def full(attempt: Attempt) -> None:
        delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=7))
        await attempt.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", delay)

    async with router_stack(model_dir, full) as made:
        for method, request in (("Chat", CHAT), ("ChatUnary", pb.ChatUnaryRequest(request=CHAT))):
            found = await call(made.http, form, method, request)
            assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            (retry,) = [value for name, value in found.details if name == "google.rpc.RetryInfo"]
            assert error_details_pb2.RetryInfo.FromString(retry).retry_delay.seconds >= 7


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_an_error_in_the_middle_follows_what_was_said(model_dir: Path, form: Form) -> None:
    async def stumble(attempt: Attempt) -> None:
        await attempt.scheduled()
        await attempt.tokens(0, made.ids("ab"))
        await seen.wait()
        await attempt.fail(grpc.StatusCode.INVALID_ARGUMENT, "odd")

    seen = asyncio.Event()
    async with router_stack(model_dir, stumble) as made, stream(made.http, form, "Chat", CHAT) as response:
        flags = []
        async for flag, _ in frames(form, response):
            flags.append(flag)
            seen.set()
        assert flags == [0] * (len(flags) - 1) + [2 if form.protocol == "connect" else 0x80]
        assert len(flags) > 1


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_the_gate_speaks_every_protocol(model_dir: Path, form: Form) -> None:
    async with router_stack(model_dir, api_key="right-key") as made:
        made.say("ok")
        for method, request in (("Chat", CHAT), ("ListModels", pb.ListModelsRequest())):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic bWU6cmlnaHQta2V5"}):
                refused = await call(made.http, form, method, request, headers)
                assert refused.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
                assert "key" in refused.message.lower()
                assert refused.headers["www-authenticate"].startswith("Bearer")
                assert refused.headers["x-request-id"]
            allowed = await call(made.http, form, method, request, {"authorization": "Bearer right-key"})
            assert allowed.code == 0
        assert len(made.scheduler.requests) == 1


@pytest.mark.parametrize("form", [Form.CONNECT_JSON, Form.WEB_PROTO])
@in_loop
async def test_the_address_list_holds(model_dir: Path, form: Form) -> None:
    async with router_stack(model_dir, allow_networks="192.0.2.0/24") as made:
        refused = await call(made.http, form, "ListModels", pb.ListModelsRequest())
        assert refused.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert "--allow-networks" in refused.message


@in_loop
async def test_the_model_and_a_made_id_are_said(model_dir: Path) -> None:
    async with router_stack(model_dir) as made:
        made.say("ok")
        for form in Form:
            found = await call(made.http, form, "Chat", CHAT)
            (shown,) = {(message.request_id, message.model) for message in found.messages}
            assert shown == (found.headers["x-request-id"], MODEL)
