"""What a router counts: by hand under a clock of the test's own, and through both surfaces."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.errors import DeadlineExceeded, Exhausted
from router.metrics import RouterMetrics, abort_reason
from router.metrics_catalogue import CATALOGUE, DECODE, E2E, INTER_TOKEN, PREFILL, TPOT, TTFT
from router.streams.types import ReceiptParts
from tests.fakes.router_stack import MODEL, Stack, in_loop, stack
from tests.fakes.scheduler import Attempt, hang, speak
from tests.fakes.scraped import Scrape


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(metrics: RouterMetrics) -> Scrape:
    body, _ = metrics.set.render()
    return Scrape(body.decode())


async def scraped(made: Stack) -> Scrape:
    answer = await made.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return Scrape(answer.text)


def test_times_are_what_they_are_called() -> None:
    clock = Clock()
    metrics = RouterMetrics(clock=clock)
    metrics.begin("m", "", 7, 2)
    meter = metrics.sequence("m", "", 99.0)
    for seconds, count in ((1.0, 1), (0.5, 2), (0.25, 1)):
        clock.now += seconds
        meter.tokens(count)
    clock.now += 1.0
    meter.complete("stop", ReceiptParts(queue_s=3.0, first_queue_s=0.5, cached_tokens=4, num_attempts=2))
    sums = {
        metric: metrics.set.distribution(metric, "m").sum for metric in (TTFT, INTER_TOKEN, TPOT, E2E, PREFILL, DECODE)
    }
    assert sums == {TTFT: 2.0, INTER_TOKEN: 0.75, TPOT: 0.25, E2E: 3.75, PREFILL: 1.5, DECODE: 0.75}
    found = shown(metrics)
    assert found.of("octavo_inter_token_latency_seconds_count", model="m") == 2
    assert found.of("octavo_generation_tokens_total", model="m") == 4
    assert found.of("octavo_prompt_tokens_total", model="m") == 7
    assert found.of("octavo_prompt_tokens_cached_total", model="m") == 4
    assert found.of("octavo_request_params_n_sum", model="m") == 2
    assert found.of("octavo_request_attempts_total", model="m") == 2
    assert found.of("octavo_request_recoveries_total", model="m") == 1
    assert found.of("octavo_request_recovered_total", model="m") == 1
    assert found.of("octavo_request_success_total", model="m", finish_reason="stop") == 1
    assert "2 recoveries" not in metrics.totals()
    assert "1 requests, 7 prompt tokens, 4 generated tokens, 1 sequences complete" in metrics.totals()


def test_a_sequence_without_a_token_has_no_times_of_tokens() -> None:
    metrics = RouterMetrics(clock=Clock())
    metrics.sequence("m", "", 99.0).abort("deadline", ReceiptParts())
    found = shown(metrics)
    assert found.of("octavo_request_aborts_total", model="m", reason="deadline") == 1
    assert found.of("octavo_e2e_request_latency_seconds_count", model="m") == 1
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time"):
        assert found.of(f"octavo_{name}_seconds_count", model="m") == 0


def test_tenants_are_counted_only_when_asked() -> None:
    for by_tenant in (False, True):
        metrics = RouterMetrics(by_tenant=by_tenant, clock=Clock())
        metrics.begin("m", "alice", 3, 1)
        meter = metrics.sequence("m", "alice", 99.0)
        meter.tokens(2)
        meter.complete("length", ReceiptParts())
        found = shown(metrics)
        assert found.has("octavo_tenant_prompt_tokens_total", tenant="alice") is by_tenant
        assert found.has("octavo_tenant_generation_tokens_total", tenant="alice") is by_tenant


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (None, "client_gone"),
        (GeneratorExit(), "client_gone"),
        (DeadlineExceeded("late"), "deadline"),
        (Exhausted("full", 1.0), "exhausted"),
        (KeyError("a defect"), "internal"),
    ],
)
def test_what_ended_a_sequence_has_a_word(failure: BaseException | None, word: str) -> None:
    assert abort_reason(failure) == word


@in_loop
async def test_requests_of_both_surfaces_are_counted(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("hello")
        body = {"prompt": "abc", "n": 2, "max_tokens": 20}
        assert (await made.http.post("/v1/completions", json=body)).status_code == 200
        assert (await made.http.post("/v1/completions", json={**body, "n": 1, "stop": "ll"})).status_code == 200
        made.scheduler.behave = speak(made.ids("hello"))
        request = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=2))
        async for _ in pb_grpc.InferenceServiceStub(made.channel).Generate(request):
            pass
        found = await scraped(made)
    assert found.of("octavo_requests_total", model=MODEL) == 3
    assert found.of("octavo_prompt_tokens_total", model=MODEL) == 9
    assert found.of("octavo_generation_tokens_total", model=MODEL) == 5 + 5 + 4 + 2
    assert found.of("octavo_request_success_total", model=MODEL, finish_reason="stop") == 2
    assert found.of("octavo_request_success_total", model=MODEL, finish_reason="stop_string") == 1
    assert found.of("octavo_request_success_total", model=MODEL, finish_reason="length") == 1
    assert found.of("octavo_request_aborts_total", model=MODEL) == 1
    assert found.of("octavo_time_to_first_token_seconds_count", model=MODEL) == 4
    assert found.of("octavo_request_prefill_time_seconds_count", model=MODEL) >= 3
    assert found.of("octavo_inter_token_latency_seconds_count", model=MODEL) == 4 + 4 + 3 + 1
    assert found.of("octavo_router_requests_live") == 0
    assert found.of("octavo_router_ready") == 1
    assert found.of("octavo_router_scheduler_connected") == 1
    assert found.has("process_cpu_seconds_total")


@in_loop
async def test_refusals_and_failures_are_counted_once(model_dir: Path) -> None:
    async def refuse(attempt: Attempt) -> None:
        await attempt.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    async with stack(model_dir, refuse) as made:
        assert (await made.http.post("/v1/completions", json={"prompt": "a", "temperature": 9})).status_code == 400
        assert (await made.http.post("/v1/completions", json={"prompt": "a", "model": "x"})).status_code == 404
        assert (await made.http.post("/v1/completions", content=b"{")).status_code == 400
        assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 504
        assert (await made.http.post("/v1/completions", json={"prompt": "a", "stream": True})).status_code == 504
        stub = pb_grpc.InferenceServiceStub(made.channel)
        for request in (pb.GenerateRequest(text="a"), pb.GenerateRequest(text="a", model="x")):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        found = await scraped(made)
    assert found.of("octavo_request_refusals_total", reason="invalid_argument", code="400") == 2
    assert found.of("octavo_request_refusals_total", reason="not_found", code="404") == 2
    assert found.of("octavo_request_refusals_total", reason="deadline", code="504") == 3
    assert found.of("octavo_request_refusals_total") == 7
    assert found.of("octavo_request_aborts_total", reason="deadline") == 3
    assert not found.has("octavo_request_success_total")


@in_loop
async def test_a_stranger_is_counted_on_both_surfaces_and_scrapes_nothing(model_dir: Path) -> None:
    async with stack(model_dir, api_key="the-key") as made:
        assert (await made.http.get("/metrics")).status_code == 401
        with pytest.raises(grpc.aio.AioRpcError):
            await pb_grpc.InferenceServiceStub(made.channel).ListModels(pb.ListModelsRequest())
        answer = await made.http.get("/metrics", headers={"authorization": "Bearer the-key"})
    assert Scrape(answer.text).of("octavo_request_refusals_total", reason="unauthenticated", code="401") == 2


@in_loop
async def test_a_client_that_leaves_is_an_abort(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        body = {"prompt": "a", "stream": True}
        async with made.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                assert json.loads(line.removeprefix("data: "))["choices"]
                break
        await made.router.front.wait_idle()
        found = await scraped(made)
    assert found.of("octavo_request_aborts_total", reason="client_gone") == 1
    assert found.of("octavo_generation_tokens_total", model=MODEL) == 1
    assert not found.has("octavo_request_refusals_total")


@in_loop
async def test_a_recovery_shows(model_dir: Path) -> None:
    async def flaky(attempt: Attempt) -> None:
        if attempt.request.attempt == 1:
            await attempt.scheduled()
            await attempt.fail(grpc.StatusCode.ABORTED, "its replica died")
        await speak(made.ids("ok"))(attempt)

    async with stack(model_dir) as made:
        made.scheduler.behave = flaky
        assert (await made.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        found = await scraped(made)
    assert found.of("octavo_request_attempts_total", model=MODEL) == 2
    assert found.of("octavo_request_recovered_total", model=MODEL) == 1


def test_a_scrape_names_nothing_that_is_not_in_the_catalogue() -> None:
    metrics = RouterMetrics()
    metrics.begin("m", "", 1, 1)
    known = {name for metric in CATALOGUE for name in metric.sample_names}
    assert {name for name in shown(metrics).names if name.startswith("octavo_")} <= known
