"""From a router's call to a worker's plan and back, over gRPC."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from scheduler_svc.core.types import CoreLimits
from tests.scheduler_svc.harness import (
    ENDPOINT,
    attaching,
    details_of,
    end_of,
    hello,
    run,
    scheduler,
    status_of,
    watching,
)

LENGTH = types_pb2.FINISH_REASON_LENGTH


def test_a_sequence_is_scheduled_planned_and_finished() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            call = router.generate([5, 6, 7], max_tokens=2, queue_events=True, priority=3)
            assert (await call.read()).queued.position == 0
            scheduled = (await call.read()).scheduled
            assert (scheduled.replica, scheduled.numerics, scheduled.batch_invariant) == ("worker-1", "n-1", True)
            plan = await worker.plan()
            assert worker.endpoints == {router.router_id: ENDPOINT}
            (admission,) = plan.admissions
            assert (list(admission.token_ids), admission.num_prompt_tokens) == ([5, 6, 7], 3)
            assert (admission.router_id, admission.stream_key, admission.attempt) == (router.router_id, 1, 1)
            assert admission.sampling.max_tokens == 2
            assert (list(plan.row_starts), list(plan.row_counts)) == ([0], [3])
            second = await worker.plan()
            await worker.answer(plan, (8, 0))
            await worker.answer(second, (9, LENGTH))
            finished = (await call.read()).finished
            assert (finished.num_output_tokens, finished.finish_reason) == (2, LENGTH)
            assert await status_of(call) == (grpc.StatusCode.OK, "")
            assert (await shell.replicas())[0].num_used_blocks == 0

    run(test)


def test_a_second_plan_leaves_before_the_first_is_answered_and_no_third() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate([5, 6, 7], max_tokens=9)
            first, second = await worker.plan(), await worker.plan()
            assert (first.step, second.step) == (1, 2)
            assert (list(second.row_slots), list(second.row_starts), list(second.row_counts)) == ([0], [3], [1])
            router.generate([1], max_tokens=9, stream_key=2)
            await shell.until(lambda found: found[0].num_waiting == 1)
            await worker.answer(first, (8, 0))
            third = await worker.plan()
            assert (third.step, [a.stream_key for a in third.admissions]) == (3, [2])

    run(test)


def test_a_cancelled_call_gives_its_blocks_back() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            call = router.generate(range(1, 10), max_tokens=9)
            plan, second = await worker.plan(), await worker.plan()
            assert (await shell.replicas())[0].num_used_blocks == 3
            call.cancel()
            await shell.until(lambda found: found[0].num_used_blocks == 0)
            await worker.answer(plan, (7, 0))
            await worker.answer(second, (8, 0))
            router.generate([1], stream_key=2)
            following = await worker.plan()
            assert list(following.released_slots) == list(plan.row_slots)

    run(test)


def test_a_lost_worker_aborts_with_the_number_of_suspects() -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(max_unanswered_plans=1, max_num_seqs=2)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            calls = [router.generate([1], stream_key=key) for key in (1, 2, 3)]
            await shell.until(lambda found: found[0].num_running + found[0].num_waiting == 3)
            plan = await worker.plan()
            while len(plan.row_slots) < 2:
                await worker.answer(plan, (9, 0))
                plan = await worker.plan()
            worker.call.cancel()
            for call in calls[:2]:
                code, message = await end_of(call)
                assert (code, message) == (grpc.StatusCode.ABORTED, "replica worker-1 was lost")
                assert await details_of(call, pb.ReplicaLost) == pb.ReplicaLost(replica="worker-1", rows_in_step=2)
            # The one that waited goes on waiting, and runs elsewhere.
            other = await attaching(shell, hello("worker-2", 12))
            assert [admission.stream_key for admission in (await other.plan()).admissions] == [3]

    run(test)


def test_tokens_that_a_router_did_not_take_abort_its_sequence_alone() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            call = router.generate([1])
            plan = await worker.plan()
            await worker.answer(plan, (9, 0), undelivered_rows=[0])
            assert await end_of(call) == (grpc.StatusCode.ABORTED, "tokens not delivered")
            assert [key for key, _ in await call.trailing_metadata() if key == "grpc-status-details-bin"]
            (replica,) = await shell.replicas()
            assert (replica.num_running, replica.num_used_blocks) == (0, 0)

    run(test)


def test_a_call_that_names_no_registered_router_is_unavailable() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router = await watching(shell)
            await attaching(shell)
            code, message = await end_of(router.generate(router_id=4711))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "router_id 4711" in message
            assert "Watch" in message

    run(test)


def test_the_end_of_a_watch_ends_the_calls_that_name_it_and_no_worker_hears_of_them_again() -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(max_num_seqs=1)) as shell:
            gone, router, worker = await watching(shell), await watching(shell), await attaching(shell)
            calls = [gone.generate(stream_key=1), gone.generate(stream_key=2)]
            await shell.until(lambda found: (found[0].num_running, found[0].num_waiting) == (1, 1))
            plan, second = await worker.plan(), await worker.plan()
            gone.watch.cancel()
            for call in calls:
                code, message = await end_of(call)
                assert code is grpc.StatusCode.UNAVAILABLE
                assert "Watch" in message
            await worker.answer(plan, (9, 0))
            await worker.answer(second, (9, 0))
            router.generate(stream_key=3)
            following = await worker.plan()
            assert [admission.stream_key for admission in following.admissions] == [3]
            assert list(worker.endpoints) == [router.router_id]

    run(test)


Change = dict[str, Any]
REFUSALS: list[tuple[str, Change, grpc.StatusCode, list[str]]] = [
    ("unknown model", {"model": "nosuch"}, grpc.StatusCode.NOT_FOUND, ["model is nosuch", "limit is m"]),
    ("no prompt", {"prompt": []}, grpc.StatusCode.INVALID_ARGUMENT, ["prompt_token_ids", "is 0", "at least 1"]),
    ("too long", {"prompt": [1] * 64}, grpc.StatusCode.INVALID_ARGUMENT, ["max_model_len", "is 65", "is 64"]),
    ("no attempt", {"attempt": 0}, grpc.StatusCode.INVALID_ARGUMENT, ["attempt is 0", "at least 1"]),
    ("no room", {"max_tokens": 2, "prior_token_ids": [1, 2]}, grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens", "2"]),
    ("no task", {"task": types_pb2.TASK_UNSPECIFIED}, grpc.StatusCode.INVALID_ARGUMENT, ["task", "UNSPECIFIED"]),
    ("other task", {"task": types_pb2.TASK_EMBED}, grpc.StatusCode.INVALID_ARGUMENT, ["task", "EMBED", "GENERATE"]),
    ("poison", {"attempt": 3, "crash_group_sizes": [1, 1]}, grpc.StatusCode.INTERNAL, ["crashes", "is 2", "is 1"]),
]


@pytest.mark.parametrize(
    ("change", "code", "words"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_a_refusal_has_its_status_and_names_field_value_and_limit(
    change: Change, code: grpc.StatusCode, words: list[str]
) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router = await watching(shell)
            await attaching(shell)
            found, message = await end_of(router.generate(**change))
            assert found is code
            assert [word for word in words if word not in message] == [], message

    run(test)


def test_a_full_queue_refuses_first_attempts_and_takes_resumed_ones() -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(max_waiting=1, max_num_seqs=1)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate(stream_key=1)
            await shell.until(lambda found: found[0].num_running == 1)
            router.generate(stream_key=2)
            await shell.until(lambda found: found[0].num_waiting == 1)
            code, message = await end_of(router.generate(stream_key=3))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "waiting sequences" in message
            assert "limit is 1" in message
            router.generate(stream_key=4, attempt=2, prior_token_ids=[9])
            await shell.until(lambda found: found[0].num_waiting == 2)
            del worker

    run(test)


def test_a_preemption_is_logged_with_its_reason_and_blocks(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(max_unanswered_plans=1)) as shell:
            router = await watching(shell)
            worker = await attaching(shell, hello(num_device_blocks=2, num_slots=1))
            router.generate([1, 2, 3, 4, 5], request_id="poor")
            first = await worker.plan()
            router.generate([6, 7, 8, 9, 10], priority=-1, stream_key=2)
            await shell.until(lambda found: found[0].num_waiting == 1)
            await worker.answer(first, (50, 0))
            plan = await worker.plan()
            assert list(plan.released_slots) == list(first.row_slots)
            assert [admission.stream_key for admission in plan.admissions] == [2]

    with caplog.at_level(logging.WARNING, "scheduler_svc.engine"):
        run(test)
    (line,) = [record.getMessage() for record in caplog.records if "preempted" in record.getMessage()]
    assert "request poor" in line
    assert "better priority" in line
    assert "2 blocks" in line


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": [1, 100]}, "an id in prompt_token_ids is 100, the limit is the vocabulary of 100"),
        ({"prior_token_ids": [100], "attempt": 2}, "an id in prior_token_ids is 100"),
        ({"adapter": "a"}, "adapter is 'a'"),
        ({"sampling": {"bias_token_ids": [1, 2], "bias_values": [1.0]}}, "number of bias_values is 1, the limit is 2"),
        ({"sampling": {"bias_token_ids": [100], "bias_values": [1.0]}}, "an id in bias_token_ids is 100"),
        ({"sampling": {"stop_token_ids": [4_000_000_000]}}, "an id in stop_token_ids is 4000000000"),
        ({"sampling": {"end_token_ids": [101]}}, "an id in end_token_ids is 101"),
    ],
)
def test_what_would_end_an_attachment_ends_its_own_call_alone(fields: dict[str, Any], words: str) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            request = router.request(**{**fields, "sampling": None})
            request.sampling.MergeFrom(types_pb2.SamplingParams(max_tokens=3, **fields.get("sampling", {})))
            code, message = await end_of(shell.stub.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert words in message
            router.generate(stream_key=2)
            assert [admission.stream_key for admission in (await worker.plan()).admissions] == [2]

    run(test)


def test_a_resumed_sequence_arrives_at_the_worker_whole() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate([1, 2], max_tokens=9, attempt=2, prior_token_ids=[7, 8], age_ns=5)
            (admission,) = (await worker.plan()).admissions
            assert (list(admission.token_ids), admission.num_prompt_tokens) == ([1, 2, 7, 8], 2)
            assert admission.attempt == 2

    run(test)
