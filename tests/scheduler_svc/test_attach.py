"""Workers on the scheduler's port: their start, their words out of order, their disagreements, their stalls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2, worker_pb2
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from tests.scheduler_svc.harness import MODEL, attaching, end_of, hello, run, scheduler, watching

LENGTH = types_pb2.FINISH_REASON_LENGTH


def starting(phase: str, detail: str = "") -> pb.AttachRequest:
    """A word of a worker's start."""
    return pb.AttachRequest(
        starting=pb.WorkerStarting(name="worker-1", phase=types_pb2.StartPhase(name=phase, detail=detail, seconds=2))
    )


@pytest.mark.parametrize(
    ("mode", "num_host_blocks", "is_told"),
    [(PreemptionMode.SWAP, 0, True), (PreemptionMode.SWAP, 8, False), (PreemptionMode.AUTO, 0, False)],
)
def test_swapping_without_a_host_tier_is_told(
    mode: PreemptionMode, num_host_blocks: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(preemption_mode=mode)) as shell:
            await attaching(shell, hello(num_host_blocks=num_host_blocks))

    with caplog.at_level(logging.INFO, "scheduler_svc.engine"):
        run(test)
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"16 blocks of 4 tokens, {num_host_blocks} on the host" in line for line in lines)
    assert any("worker-1 has no --swap-space" in line for line in lines) == is_told


def test_watch_follows_a_worker_from_its_first_phase_to_ready_and_gone() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, call = await watching(shell), shell.stub.Attach()
            await call.write(starting("weights", "3/30 tensors"))
            served = await router.served()
            assert [(w.name, w.phase.name, w.phase.detail) for w in served.starting] == [
                ("worker-1", "weights", "3/30 tensors")
            ]
            assert not served.models
            await call.write(starting("warm-up"))
            assert [w.phase.name for w in (await router.served()).starting] == ["warm-up"]
            await call.write(pb.AttachRequest(hello=hello()))
            model = await router.until_ready(1)
            assert (model.info.name, model.info.fingerprint, model.max_cached_tokens) == (MODEL, "weights", 64)
            call.cancel()
            assert (await router.until_ready(0)).info.name == MODEL
            assert await shell.replicas() == []

    run(test)


def test_a_worker_that_gives_up_its_start_is_forgotten() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, call = await watching(shell), shell.stub.Attach()
            await call.write(starting("weights"))
            assert (await router.served()).starting
            call.cancel()
            served = await router.served()
            assert (list(served.starting), list(served.models)) == ([], [])

    run(test)


@pytest.mark.parametrize("num_turns", range(12))
def test_a_worker_that_leaves_at_any_moment_after_its_hello_is_not_kept(num_turns: int) -> None:
    async def requests() -> AsyncIterator[pb.AttachRequest]:
        yield pb.AttachRequest(hello=hello())
        await asyncio.get_running_loop().create_future()

    async def test() -> None:
        engine = Engine(Scheduler(CoreLimits()), lambda: 0)
        context: Any = None  # asked for nothing where nothing is refused
        words: Any = SchedulerService(engine, ()).Attach(requests(), context)
        reading = asyncio.ensure_future(anext(words))
        for _ in range(num_turns):  # of the event loop
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await words.aclose()
        assert not engine.replicas

    run(test)


def test_a_worker_learns_of_routers_that_were_there_and_of_those_that_come_and_go() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            old = await watching(shell, "ipc:///run/octavo/old")
            worker = await attaching(shell)
            new = await watching(shell, "tcp://127.0.0.1:8")
            new.generate([1])
            await worker.plan()
            assert worker.endpoints == {old.router_id: "ipc:///run/octavo/old", new.router_id: "tcp://127.0.0.1:8"}
            assert old.router_id != new.router_id
            old.watch.cancel()
            assert (await worker.call.read()).HasField("plan")
            assert (await worker.call.read()).router_gone == old.router_id

    run(test)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"step": 7}, "step 7"),
    ({"incarnation": 5}, "incarnation 5"),
    ({"num_sampled": [1, 1]}, "2"),
    ({"num_sampled": [1], "token_ids": [1, 2]}, "token_ids holds 2"),
    ({"num_sampled": [0], "token_ids": []}, "row 0 sampled 0"),
    ({"undelivered_rows": [3]}, "row 3"),
    ({"finish_reasons": [0, 3]}, "row 1"),
    ({"finish_reasons": [99]}, "99"),
]


