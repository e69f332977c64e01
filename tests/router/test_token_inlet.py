"""The token socket: what parses is dispatched by key, what does not is dropped and counted."""

from __future__ import annotations

import asyncio
import re
import select
from pathlib import Path

import pytest
import zmq

from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.process import StartError
from router.streams.token_inlet import MalformedBatch, StreamKeys, TokenInlet, read_batch
from router.streams.types import Finish, PromptDelta, TokenDelta, TokenLogprob
from tests.fakes.router_stack import in_loop


def make_batch(**changes: object) -> worker_pb2.TokenBatch:
    values: dict[str, object] = {
        "stream_keys": [1, 2],
        "attempts": [1, 3],
        "positions": [0, 7],
        "num_tokens": [2, 0],
        "token_ids": [10, 11],
        "finish_reasons": [0, types_pb2.FINISH_REASON_STOP_TOKEN],
        "final_token_ids": [0, 99],
    }
    return worker_pb2.TokenBatch(**{**values, **changes})  # type: ignore[arg-type]


def test_a_batch_becomes_deltas_with_prompt_logprobs_first() -> None:
    batch = make_batch(
        logprobs=[worker_pb2.OutputLogprobs(index=0, sampled=[-1, -2], num_top=1, top_token_ids=[5, 6], top=[-3, -4])],
        prompt_logprobs=[worker_pb2.PromptLogprobs(stream_key=2, attempt=3, start=1, tokens=[-7])],
    )
    prompt, first, second = read_batch(batch.SerializeToString())
    assert prompt == PromptDelta(2, 3, 1, (TokenLogprob(None, -7.0),))
    logprobs = (TokenLogprob(10, -1.0, ((5, -3.0),)), TokenLogprob(11, -2.0, ((6, -4.0),)))
    assert first == TokenDelta(1, 1, 0, (10, 11), logprobs, None, None)
    assert second == TokenDelta(2, 3, 7, (), None, Finish.STOP_TOKEN, 99)


def test_deltas_say_where_their_sequences_entered() -> None:
    deltas = read_batch(make_batch(entry_positions=[0, 4]).SerializeToString())
    assert [delta.entry_position for delta in deltas if isinstance(delta, TokenDelta)] == [0, 4]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff garbage",
        make_batch(attempts=[1]).SerializeToString(),
        make_batch(num_tokens=[2, 1]).SerializeToString(),
        make_batch(final_token_ids=[]).SerializeToString(),
        make_batch(entry_positions=[0]).SerializeToString(),
        make_batch(logprobs=[worker_pb2.OutputLogprobs(index=0, sampled=[-1])]).SerializeToString(),
        make_batch(
            logprobs=[worker_pb2.OutputLogprobs(index=0, sampled=[-1, -2], num_top=2, top_token_ids=[1], top=[-1])]
        ).SerializeToString(),
        make_batch(
            prompt_logprobs=[worker_pb2.PromptLogprobs(stream_key=2, tokens=[-7], num_top=1)]
        ).SerializeToString(),
    ],
)
def test_a_batch_that_disagrees_with_itself_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedBatch):
        list(read_batch(data))


@in_loop
async def test_dispatch_by_key_over_ipc(tmp_path: Path) -> None:
    inlet = TokenInlet(f"ipc://{tmp_path}/tokens")
    assert inlet.endpoint == f"ipc://{tmp_path}/tokens"
    seen: list[TokenDelta | PromptDelta] = []
    inlet.register(2, seen.append)
    inlet.take([b"garbage \xff"])
    inlet.take([make_batch().SerializeToString()])
    inlet.take([make_batch(attempts=[1]).SerializeToString()])
    inlet.unregister(2)
    inlet.take([make_batch().SerializeToString()])
    assert [delta.stream_key for delta in seen] == [2]
    assert inlet.num_dropped_messages == 2
    inlet.close()


@in_loop
async def test_every_message_that_waits_is_taken_and_a_defect_ends_the_inlet(tmp_path: Path) -> None:
    inlet = TokenInlet(f"ipc://{tmp_path}/tokens")
    seen: asyncio.Queue[TokenDelta | PromptDelta] = asyncio.Queue()
    inlet.register(2, seen.put_nowait)

    def defective(delta: TokenDelta | PromptDelta) -> None:
        raise KeyError("a defect")

    with zmq.Context() as context, context.socket(zmq.PUSH) as worker:
        worker.connect(inlet.endpoint)
        for position in range(3):  # before anybody reads, so that they wait together
            worker.send(make_batch(positions=[0, position]).SerializeToString())
        running = asyncio.create_task(inlet.run())
        async with asyncio.timeout(30):
            for position in range(3, 6):
                worker.send(make_batch(positions=[0, position]).SerializeToString())
            found = [await seen.get() for _ in range(6)]
            assert [delta.position for delta in found if isinstance(delta, TokenDelta)] == list(range(6))
            inlet.register(1, defective)
            worker.send(make_batch().SerializeToString())
            with pytest.raises(ExceptionGroup) as caught:
                await running
    assert caught.group_contains(KeyError)
    inlet.close()


@in_loop
async def test_a_flood_takes_one_turn_of_the_loop_a_message(tmp_path: Path) -> None:
    """Also where another worker begins in its midst: ZeroMQ, busy, leaves the descriptor readable for many messages."""
    inlet = TokenInlet(f"ipc://{tmp_path}/tokens")
    message = make_batch().SerializeToString()
    num_taken, most_in_a_turn = 0, 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as flooding, context.socket(zmq.PUSH) as late:
        flooding.connect(inlet.endpoint)
        for _ in range(80):
            flooding.send(message)

        def count(delta: TokenDelta | PromptDelta) -> None:
            nonlocal num_taken
            num_taken += 1
            if num_taken == 2:
                late.connect(inlet.endpoint)
                late.send(message)
                assert select.select([inlet._socket.fileno()], [], [], 30)[0]

        inlet.register(2, count)
        running = asyncio.create_task(inlet.run())
        async with asyncio.timeout(60):
            while num_taken < 81:
                before = num_taken
                await asyncio.sleep(0)
                most_in_a_turn = max(most_in_a_turn, num_taken - before)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert most_in_a_turn == 1
    inlet.close()


@in_loop
async def test_an_endpoint_that_cannot_be_bound_says_so() -> None:
    first = TokenInlet("tcp://127.0.0.1:0")
    with pytest.raises(StartError, match="--token-listen"):
        TokenInlet(first.endpoint)
    with pytest.raises(StartError, match="--token-advertise"):
        TokenInlet("tcp://0.0.0.0:0")
    wide = TokenInlet("tcp://0.0.0.0:0", "tcp://10.0.0.1:5")
    assert wide.endpoint == "tcp://10.0.0.1:5"
    wide.close()
    wide = TokenInlet("tcp://*:0", "tcp://10.0.0.1:*")
    assert re.fullmatch(r"tcp://10\.0\.0\.1:[1-9]\d+", wide.endpoint)
    wide.close()
    first.close()


def test_keys_of_two_starts_are_far_apart() -> None:
    first, second = StreamKeys(), StreamKeys()
    keys = {source.draw() for source in (first, second) for _ in range(100)}
    assert len(keys) == 200
    assert all(0 <= key < 2**64 for key in keys)
