"""The gRPC surface: events in order, statuses with details, health, reflection, models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.grpc_api import ACCEPTED_PING_INTERVAL_S, SERVICE_NAME
from tests.fakes.router_stack import CONTEXT, MODEL, Stack, in_loop, stack
from tests.fakes.scheduler import Attempt, speak


def stub(made: Stack) -> Any:
    return pb_grpc.InferenceServiceStub(made.channel)


def chat(text: str = "hi", **more: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=text)], **more)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """(code, message, field) of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if hasattr(call, "read") else call)
    field = ""
    metadata: Any = refused.value.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == refused.value.code().value[0]
            bad = error_details_pb2.BadRequest()
            if status.details and status.details[0].Unpack(bad):
                field = bad.field_violations[0].field
    return refused.value.code(), refused.value.details() or "", field


@in_loop
async def test_events_come_in_order(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("héllo")
        request = pb.GenerateRequest(
            text="abc",
            sampling=pb.SamplingParams(n=2, max_tokens=20),
            output=pb.OutputOptions(prompt_logprobs=1),
            options=pb.RequestOptions(request_id="mine/../1"),
        )
        responses = [response async for response in stub(made).Generate(request)]
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds.count("usage") == 1
        assert kinds[-1] == "usage"
        assert kinds.count("finished") == 2
        assert {(response.request_id, response.model) for response in responses} == {("mine..1", MODEL)}
        first = next(i for i, r in enumerate(responses) if r.WhichOneof("event") == "delta" and r.delta.index == 0)
        assert all(kind != "prompt_logprobs" for kind in kinds[first:])
        for index in (0, 1):
            own = [r for r in responses if r.delta.index == index and r.WhichOneof("event") == "delta"]
            assert "".join(r.delta.text for r in own) == "héllo"
            assert [i for r in own for i in r.delta.token_ids] == made.ids("héllo")
            ends = [i for i, r in enumerate(responses) if r.HasField("finished") and r.finished.index == index]
            assert ends[0] > responses.index(own[-1])
        assert responses[-1].usage.completion_tokens == 2 * (len(made.ids("héllo")) + 1)


@in_loop
async def test_both_forms_of_both_methods_agree(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("same")
        for whole, stream in (
            (
                stub(made).GenerateUnary(pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="a"))),
                stub(made).Generate(pb.GenerateRequest(text="a")),
            ),
            (stub(made).ChatUnary(pb.ChatUnaryRequest(request=chat())), stub(made).Chat(chat())),
        ):
            answer = await whole
            text = "".join([response.delta.text async for response in stream])
            assert answer.choices[0].content.text == text == "same"
            assert answer.choices[0].finished.finish_reason == pb.FINISH_REASON_STOP


@in_loop
async def test_refusals_name_the_field(model_dir: Path) -> None:
    cases: list[tuple[pb.GenerateRequest, str]] = [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 4294967295])), "prompt[1]"),
        (pb.GenerateRequest(text="a", resume=b"token"), "resume"),
        (pb.GenerateRequest(text="a", options=pb.RequestOptions(adapter="x")), "adapter"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=-1)), "temperature"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=0)), "max_tokens"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=CONTEXT)), "max_tokens"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=["x", ""])), "stop[1]"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop_token_ids=[-1])), "stop_token_ids[0]"),
        (pb.GenerateRequest(text="a", output=pb.OutputOptions(logprobs=21)), "logprobs"),
    ]
    async with stack(model_dir) as made:
        for request, expected in cases:
            code, message, field = await refusal(stub(made).Generate(request))
            assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, expected), request
            assert message.startswith(expected)
        unary = stub(made).ChatUnary(pb.ChatUnaryRequest(request=pb.ChatRequest()))
        assert (await refusal(unary))[2] == "messages"
        code, message, _ = await refusal(stub(made).Generate(pb.GenerateRequest(text="a", model="no")))
        assert (code, MODEL in message) == (grpc.StatusCode.NOT_FOUND, True)
        assert made.scheduler.requests == []