@pytest.mark.parametrize(("change", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_result_that_disagrees_ends_the_attachment_and_aborts_what_ran(change: dict[str, Any], words: str) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            sequence = router.generate([1])
            await worker.answer(await worker.plan(), (9, 0), **change)
            code, message = await end_of(worker.call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert words in message
            assert (await end_of(sequence))[0] is grpc.StatusCode.ABORTED
            assert await shell.replicas() == []
            await attaching(shell)  # and may come back

    run(test)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (pb.AttachRequest(result=worker_pb2.StepResult()), "result came before hello"),
        (pb.AttachRequest(), "before hello"),
        (pb.AttachRequest(hello=hello(block_size=0)), "block_size is 0"),
        (pb.AttachRequest(hello=hello(num_device_blocks=0)), "num_device_blocks is 0"),
    ],
    ids=["result", "nothing", "block size", "blocks"],
)
def test_a_worker_that_begins_wrong_is_refused(first: pb.AttachRequest, words: str) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            call = shell.stub.Attach()
            await call.write(first)
            found, message = await end_of(call)
            assert found is grpc.StatusCode.INVALID_ARGUMENT
            assert words in message
            assert await shell.replicas() == []

    run(test)


def test_a_second_hello_ends_the_attachment() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            worker = await attaching(shell)
            await worker.call.write(pb.AttachRequest(hello=hello()))
            code, message = await end_of(worker.call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "hello came after hello" in message

    run(test)


def test_another_model_under_the_same_name_is_refused_beside_a_replica_and_welcome_after_it() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            other = hello("worker-2", 12)
            other.model.fingerprint = "other weights"
            call = shell.stub.Attach()
            await call.write(pb.AttachRequest(hello=other))
            code, message = await end_of(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            for word in ("model.fingerprint", "other weights", "worker-1", "--served-model-name"):
                assert word in message
            assert [replica.name for replica in await shell.replicas()] == ["worker-1"]
            await router.until_ready(1)
            worker.call.cancel()
            await shell.until(lambda found: not found)
            await attaching(shell, other)
            assert (await router.until_ready(1)).info.fingerprint == "other weights"

    run(test)


def test_f44_a_replica_that_completes_no_step_for_too_long_is_not_ready_until_it_does() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate([1], max_tokens=9)
            plan = await worker.plan()
            await router.until_ready(1)
            shell.clock.pass_s(9)
            shell.engine.check_progress()
            shell.clock.pass_s(2)
            shell.engine.check_progress()
            await router.until_ready(0)
            await worker.answer(plan, (7, 0), duration_ns=11_000_000_000)
            await worker.plan()
            await worker.plan()
            shell.engine.check_progress()
            await router.until_ready(1)
            # Its usual step now takes 11 s, so the next may take five times that.
            shell.clock.pass_s(50)
            shell.engine.check_progress()
            shell.clock.pass_s(6)
            shell.engine.check_progress()
            await router.until_ready(0)

    run(test)


@pytest.mark.parametrize("is_measured", [False, True], ids=["first", "later"])
def test_f44_a_long_prefill_is_no_stall_before_its_time(is_measured: bool) -> None:
    """A step may take five times what so many tokens take, by the steps before it or by the worker's word of its start;
    many short steps since then do not shorten that."""

    async def test() -> None:
        async with scheduler() as shell:
            said = hello(warm_up_token_ns=0 if is_measured else 1_000_000_000)
            router, worker = await watching(shell), await attaching(shell, said)
            if is_measured:
                for prompt, duration_s in ((range(8), 8), *(([token_id], 0.001) for token_id in range(20))):
                    router.generate(prompt, max_tokens=1)
                    plan = await worker.plan()
                    await worker.answer(plan, (7, LENGTH), duration_ns=int(duration_s * 1e9))
            router.generate(range(50, 70), max_tokens=1)
            assert list((await worker.plan()).row_counts) == [20]
            for passed_s, is_stalled in ((90, False), (40, True)):
                shell.clock.pass_s(passed_s)
                shell.engine.check_progress()
                assert [replica.is_stalled for replica in await shell.replicas()] == [is_stalled]

    run(test)


def test_f44_an_idle_replica_never_stalls() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router = await watching(shell)
            await attaching(shell)
            await router.until_ready(1)
            shell.clock.pass_s(1000)
            shell.engine.check_progress()
            second = await watching(shell)
            assert [model.num_ready_replicas for model in second.first.models] == [1]

    run(test)


def test_a_group_is_one_for_the_queue_and_each_member_has_its_own_slot() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            for key in (1, 2):
                router.generate([1], max_tokens=1, stream_key=key, group_id="g", group_size=2)
            # One plan or two, by when the calls come; none is answered before, for an end would give its slot away.
            plans, slots = list[worker_pb2.StepPlan](), set[int]()
            while len(slots) < 2:
                plans.append(await worker.plan())
                slots |= {admission.slot for admission in plans[-1].admissions}
            for plan in plans:
                await worker.answer(plan, *[(9, LENGTH)] * len(plan.row_slots))

    run(test)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ((7, 7, 7), grpc.StatusCode.ABORTED),
        ((7, 8, 9), grpc.StatusCode.INTERNAL),
        ((7, 8, 8), grpc.StatusCode.ABORTED),
        ((0, 0, 0), grpc.StatusCode.INTERNAL),
    ],
)
def test_who_loses_its_connection_twice_did_not_crash(processes: tuple[int, ...], expected: grpc.StatusCode) -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, crashes = await watching(shell), list[int]()
            for attempt, process in enumerate(processes, 1):
                worker = await attaching(shell, hello(incarnation=attempt, process=process))
                call = router.generate(attempt=attempt, crash_group_sizes=crashes)
                if len(crashes) == 2 and expected is grpc.StatusCode.INTERNAL:
                    break
                await worker.plan()
                worker.call.cancel()
                assert (await end_of(call))[0] is grpc.StatusCode.ABORTED
                await shell.until(lambda found: not found)
                crashes.append(1)
            assert (await end_of(call))[0] is expected

    run(test)
