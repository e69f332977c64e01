"""Whatever breaks below the router, the client's text is whole: replicas, tokens and schedulers lost mid-stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from octavo.client import AsyncClient
from octavo.internal.v1 import scheduler_pb2 as pb
from tests.fakes.router_stack import Stack, in_loop, stack
from tests.fakes.scheduler import Attempt, Behaviour, FakeScheduler, speak

TEXT = "every token once"


def first_then(made: Stack, first: Behaviour, then: Behaviour) -> None:
    """The first attempt goes one way, later ones another."""

    async def behave(attempt: Attempt) -> None:
        await (first if attempt.request.attempt == 1 else then)(attempt)

    made.scheduler.behave = behave


async def ask(made: Stack) -> int:
    async with AsyncClient(made.grpc_address) as client:
        result = await client.generate("x", max_tokens=99)
    assert result.text == TEXT
    assert result.usage.completion_tokens == len(made.ids(TEXT)) + 1
    return result.choices[0].receipt.attempts


@in_loop
async def test_a_lost_replica_is_invisible(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def die(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, ids[:4])
            # What the router has when it hears of the death is up to the two paths; it says so itself.
            await attempt.fail(grpc.StatusCode.ABORTED, "gone", pb.ReplicaLost(replica="replica-1", rows_in_step=4))

        first_then(made, die, speak(ids))
        assert await ask(made) == 2
        again = made.scheduler.requests[1]
        assert list(again.prior_token_ids) == ids[: len(again.prior_token_ids)]
        assert list(again.crash_group_sizes) == [4]
        assert again.stream_key == made.scheduler.requests[0].stream_key
        assert again.sampling.seed == made.scheduler.requests[0].sampling.seed
        assert again.age_ns > 0


@in_loop
async def test_a_lost_batch_is_noticed_by_the_next_one(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def lose(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, ids[:4])
            await attempt.tokens(6, ids[6:8])
            await made.scheduler.until(lambda: len(made.scheduler.requests) == 2)
            await attempt.tokens(4, ids[4:6])  # too late: another attempt is on

        first_then(made, lose, speak(ids))
        assert await ask(made) == 2
        assert list(made.scheduler.requests[1].prior_token_ids) == ids[:4]


@in_loop
async def test_repeated_and_foreign_batches_change_nothing(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def stutter(attempt: Attempt) -> None:
            await attempt.scheduled()
            for position in range(len(ids)):
                await attempt.tokens(position, ids[position : position + 1])
                await attempt.tokens(max(0, position - 2), ids[max(0, position - 2) : position + 1])
                await attempt.tokens(position + 5, ids[:3], attempt=7)
                await made.scheduler.send_raw(1, b"\x80\x04\x95 a pickle")
                await made.scheduler.send_raw(1, b"two", b"frames")
                await made.scheduler.send_raw(1, b"")
            await attempt.tokens(len(ids), (), 1)
            await attempt.finished(len(ids))

        made.scheduler.behave = stutter
        assert await ask(made) == 1
        assert made.router.inlet.num_dropped_messages >= 2 * len(ids)


@in_loop
async def test_tokens_before_any_event_and_events_before_any_token(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def events_last(attempt: Attempt) -> None:
            await attempt.tokens(0, ids)
            await attempt.tokens(len(ids), (), 1)
            await attempt.scheduled()
            await attempt.finished(len(ids))

        async def events_first(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.finished(len(ids))
            await attempt.tokens(0, ids)

        for behave in (events_last, events_first):
            made.scheduler.behave = behave
            assert await ask(made) == 1


@in_loop
async def test_a_scheduler_that_restarts_is_waited_for(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)
        old = made.scheduler

        async def half(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.tokens(0, ids[:5])
            half_way.set()
            await asyncio.get_running_loop().create_future()

        async def restart() -> None:
            await half_way.wait()
            await old.stop()
            await new.start(made.scheduler_port)

        half_way = asyncio.Event()
        new = FakeScheduler(old.info, speak(ids))
        old.behave = half
        attempts, _ = await asyncio.gather(ask(made), restart())
        assert attempts == new.requests[0].attempt > 1
        await new.stop()


@in_loop
async def test_a_restarted_scheduler_is_not_asked_for_a_model_it_does_not_know_yet(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def forget(attempt: Attempt) -> None:
            await attempt.scheduled()
            info = made.scheduler.info
            made.scheduler.info = type(info)()
            made.scheduler.announce()
            await made.until_ready(False)
            made.scheduler.info = info
            made.scheduler.announce()
            await attempt.fail(grpc.StatusCode.UNAVAILABLE, "restarting")

        first_then(made, forget, speak(ids))
        assert await ask(made) >= 2


@in_loop
async def test_tokens_that_never_arrive_fail_the_request_by_name(model_dir: Path) -> None:
    async with stack(model_dir) as made:

        async def undelivered(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.fail(grpc.StatusCode.ABORTED, "not delivered")

        made.scheduler.behave = undelivered
        answer = await made.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "replica-1" in answer.json()["error"]["message"]
        assert made.router.inlet.endpoint in answer.json()["error"]["message"]
        assert len(made.scheduler.requests) == 3


@in_loop
async def test_the_recovery_timeout_is_the_end(model_dir: Path) -> None:
    async with stack(model_dir, recovery_timeout=0.2) as made:

        async def refuse(attempt: Attempt) -> None:
            await attempt.fail(grpc.StatusCode.UNAVAILABLE, "no replica")

        made.scheduler.behave = refuse
        answer = await made.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "--recovery-timeout" in answer.json()["error"]["message"]


@in_loop
async def test_prompt_logprobs_survive_a_lost_replica(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        ids = made.ids(TEXT)

        async def die(attempt: Attempt) -> None:
            await attempt.scheduled()
            await attempt.prompt_logprobs()
            await attempt.tokens(0, ids[:2])
            await attempt.tokens(9, ids[9:10])  # a gap: everything before it has arrived
            # The end of the call could overtake the tokens.
            await made.scheduler.until(lambda: len(made.scheduler.requests) == 2)

        first_then(made, die, speak(ids))
        async with AsyncClient(made.grpc_address) as client:
            result = await client.generate("prompt", max_tokens=99, prompt_logprobs=1)
        assert [token.token_id for token in result.prompt_logprobs] == made.ids("prompt")[1:]
        assert result.text == TEXT
        assert not made.scheduler.requests[1].sampling.HasField("num_prompt_logprobs")


@in_loop
async def test_a_deadline_holds_where_no_scheduler_can_say_so(model_dir: Path) -> None:
    async def restart(attempt: Attempt) -> None:
        await attempt.fail(grpc.StatusCode.UNAVAILABLE, "restarting")

    async with stack(model_dir, restart, request_timeout=0.2, recovery_timeout=3600) as made:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True, "n": 2}):
            answer = await made.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        await made.router.front.wait_idle()