@in_loop
async def test_f32_bytes_that_are_no_message_are_the_clients_mistake(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(model_dir) as made:
        not_utf8 = pb.GenerateRequest(text="aXb").SerializeToString().replace(b"X", b"\xff")
        channel: Any = made.channel
        for call in (
            channel.unary_stream(f"/{SERVICE_NAME}/Generate")(not_utf8),
            channel.unary_unary(f"/{SERVICE_NAME}/GenerateUnary")(b"\xff\xff\xff"),
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff\xff"),
        ):
            assert (await refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text
        made.say("ok")
        assert (await stub(made).ChatUnary(pb.ChatUnaryRequest(request=chat()))).choices[0].content.text == "ok"


@in_loop
async def test_a_message_over_the_limit_is_refused(model_dir: Path) -> None:
    async with stack(model_dir, max_message_bytes=2**16) as made:
        code, _, _ = await refusal(stub(made).Generate(pb.GenerateRequest(text="a" * 2**17)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_loop
async def test_final_statuses_of_the_scheduler_reach_the_client(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for sent, seen in (
            (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
            (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
            (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
            (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
            (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED),  # an operator's word
        ):

            async def fail(attempt: Attempt, code: grpc.StatusCode = sent) -> None:
                await attempt.fail(code, "Traceback: secret")

            made.scheduler.behave = fail
            code, message, _ = await refusal(stub(made).Generate(pb.GenerateRequest(text="a")))
            assert code is seen
            assert ("secret" in message) is (sent is not grpc.StatusCode.UNKNOWN)


@in_loop
async def test_queue_positions_are_events_where_asked_for(model_dir: Path) -> None:
    from octavo.internal.v1 import scheduler_pb2

    async with stack(model_dir) as made:
        # Tokens come by another way than events and may overtake them: the client's sight of the event lets them go.
        seen = asyncio.Event()

        async def wait(attempt: Attempt) -> None:
            if attempt.request.queue_events:
                await attempt.event(queued=scheduler_pb2.Queued(position=3, eta_ns=1_500_000_000))
                await seen.wait()
            await speak(made.ids("ok"))(attempt)

        made.scheduler.behave = wait
        request = pb.GenerateRequest(text="a", options=pb.RequestOptions(queue_events=True))
        responses = []
        async for response in stub(made).Generate(request):
            responses.append(response)
            seen.set()
        assert (responses[0].queued.position, responses[0].queued.eta_seconds) == (3, 1.5)
        assert [response.HasField("queued") for response in responses[1:]] == [False] * len(responses[1:])


@in_loop
async def test_f44_health_follows_readiness(model_dir: Path) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with stack(model_dir) as made:
        health: Any = health_pb2_grpc.HealthStub(made.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen = [response.status async for response in _until(watch, serving)]
        made.scheduler.num_ready_replicas = 0
        made.scheduler.announce()
        seen += [response.status async for response in _until(watch, not_serving)]
        assert seen[-1] == not_serving
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == not_serving
        listed = await health.List(health_pb2.HealthListRequest())
        assert {name: one.status for name, one in listed.statuses.items()} == dict.fromkeys(
            ("", SERVICE_NAME), not_serving
        )
        watch.cancel()


async def _until(watch: Any, status: int) -> Any:
    async for response in watch:
        yield response
        if response.status == status:
            return


@in_loop
async def test_reflection_lists_the_services(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(made.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        names: set[str] = set()
        async for response in reflection.ServerReflectionInfo(iter(asked)):
            names |= {service.name for service in response.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


@in_loop
async def test_models(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        (model,) = (await stub(made).ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.ready) == (MODEL, CONTEXT, True)
        assert model.vocab_size == made.tokenizer.vocab_size


@in_loop
async def test_f48_frequent_pings_during_silence_are_no_offence(model_dir: Path) -> None:
    """HTTP/2 by hand, for client libraries space pings out: all are answered, none is answered by GOAWAY."""
    settings, ping, goaway = 4, 6, 7
    async with stack(model_dir) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.grpc_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(settings, b""))
        for count in range(10):
            writer.write(_frame(ping, count.to_bytes(8, "big")))
        acknowledged = 0
        while acknowledged < 10:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            assert head[3] != goaway
            acknowledged += head[3] == ping and head[4] == 1
        writer.close()
        assert ACCEPTED_PING_INTERVAL_S < 10


@in_loop
async def test_f48_a_call_outlasts_any_silence_whose_pings_go_on(model_dir: Path) -> None:
    """A call by hand: nine pings, those of ninety seconds, before its first token; then the answer, and its end."""
    headers, data, ping, goaway = 1, 0, 6, 7
    may_speak = asyncio.Event()
    async with stack(model_dir) as made:

        async def wait(attempt: Attempt) -> None:
            await may_speak.wait()
            await speak(made.ids("ok"))(attempt)

        made.scheduler.behave = wait
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.grpc_port)
        writer.write(_call(pb.GenerateRequest(text="a")))
        num_pings, acknowledged, body, is_over = 9, 0, b"", False
        for count in range(num_pings):
            writer.write(_frame(ping, count.to_bytes(8, "big")))
        while not is_over:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            assert kind != goaway, payload
            acknowledged += kind == ping and flags == 1
            if acknowledged == num_pings:
                may_speak.set()
            body += payload if kind == data else b""
            is_over = kind == headers and flags & 1 == 1
        writer.close()
    assert b"o" in body
    assert acknowledged == num_pings


@in_loop
async def test_a_deadline_may_lie_millennia_ahead(model_dir: Path) -> None:
    """A call by hand with the longest timeout that gRPC can say, which some clients send that mean none."""
    headers, end_of_stream = 1, 1
    async with stack(model_dir) as made:
        made.say("ok")
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.grpc_port)
        writer.write(_call(pb.GenerateRequest(text="a"), **{"grpc-timeout": "99999999H"}))
        is_over = False
        while not is_over:
            head = await reader.readexactly(9)
            trailers = await reader.readexactly(int.from_bytes(head[:3], "big"))
            is_over = head[3] == headers and head[4] & end_of_stream == end_of_stream
        writer.close()
        assert _text("grpc-status") + _text("0") in trailers
        (request,) = made.scheduler.requests
        assert 3e9 < request.deadline_ns / 1e9 < 1e10, "a century will do"


def _call(request: pb.GenerateRequest, **more: str) -> bytes:
    """What a connection with one call of Generate begins with, by hand; `more` is its metadata."""
    settings, headers, data = 4, 1, 0
    named = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE_NAME}/Generate",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        **more,
    }
    fields = b"".join(b"\0" + _text(name) + _text(value) for name, value in named.items())
    message = request.SerializeToString()
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(settings, b"")
        + _frame(headers, fields, flags=4, stream=1)
        + _frame(data, b"\0" + len(message).to_bytes(4, "big") + message, flags=1, stream=1)
    )


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A short literal of HPACK, as it is."""
    return bytes([len(text)]) + text.encode()
