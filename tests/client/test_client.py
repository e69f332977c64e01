"""octavo.Client and octavo.AsyncClient against a real router over a fake scheduler."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Exhausted,
    InvalidArgument,
    NotFound,
    Result,
    Unavailable,
)
from tests.fakes.router_stack import CONTEXT, MODEL, in_loop, stack
from tests.fakes.scheduler import Attempt, hang

MESSAGES = [{"role": "user", "content": "hi"}]


@in_loop
async def test_a_complete_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        made.say("Hello 🌶")
        result = await client.chat(MESSAGES, temperature=0.5, seed=7)
        assert result.text == "Hello 🌶"
        (choice,) = result.choices
        assert (choice.finish_reason, choice.stop_string, choice.stop_token_id) == ("stop", None, None)
        assert list(choice.token_ids) == made.ids("Hello 🌶")
        assert (choice.receipt.replica, choice.receipt.attempts, choice.receipt.seed) == ("replica-1", 1, 7)
        assert choice.receipt.batch_invariant
        assert result.usage.completion_tokens == len(made.ids("Hello 🌶")) + 1
        assert result.model == MODEL


@in_loop
async def test_a_stream_gives_the_same_as_the_whole_answer(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        made.say("Grüße 🌶", chunk=2)
        whole = await client.generate("Answer:", max_tokens=40, logprobs=2, seed=1, request_id="r-1")
        stream = await client.generate("Answer:", max_tokens=40, logprobs=2, seed=1, request_id="r-1", stream=True)
        with pytest.raises(ValueError, match="not ended"):
            _ = stream.result
        deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == "Grüße 🌶"
        positions = [delta.start_index for delta in deltas]
        assert positions == sorted(positions)
        assert without_times(stream.result) == without_times(whole)
        assert whole.request_id == "r-1"
        assert b"".join(token.raw for token in whole.choices[0].logprobs) == "Grüße 🌶".encode()
        assert [len(token.top) for token in whole.choices[0].logprobs] == [2] * len(whole.choices[0].token_ids)


def without_times(result: Result) -> tuple[object, ...]:
    return (result.text, result.usage, result.choices[0].token_ids, result.choices[0].logprobs, result.request_id)


@in_loop
async def test_n_choices_have_seeds_of_their_own(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        made.say("a")
        result = await client.generate([5, 6], n=3, seed=-3)
        assert [choice.index for choice in result.choices] == [0, 1, 2]
        seeds = {request.sampling.seed for request in made.scheduler.requests}
        assert len(seeds) == 3
        assert (-3) % 2**64 in seeds
        assert len({request.group_id for request in made.scheduler.requests}) == 1
        assert {request.group_size for request in made.scheduler.requests} == {3}
        assert result.choices[0].receipt.seed == -3
        assert result.usage.completion_tokens == 6


@in_loop
async def test_the_blocking_client(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        made.say("one two")

        def talk() -> None:
            with Client(made.grpc_address, model=MODEL) as client:
                assert client.generate("x").text == "one two"
                stream = client.chat(MESSAGES, stream=True)
                assert "".join(delta.text for delta in stream) == "one two"
                assert stream.result.text == "one two"
                (model,) = client.models()
                assert (model.name, model.ready, model.max_model_len) == (MODEL, True, CONTEXT)
                with pytest.raises(InvalidArgument):
                    client.generate("x", top_p=0.0)

        await asyncio.to_thread(talk)


@in_loop
async def test_leaving_a_stream_early_cancels_the_work(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made:

        def talk() -> None:
            with Client(made.grpc_address) as client:
                for delta in client.generate("x", stream=True):
                    assert delta.text == "x"
                    break

        await asyncio.to_thread(talk)
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)


@in_loop
async def test_a_stream_outlives_the_name_of_its_client(model_dir: Path) -> None:
    def first() -> str:
        return next(iter(Client(made.grpc_address).generate("x", stream=True))).text

    async with stack(model_dir, hang) as made:
        assert await asyncio.to_thread(first) == "x"


@in_loop
@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_stream_that_waits_is_ended_from_another_thread(model_dir: Path, end: str) -> None:
    async with stack(model_dir, hang) as made:
        with Client(made.grpc_address) as client, client.generate("x", stream=True) as deltas:
            reader = asyncio.create_task(asyncio.to_thread(list, deltas))
            await made.scheduler.until(lambda: len(made.scheduler.requests) == 1)
            await asyncio.to_thread(deltas.cancel if end == "cancel" else client.close)
            with pytest.raises(Cancelled):
                await reader
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)


@in_loop
async def test_errors_have_names_and_fields(model_dir: Path) -> None:
    async with stack(model_dir) as made, AsyncClient(made.grpc_address) as client:
        with pytest.raises(InvalidArgument, match=r"temperature.*3") as refused:
            await client.generate("x", temperature=3.0)
        assert refused.value.field == "temperature"
        with pytest.raises(TypeError, match="heat"):
            await client.generate("x", heat=1)  # type: ignore[call-overload]
        async with AsyncClient(made.grpc_address, model="other") as stranger:
            with pytest.raises(NotFound, match="other"):
                await stranger.generate("x")


@in_loop
async def test_a_full_queue_says_when_to_try_again(model_dir: Path) -> None:
    import grpc
    from google.rpc import error_details_pb2

    async def refuse(attempt: Attempt) -> None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(2500)
        await attempt.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue holds 9 of 9 sequences", retry)

    async with stack(model_dir, refuse) as made, AsyncClient(made.grpc_address) as client:
        with pytest.raises(Exhausted, match="9 of 9") as refused:
            await client.generate("x")
        assert refused.value.retry_after_s == 2.5
        answer = await made.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3", "whole seconds, none too few"


@in_loop
async def test_a_time_limit_ends_the_work_too(model_dir: Path) -> None:
    async with stack(model_dir, hang) as made, AsyncClient(made.grpc_address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x", timeout_s=0.2)
        await made.scheduler.until(lambda: len(made.scheduler.cancelled) == 1)
        # gRPC tells a timeout in three digits, rounded up.
        assert 0 < made.scheduler.requests[0].deadline_ns <= 1.01 * 200_000_000


@in_loop
async def test_no_server(model_dir: Path) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models()


def test_the_names_are_there_without_loading_grpc_first() -> None:
    assert octavo.Client is Client
    code = "import octavo, sys; assert 'grpc' not in sys.modules; octavo.Client; assert 'grpc' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_client_needs_grpc_and_protobuf_alone() -> None:
    code = (
        "import sys, octavo.client\n"
        "bad = [m for m in ('google.rpc', 'numpy', 'fastapi', 'zmq', 'tokenizers', 'router') if m in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
