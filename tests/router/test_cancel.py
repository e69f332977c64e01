"""A client that leaves takes its work with it, on both surfaces; a router that drains keeps what it has begun."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.client import AsyncClient, Unavailable
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.grpc_api import InferenceServicer
from router.metrics_catalogue import ABORTS, REFUSALS
from tests.fakes.router_stack import MODEL, Stack, in_loop, stack
from tests.fakes.scheduler import Attempt, hang, speak

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def until_cancelled(made: Stack, count: int = 1) -> None:
    await made.scheduler.until(lambda: len(made.scheduler.cancelled) == count)
    await made.router.front.wait_idle()


@in_loop
async def test_grpc_stream(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        call = pb_grpc.InferenceServiceStub(made.channel).Generate(pb.GenerateRequest(text="a"))
        async for response in call:
            assert response.delta.text == "x"
            break
        call.cancel()
        await until_cancelled(made)


@in_loop
async def test_grpc_unary(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        stub = pb_grpc.InferenceServiceStub(made.channel)
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")])
        call = stub.ChatUnary(pb.ChatUnaryRequest(request=request))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 1)
        call.cancel()
        await until_cancelled(made)


@in_loop
async def test_a_client_that_leaves_as_soon_as_it_has_asked(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        stub = pb_grpc.InferenceServiceStub(made.channel)
        for count in range(1, 60):
            call = stub.Generate(pb.GenerateRequest(text="a"))
            await made.scheduler.until(lambda count=count: len(made.scheduler.requests) == count)  # type: ignore[misc]
            call.cancel()
            await until_cancelled(made, count)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_http_stream(model_dir: Path, path: str) -> None:
    async with stack(model_dir, hang) as made:
        body = {**CHAT, "prompt": "a", "stream": True, "n": 2}
        async with made.http.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                assert line.startswith("data: ")
                break
        await until_cancelled(made, 2)


@in_loop
async def test_http_whole_answer(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:
        asked = asyncio.create_task(made.http.post("/v1/completions", json={"prompt": ["a", "b"]}))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 2)
        asked.cancel()
        await until_cancelled(made, 2)


@in_loop
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_defect(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(model_dir) as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"pro')
        await writer.drain()
        writer.close()
        while not made.router.metrics.set.total(REFUSALS):
            await made.http.get("/health")
        counted = made.router.metrics.set.number(REFUSALS, "cancelled", "499").value
        assert (counted, caplog.text.count("Traceback")) == (1, 0)


class DeadCall:
    """A call of gRPC whose client has left, and whose task has not been cancelled yet."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def time_remaining(self) -> None:
        """It has no deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        self._fail("send_initial_metadata")

    async def write(self, response: bytes) -> None:
        self._fail("write")

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self._fail("abort")

    def _fail(self, where: str) -> None:
        if where == self._fails_at:
            raise grpc.aio.InternalError("Failed grpc_call_start_batch")


@pytest.mark.parametrize("fails_at", ["send_initial_metadata", "write"])
@in_loop
async def test_an_answer_to_a_client_that_is_gone_is_no_defect(
    model_dir: Path, fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(model_dir, hang) as made:
        call: Any = DeadCall(fails_at)
        with pytest.raises(asyncio.CancelledError):
            await InferenceServicer(made.router.front).Generate(pb.GenerateRequest(text="a"), call)
        await made.router.front.wait_idle()
        num_begun = int(fails_at == "write")
        assert made.router.metrics.set.number(ABORTS, MODEL, "client_gone").value == num_begun
        assert (made.router.metrics.set.total(REFUSALS), caplog.text.count("Traceback")) == (0, 0)


@in_loop
async def test_a_refusal_of_a_client_that_is_gone_is_no_defect_either(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(model_dir) as made:
        call: Any = DeadCall("abort")
        with pytest.raises(asyncio.CancelledError):
            await InferenceServicer(made.router.front).Generate(pb.GenerateRequest(), call)
        assert caplog.text.count("Traceback") == 0


@in_loop
async def test_a_request_that_an_operator_ends_is_told_so(model_dir: Path) -> None:
    async def end(attempt: Attempt) -> None:
        await attempt.fail(grpc.StatusCode.FAILED_PRECONDITION, "the request was cancelled by an operator")

    async with stack(model_dir, end) as made:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            answer = await made.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (499, "cancelled")
            assert "by an operator" in answer.json()["error"]["message"]


@in_loop
async def test_a_stop_string_cancels_the_rest(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids("one, two, three")

        async def go_on(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, ids)
            await asyncio.get_running_loop().create_future()

        made.scheduler.behave = go_on
        async with AsyncClient(made.grpc_address) as client:
            result = await client.generate("x", stop=["three", ", t"], max_tokens=99)
        (choice,) = result.choices
        assert (choice.text, choice.finish_reason, choice.stop_string) == ("one", "stop", ", t")
        assert result.usage.completion_tokens == len("one, t")
        assert list(choice.token_ids) == ids[: len("one, t")]
        await until_cancelled(made)


@in_loop
async def test_an_answer_that_ends_by_itself_is_not_cancelled(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ended = asyncio.Event()

        async def slow_end(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, made.ids("hi"))
            await attempt.tokens(2, (), 1)
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            await attempt.finished(2)
            ended.set()

        made.scheduler.behave = slow_end
        assert (await made.http.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"] == "hi"
        await ended.wait()
        assert made.scheduler.cancelled == []


@in_loop
async def test_one_failed_choice_cancels_the_others(model_dir: Path) -> None:
    async with stack(model_dir) as made:

        async def one_fails(attempt: Attempt) -> None:
            if len(made.scheduler.requests) == 3:
                await attempt.fail(grpc.StatusCode.INTERNAL, "crashed a replica twice while alone there")
            await hang(attempt)

        made.scheduler.behave = one_fails
        answer = await made.http.post("/v1/completions", json={"prompt": "x", "n": 3})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "crashed a replica twice while alone there"
        await until_cancelled(made, 2)


@in_loop
async def test_a_drain_finishes_what_runs_and_refuses_what_is_new(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        go_on = asyncio.Event()

        async def patient(attempt: Attempt) -> None:
            await go_on.wait()
            await speak(made.ids("done"))(attempt)

        made.scheduler.behave = patient
        running = asyncio.create_task(made.http.post("/v1/completions", json={"prompt": "x"}))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 1)
        drained = asyncio.create_task(made.router.drain())
        await asyncio.sleep(0)
        ready = await made.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "this router is draining")
        assert (await made.http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        async with AsyncClient(made.grpc_address) as client:
            with pytest.raises(Unavailable, match="draining"):
                await client.generate("x")
        assert not drained.done()
        go_on.set()
        assert (await running).json()["choices"][0]["text"] == "done"
        await drained


@in_loop
async def test_f46_what_outlasts_the_drain_is_told_so_on_both_surfaces(model_dir: Path) -> None:
    body, hanging, all_hang = {"prompt": "x", "n": 2}, set(), asyncio.Event()

    async def behave(attempt: Attempt) -> None:
        await attempt.scheduled()
        await attempt.tokens(0, [2 + ord("x")])
        hanging.add(attempt.request.stream_key)
        if len(hanging) == 5:
            all_hang.set()
        await asyncio.get_running_loop().create_future()

    async with stack(model_dir, behave, drain_timeout=0.0) as made, AsyncClient(made.grpc_address) as client:
        whole = asyncio.create_task(made.http.post("/v1/completions", json=body))
        asked = asyncio.create_task(client.generate("x"))
        async with made.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
            lines = streamed.aiter_lines()
            assert "choices" in await anext(lines)
            await all_hang.wait()
            await made.router.drain()
            *_, error, done = [line async for line in lines if line]
        assert "--drain-timeout" in error
        assert done == "data: [DONE]"
        assert (await whole).status_code == 503
        with pytest.raises(Unavailable, match="--drain-timeout"):
            await asked
        await made.router.front.wait_idle()
