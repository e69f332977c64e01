"""A router's spans, as a collector gets them."""

from __future__ import annotations

from pathlib import Path

import grpc

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.router_stack import MODEL, in_loop, stack
from tests.fakes.scheduler import Attempt, speak
from tests.fakes.trace_collector import collecting

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@in_loop
async def test_a_request_of_each_surface_joins_its_callers_trace(model_dir: Path) -> None:
    named: list[str] = []

    async def behave(attempt: Attempt) -> None:
        named.extend(value for key, value in attempt.context.invocation_metadata() if key == "traceparent")
        if attempt.request.attempt == 1:
            await attempt.scheduled()
            await attempt.fail(grpc.StatusCode.ABORTED, "its replica died")
        await attempt.scheduled(cached_tokens=1)
        await speak([2 + ord("o"), 2 + ord("k")])(attempt)

    with collecting() as collector:
        async with stack(model_dir, behave, otlp_endpoint=collector.endpoint) as made:
            body = {"prompt": "secret prompt"}
            headers = {"traceparent": PARENT, "x-request-id": "mine"}
            assert (await made.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            stub = pb_grpc.InferenceServiceStub(made.channel)
            unary = pb.GenerateUnaryRequest(request=pb.GenerateRequest(text="secret prompt"))
            await stub.GenerateUnary(unary, metadata=(("traceparent", PARENT),))
            assert (await made.http.post("/v1/completions", json=body)).status_code == 200
        requests, attempts = collector.named("octavo.request"), collector.named("octavo.attempt")
        everything = repr(collector.spans)
    first, second, third = requests
    assert (first.trace_id, first.parent_id) == (second.trace_id, second.parent_id) == (TRACE_ID, SPAN_ID)
    assert third.trace_id != TRACE_ID
    assert third.parent_id == ""
    assert first.service == "octavo-router"
    assert first.attributes["octavo.request_id"] == "mine"
    assert first.attributes["gen_ai.request.model"] == MODEL
    assert first.attributes["gen_ai.usage.output_tokens"] == 2
    assert first.attributes["octavo.num_attempts"] == 2
    assert first.attributes["octavo.replica"] == "replica-1"
    own = sorted((span for span in attempts if span.parent_id == first.span_id), key=lambda span: span.start_ns)
    assert [(span.attributes["octavo.attempt"], span.is_error) for span in own] == [(1, True), (2, False)]
    assert named[:2] == [f"00-{TRACE_ID}-{span.span_id}-01" for span in own]
    assert len(named) == 6
    assert "secret" not in everything


@in_loop
async def test_what_is_not_sampled_is_not_sent_and_says_so_to_the_scheduler(model_dir: Path) -> None:
    named: list[str] = []

    async def behave(attempt: Attempt) -> None:
        named.extend(value for key, value in attempt.context.invocation_metadata() if key == "traceparent")
        await speak([])(attempt)

    with collecting() as collector:
        async with stack(model_dir, behave, otlp_endpoint=collector.endpoint, otlp_sampling_ratio=0.0) as made:
            assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert collector.spans == []
    assert [int(each[-2:], 16) & 1 for each in named] == [0]


@in_loop
async def test_a_request_that_fails_says_how(model_dir: Path) -> None:
    async def refuse(attempt: Attempt) -> None:
        await attempt.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    with collecting() as collector:
        async with stack(model_dir, refuse, otlp_endpoint=collector.endpoint) as made:
            assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 429
        (request,) = collector.named("octavo.request")
        (attempt,) = collector.named("octavo.attempt")
    assert request.is_error
    assert attempt.is_error
