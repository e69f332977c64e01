"""What operators do over gRPC: explain, update, cancel, drain, dump; and refusals that say when to come back."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from octavo.options import OptionError
from scheduler_svc.config import SchedulerConfig, tenant_weights
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.recorder import Recorder
from scheduler_svc.recording import read
from scheduler_svc.replay import replay
from scheduler_svc.server import add_services, core_limits, recorded_core
from tests.scheduler_svc.harness import Clock, Shell, attaching, details_of, end_of, hello, run, scheduler, watching

LENGTH = types_pb2.FINISH_REASON_LENGTH


def named(request_id: str) -> pb.SequenceName:
    return pb.SequenceName(request_id=request_id)


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


def test_a_request_is_explained_while_it_lives_and_after() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            call = router.generate(request_id="mine", max_tokens=1, priority=2)
            plan = await worker.plan()
            shell.clock.pass_s(3)
            (live,) = (await shell.control.Explain(pb.ExplainRequest(name=named("mine")))).sequences
            assert (live.request_id, live.state, live.priority, live.num_prompt_tokens) == ("mine", "running", 2, 3)
            scheduled = next(decision for decision in live.decisions if decision.what == "scheduled")
            assert (scheduled.replica, scheduled.num_blocks, scheduled.age_ns) == ("worker-1", 1, 3_000_000_000)
            await worker.answer(plan, (9, LENGTH))
            await end_of(call)
            by_id = pb.SequenceName(sequence_id=live.sequence_id)
            for name in (named("mine"), by_id):
                (ended,) = (await shell.control.Explain(pb.ExplainRequest(name=name))).sequences
                assert (ended.state, ended.num_output_tokens) == ("ended", 1)
            code, words = await refusal(shell.control.Explain(pb.ExplainRequest(name=named("other"))))
            assert code is grpc.StatusCode.NOT_FOUND
            assert "'other' is neither live" in words
            code, words = await refusal(shell.control.Explain(pb.ExplainRequest()))
            assert code is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_a_waiting_request_goes_first_once_its_priority_says_so() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell, hello(num_slots=1))
            calls = [router.generate(request_id=f"r{key}", max_tokens=1, stream_key=key) for key in (1, 2, 3)]
            first = await worker.plan()
            await shell.until(lambda found: found[0].num_waiting == 2)
            (last,) = (await shell.control.Explain(pb.ExplainRequest(name=named("r3")))).sequences
            assert (last.state, last.position) == ("waiting", 1)
            assert last.waits_for
            await shell.control.Update(pb.UpdateRequest(name=named("r3"), priority=0, deadline_ns=10**12))
            response = await shell.control.Update(pb.UpdateRequest(name=named("r2"), priority=1))
            assert len(response.sequence_ids) == 1
            (last,) = (await shell.control.Explain(pb.ExplainRequest(name=named("r3")))).sequences
            assert (last.position, last.deadline_in_ns) == (0, 10**12)
            await worker.answer(first, (9, LENGTH))
            second = await worker.plan()
            assert [admission.stream_key for admission in second.admissions] == [3]
            code, words = await refusal(shell.control.Update(pb.UpdateRequest(name=named("r2"))))
            assert (code, words.split(";")[0]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "neither priority nor deadline_ns is set",
            )
            code, _ = await refusal(shell.control.Update(pb.UpdateRequest(name=named("x"), priority=1)))
            assert code is grpc.StatusCode.NOT_FOUND
            assert not calls[1].done()

    run(test)


def test_an_operator_cancels_by_name_with_a_final_status() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            twins = [router.generate(request_id="two", stream_key=key) for key in (1, 2)]
            other = router.generate(request_id="one", stream_key=3)
            await worker.plan()
            await shell.until(lambda found: found[0].num_running + found[0].num_waiting == 3)
            response = await shell.control.Cancel(pb.CancelRequest(name=named("two")))
            assert len(response.sequence_ids) == 2
            for call in twins:
                assert await end_of(call) == (
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "the request was cancelled by an operator",
                )
            assert not other.done()
            await shell.until(lambda found: found[0].num_running + found[0].num_waiting == 1)
            code, _ = await refusal(shell.control.Cancel(pb.CancelRequest(name=named("two"))))
            assert code is grpc.StatusCode.NOT_FOUND

    run(test)


def test_a_draining_replica_takes_nothing_new_and_its_model_waits_for_another() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate(stream_key=1)
            await worker.plan()
            response = await shell.control.Drain(pb.DrainRequest(replica="worker-1"))
            assert response.num_running == 1
            await router.until_ready(0)
            router.generate(stream_key=2)
            (replica,) = await shell.until(lambda found: found[0].num_waiting == 1)
            assert replica.is_draining
            other = await attaching(shell, hello("worker-2", 12))
            await router.until_ready(1)
            assert [admission.stream_key for admission in (await other.plan()).admissions] == [2]
            code, words = await refusal(shell.control.Drain(pb.DrainRequest(replica="nobody")))
            assert code is grpc.StatusCode.NOT_FOUND
            assert "worker-1, worker-2" in words

    run(test)


def test_a_drained_replica_that_serves_again_takes_what_waited() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell)
            await shell.control.Drain(pb.DrainRequest(replica="worker-1"))
            router.generate(stream_key=1)
            (replica,) = await shell.until(lambda found: found[0].num_waiting == 1)
            assert replica.is_draining
            response = await shell.control.Undrain(pb.UndrainRequest(replica="worker-1"))
            assert response.num_running == 0
            await router.until_ready(1)
            assert [admission.stream_key for admission in (await worker.plan()).admissions] == [1]
            code, _ = await refusal(shell.control.Undrain(pb.UndrainRequest(replica="nobody")))
            assert code is grpc.StatusCode.NOT_FOUND

    run(test)


def test_the_whole_load_is_one_answer() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            router, worker = await watching(shell), await attaching(shell, hello(num_slots=1, num_host_blocks=3))
            for key, tenant in ((1, "alice"), (2, "bob"), (3, "bob")):
                router.generate(stream_key=key, tenant=tenant)
            await worker.plan()
            await shell.until(lambda found: found[0].num_waiting == 2)
            load = await shell.control.GetStatistics(pb.GetStatisticsRequest())
            (replica,) = load.replicas
            assert (replica.num_slots, replica.num_host_blocks, replica.block_size) == (1, 3, 4)
            assert sum(replica.num_steps_by_limit.values()) >= 1
            assert [(queue.model, queue.num_waiting) for queue in load.queues] == [("m", 2)]
            assert {tenant.tenant: tenant.num_waiting for tenant in load.tenants}["bob"] == 2
            assert (load.num_waiting_tokens, load.num_routers, load.now_ns) == (6, 1, shell.clock.now_ns)

    run(test)


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test() -> None:
        limits = CoreLimits(max_waiting=1)
        async with scheduler(limits) as shell:
            router, worker = await watching(shell), await attaching(shell, hello(num_slots=1))
            for key in range(1, 5):  # starts at a pace of one in two seconds
                router.generate(stream_key=key, max_tokens=1)
                plan = await worker.plan()
                router.generate(stream_key=key + 10, max_tokens=1)
                await shell.until(lambda found: found[0].num_waiting == 1)
                shell.clock.pass_s(2)
                await worker.answer(plan, (9, LENGTH))
                plan = await worker.plan()
                shell.clock.pass_s(2)
                await worker.answer(plan, (9, LENGTH))
            router.generate(stream_key=20)
            await worker.plan()
            router.generate(stream_key=21)
            await shell.until(lambda found: found[0].num_waiting == 1)
            refused = router.generate(stream_key=22)
            code, words = await end_of(refused)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "queue full" in words
            detail = await details_of(refused, error_details_pb2.RetryInfo)
            assert isinstance(detail, error_details_pb2.RetryInfo)
            delay_s = detail.retry_delay.ToNanoseconds() / 1e9
            assert 1 < delay_s < 5  # one has to start
            assert f"try again in {delay_s:.3g} s" in words

    run(test)


def test_a_dump_over_the_wire_replays() -> None:
    async def test() -> None:
        clock = Clock()
        recorder = Recorder(Scheduler(), salt=b"0123456789abcdef", max_bytes=1 << 20)
        engine = Engine(recorder, clock, check_laws=True)
        server = grpc.aio.server()
        add_services(server, engine, ())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            shell = Shell(engine, clock, channel, port)
            router, worker = await watching(shell), await attaching(shell)
            call = router.generate(range(1, 12), max_tokens=2)
            await worker.answer(await worker.plan(), (9, 0))
            await worker.answer(await worker.plan(), (9, LENGTH))
            await end_of(call)
            pieces = shell.control.DumpRecorder(pb.DumpRecorderRequest())
            data = b"".join([piece.data async for piece in pieces])
        await server.stop(grace=0)
        again = replay(read(data))
        assert again.difference is None
        (times,) = again.sequences.values()
        assert (times.num_prompt_tokens, times.num_output_tokens) == (11, 2)

    run(test)


def test_without_a_recorder_there_is_nothing_to_dump() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            call = shell.control.DumpRecorder(pb.DumpRecorderRequest())
            code, words = await end_of(call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "--flight-recorder-size" in words

    run(test)


def test_advice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scheduler(CoreLimits(max_num_seqs=1)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            for second in range(90):
                router.generate(stream_key=second)
                await shell.until(lambda found, second=second: found[0].num_waiting >= second)  # type: ignore[misc]
                shell.clock.pass_s(1)
                shell.engine.tick()
            await worker.plan()

    run(test)
    assert any("the queue grew" in record.message for record in caplog.records), caplog.text


def test_every_limit_has_an_option() -> None:
    config = SchedulerConfig(
        scheduling_policy="fair",
        tenant_weights="alice=2, bob=0.5",
        preemption_mode="recompute",
        target_inter_token_latency_ms=25.5,
        max_prefill_tokens=64,
        expected_output_tokens=32,
        max_waiting_requests_per_tenant=5,
        max_waiting_tokens_per_tenant=600,
        aging_time=2.5,
    )
    assert core_limits(config) == CoreLimits(
        policy=SchedulingPolicy.FAIR,
        tenant_weights={"alice": 2.0, "bob": 0.5},
        preemption_mode=PreemptionMode.RECOMPUTE,
        target_inter_token_ns=25_500_000,
        max_prefill_tokens=64,
        expected_output_tokens=32,
        max_waiting_per_tenant=5,
        max_waiting_tokens_per_tenant=600,
        aging_ns=2_500_000_000,
    )
    assert isinstance(recorded_core(SchedulerConfig()), Recorder)
    assert isinstance(recorded_core(SchedulerConfig(flight_recorder_size=0)), Scheduler)


def test_options_that_mean_nothing_are_refused_or_named() -> None:
    for text in ("alice", "alice=", "alice=0", "alice=-1", "=,", "a=nan"):
        with pytest.raises(OptionError, match="--tenant-weights"):
            SchedulerConfig(tenant_weights=text)
    assert tenant_weights("=2,x=y=3") == {"": 2.0, "x=y": 3.0}
    with pytest.raises(OptionError, match="--preemption-mode swap"):
        SchedulerConfig(preemption_mode="swap", enable_prefix_caching=False)
    named = dict(SchedulerConfig(tenant_weights="a=1", record_tokens=True).without_effect())
    assert set(named) == {"tenant_weights"}
    assert "record_tokens" in dict(SchedulerConfig(flight_recorder_size=0).without_effect())
