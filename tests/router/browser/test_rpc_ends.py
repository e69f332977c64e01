"""Calls over Connect and gRPC-Web that end early: deadlines, clients that leave, slow readers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.v1 import inference_pb2 as pb
from router.browser import call as calls
from tests.fakes.router_stack import Stack, in_loop, stack
from tests.fakes.scheduler import hang
from tests.fakes.web_rpc import Form, call, frames
from tests.fakes.web_rpc import stream as open_stream

CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
UNARY = pb.ChatUnaryRequest(request=CHAT)
KINDS: list[tuple[str, Any]] = [("Chat", CHAT), ("ChatUnary", UNARY)]


async def until_free(made: Stack) -> None:
    """Until the scheduler has seen every call cancelled and nothing is live in the router."""
    await made.router.front.wait_idle()
    await made.scheduler.until(lambda: len(made.scheduler.cancelled) == len(made.scheduler.requests))


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_deadlines_end_calls_and_free_what_they_held(model_dir: Path, form: Form) -> None:
    async with stack(model_dir, hang) as made:
        for method, request in KINDS:
            before, timeout_ms = len(made.scheduler.requests), 100
            while len(made.scheduler.requests) == before:  # on a busy machine a short one ends before there is work
                timeout_ms *= 2
                ended = await call(made.http, form, method, request, form.timeout_header(timeout_ms))
                assert ended.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
                await until_free(made)


@in_loop
async def test_the_scheduler_learns_the_deadline(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        for form in Form:
            made.scheduler.requests.clear()
            assert (await call(made.http, form, "Chat", CHAT)).code == 0
            assert (await call(made.http, form, "Chat", CHAT, form.timeout_header(90_000))).code == 0
            without, with_one = made.scheduler.requests
            assert not without.HasField("deadline_ns")
            assert 30e9 < with_one.deadline_ns <= 90e9


@in_loop
async def test_bad_deadlines_are_refused(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for form in Form:
            (name,) = form.timeout_header(1)
            for bad in ("soon", "-5", "1" * 30, "1_0m", "٣"):
                headers: Any = {name: bad.encode()}
                ended = await call(made.http, form, "ListModels", pb.ListModelsRequest(), headers)
                assert ended.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (form, bad)


@pytest.mark.parametrize("form", Form)
@in_loop
async def test_a_client_that_leaves_takes_its_work_with_it(model_dir: Path, form: Form) -> None:
    async with stack(model_dir, hang) as made:
        async with open_stream(made.http, form, "Chat", CHAT) as response:
            async for flags, _ in frames(form, response):
                assert flags == 0
                break
        await until_free(made)
        asked = asyncio.create_task(call(made.http, form, "ChatUnary", UNARY))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 2)
        asked.cancel()
        await until_free(made)


@in_loop
async def test_a_slow_reader_holds_up_its_own_call() -> None:
    written: list[int] = []

    async def write_on(request: Any, context: Any) -> None:
        for count in range(10 * calls.MOST_WAITING_MESSAGES):
            await context.write(pb.ChatResponse(request_id=str(count)))
            written.append(count)

    context: Any = None
    reading: Any = calls.stream(write_on, CHAT, context)
    assert (await anext(reading)).request_id == "0"
    for _ in range(100):  # turns of the loop in which the call could go on
        await asyncio.sleep(0)
    assert len(written) <= calls.MOST_WAITING_MESSAGES + 1
    rest = [int(message.request_id) async for message in reading]
    assert rest == list(range(1, 10 * calls.MOST_WAITING_MESSAGES))


@in_loop
async def test_a_closed_stream_has_ended_its_call() -> None:
    ended = []

    async def hold(request: Any, context: Any) -> None:
        try:
            await context.write(pb.ChatResponse())
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    context: Any = None
    reading: Any = calls.stream(hold, CHAT, context)
    await anext(reading)
    await reading.aclose()
    assert ended == [True]
