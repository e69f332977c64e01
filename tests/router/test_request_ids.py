"""F42: what a client calls its request: in every refusal, and in one line of the log, wherever it said so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status.rpc_status import from_call

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import Stack, in_loop, stack
from tests.fakes.scheduler import Attempt

OPTIONS = pb.RequestOptions(request_id="mine")
METADATA = (("x-request-id", "mine"),)
MESSAGES = [pb.ChatMessage(role="user", content="a")]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of the request since the last call."""
    found = [record.getMessage() for record in caplog.records if "mine" in record.getMessage()]
    caplog.clear()
    return found


def info_of(error: grpc.aio.AioRpcError) -> list[str]:
    status: Any = from_call(error)  # type: ignore[arg-type]
    found = []
    for detail in status.details:
        info = error_details_pb2.RequestInfo()
        if detail.Unpack(info):
            found.append(info.request_id)
    return found


async def ask_grpc(made: Stack, sampling: pb.SamplingParams, *, in_options: bool) -> list[grpc.aio.AioRpcError]:
    """Every method that makes answers, with the same id."""
    options, metadata = (OPTIONS, None) if in_options else (None, METADATA)
    stub: Any = pb_grpc.InferenceServiceStub(made.channel)
    generate = pb.GenerateRequest(text="a", sampling=sampling, options=options)
    chat = pb.ChatRequest(messages=MESSAGES, sampling=sampling, options=options)
    failures = []
    calls: tuple[Any, ...] = (
        stub.Generate(generate, metadata=metadata),
        stub.Chat(chat, metadata=metadata),
        stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate), metadata=metadata),
        stub.ChatUnary(pb.ChatUnaryRequest(request=chat), metadata=metadata),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else drained(call))
        failures.append(failure.value)
    return failures


async def drained(call: Any) -> None:
    async for _ in call:
        pass


async def fail(attempt: Attempt) -> None:
    await attempt.scheduled()
    await attempt.tokens(0, [2 + ord("x")])
    await attempt.fail(grpc.StatusCode.INTERNAL, "crashed")


@pytest.mark.parametrize("in_options", [True, False])
@pytest.mark.parametrize(("temperature", "said"), [(9, "error invalid_argument"), (0, ": internal; ")])
@in_loop
async def test_grpc(
    model_dir: Path, temperature: float, said: str, *, in_options: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    async with stack(model_dir, fail) as made:
        sampling = pb.SamplingParams(temperature=temperature)
        for error in await ask_grpc(made, sampling, in_options=in_options):
            assert info_of(error) == ["mine"]
            assert dict(error.trailing_metadata())["x-request-id"] == "mine"
    found = lines(caplog)
    assert [said in line for line in found] == [True] * 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("in_body", [True, False])
@in_loop
async def test_http(model_dir: Path, *, in_body: bool, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router")
    body = {"prompt": "a", "stream": stream, "messages": [{"role": "user", "content": "a"}]}
    headers = {} if in_body else {"x-request-id": "mine"}
    if in_body:
        body["request_id"] = "mine"
    async with stack(model_dir, fail) as made:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await made.http.post(path, json={**body, "temperature": 9}, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
            assert lines(caplog) == ["request mine: error invalid_argument"]
            answer = await made.http.post(path, json=body, headers=headers)
            assert answer.headers["x-request-id"] == "mine"
            assert "crashed" in answer.text
            (line,) = lines(caplog)
            assert ": internal; " in line


@in_loop
async def test_over_connect(model_dir: Path) -> None:
    """Its errors carry it as a header too, as answers do."""
    async with stack(model_dir, fail) as made:
        path = "/octavo.v1.InferenceService/GenerateUnary"
        body = {"request": {"text": "a", "sampling": {"temperature": 9}, "options": {"requestId": "mine"}}}
        answer = await made.http.post(path, json=body)
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
