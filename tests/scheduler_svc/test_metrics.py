"""What the scheduler counts, traces and says: through its real services, with a worker that does what the test says."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.tracing import Tracer
from scheduler_svc.core.statistics import ReplicaStatistics, Statistics
from scheduler_svc.metrics import CATALOGUE, COMPUTED, SchedulerMetrics
from scheduler_svc.summary import Reading, load_line, take_reading, totals_line
from scheduler_svc.traces import QueueTraces
from scheduler_svc.watch import Watch
from tests.fakes.scraped import Scrape
from tests.scheduler_svc.harness import Shell, attaching, end_of, run, scheduler, watching

LENGTH = types_pb2.FINISH_REASON_LENGTH
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"

REPLICA = ReplicaStatistics(
    replica_id=1,
    name="w",
    model="m",
    num_running=2,
    num_blocks=10,
    num_used_blocks=4,
    num_free_blocks=6,
    num_cached_blocks=1,
    num_unanswered_plans=1,
    load_tokens=30,
    num_preemptions=3,
    num_steps=5,
    num_host_blocks=20,
    num_cached_host_blocks=5,
    num_demoted_blocks=7,
    num_promoted_blocks=6,
    num_prefilling=1,
    num_slots=8,
    num_preemptions_by_kind={"swap": 3},
    num_steps_by_limit={"token budget": 4, "nothing waiting": 1},
    num_computed_tokens=100,
    num_sampled_tokens=40,
    num_host_cached_tokens=16,
    num_recomputed_tokens=9,
)
STATISTICS = Statistics(
    replicas=(REPLICA,), num_waiting={"m": 3}, num_waiting_tokens=50, num_refused={"queue full": 2}, num_following=1
)


def shown(metrics: SchedulerMetrics) -> Scrape:
    body, _ = metrics.set.render()
    return Scrape(body.decode())


def test_the_cores_statistics_are_shown() -> None:
    metrics = SchedulerMetrics()
    metrics.read(STATISTICS, set(), 2, 1)
    found = shown(metrics)
    assert found.of("octavo_num_requests_running", model="m", replica="w") == 2
    assert found.of("octavo_num_requests_prefilling", model="m", replica="w") == 1
    assert found.of("octavo_num_requests_waiting", model="m") == 3
    assert found.of("octavo_num_waiting_tokens") == 50
    assert found.of("octavo_num_requests_following") == 1
    assert found.of("octavo_kv_cache_usage_perc", tier="device") == 0.4
    assert found.of("octavo_kv_cache_usage_perc", tier="host") == 0.25
    assert found.of("octavo_kv_cache_blocks", tier="device") == 10
    assert found.of("octavo_kv_cache_blocks", tier="device", state="free") == 5
    assert found.of("octavo_kv_cache_blocks", tier="host") == 20
    assert found.of("octavo_preemptions_total", kind="swap") == 3
    assert found.of("octavo_preemptions_total", kind="recompute") == 0
    assert found.of("octavo_recomputed_tokens_total", model="m") == 9
    assert found.of("octavo_swapped_blocks_total", direction="out") == 7
    assert found.of("octavo_swapped_blocks_total", direction="in") == 6
    assert found.of("octavo_host_cache_hits_total", model="m") == 16
    assert found.of("octavo_scheduler_steps_total", limited_by="token_budget") == 4
    assert found.of("octavo_scheduler_refusals_total", reason="queue_full") == 2
    assert found.of("octavo_replicas", state="ready") == 1
    assert found.of("octavo_scheduler_routers") == 2
    assert found.of("octavo_scheduler_workers_starting") == 1
    known = {name for metric in CATALOGUE for name in metric.sample_names}
    assert {name for name in found.names if name.startswith("octavo_")} <= known


def test_replicas_are_shown_by_state() -> None:
    metrics = SchedulerMetrics()
    others = (replace(REPLICA, replica_id=2, name="v"), replace(REPLICA, replica_id=3, name="u", is_draining=True))
    metrics.read(replace(STATISTICS, replicas=(REPLICA, *others)), {1}, 0, 0)
    found = shown(metrics)
    for state in ("ready", "stalled", "draining"):
        assert found.of("octavo_replicas", model="m", state=state) == 1


def test_counters_do_not_fall_when_a_replica_leaves() -> None:
    metrics = SchedulerMetrics()
    metrics.leaving(REPLICA)
    metrics.read(replace(STATISTICS, replicas=()), set(), 0, 0)
    assert shown(metrics).of("octavo_scheduler_computed_tokens_total", model="m") == 100
    assert not shown(metrics).has("octavo_num_requests_running")
    metrics.read(STATISTICS, set(), 0, 0)
    metrics.read(STATISTICS, set(), 0, 0)
    assert metrics.set.total(COMPUTED) == 200


def test_the_line_about_the_load() -> None:
    before = Reading(0, 100, 40, 10, 0, 1, 0, 0, 10, 0, 0, 0)
    busy = Reading(2_000_000_000, 300, 140, 90, 20, 3, 4, 2, 10, 5, 20, 5)
    assert load_line(before, busy) == (
        "prompt 50.0 tok/s, generation 50.0 tok/s, 4 running, 2 waiting, KV 50.0 %, host KV 25.0 %, "
        "prefix hits 25.0 %, 2 preemptions"
    )
    waiting = replace(before, at_ns=1_000_000_000, num_waiting=1)
    assert load_line(before, waiting) == (
        "prompt 0.0 tok/s, generation 0.0 tok/s, 0 running, 1 waiting, KV 0.0 %, prefix hits -, 0 preemptions"
    )
    assert load_line(before, replace(before, at_ns=1_000_000_000)) is None
    assert load_line(busy, replace(busy, num_running=0, num_waiting=0)) is None


def test_a_reading_and_the_totals_are_of_the_metrics() -> None:
    metrics = SchedulerMetrics()
    metrics.read(STATISTICS, set(), 0, 0)
    assert take_reading(metrics, STATISTICS, 5) == Reading(5, 100, 40, 0, 0, 3, 2, 3, 10, 4, 20, 5)
    assert "2 refused, 100 tokens computed, 40 sampled, 3 preemptions, 9 tokens recomputed" in totals_line(metrics)


def observed(shell: Shell, metrics: SchedulerMetrics) -> Scrape:
    Watch(shell.engine, metrics, 0).read()
    return shown(metrics)


def test_the_life_of_sequences_is_counted() -> None:
    async def test() -> None:
        metrics = SchedulerMetrics()
        async with scheduler(observers=(metrics,)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            prompt = list(range(1, 10))
            router.generate(prompt, max_tokens=1)
            plan = await worker.plan()
            await worker.answer(plan, (9, LENGTH))
            await shell.until(lambda found: found[0].num_running == 0)
            cancelled = router.generate(prompt, max_tokens=5, stream_key=2)
            await worker.plan()
            cancelled.cancel()
            await shell.until(lambda found: found[0].num_running == 0)
            assert (await end_of(router.generate(prompt, model="unknown")))[0].name == "NOT_FOUND"
            found = observed(shell, metrics)
        assert found.of("octavo_request_queue_time_seconds_count", model="m") == 2
        assert found.of("octavo_prefix_cache_queries_total", model="m") == 18
        assert found.of("octavo_prefix_cache_hits_total", model="m") == 8
        assert found.of("octavo_scheduler_attempts_ended_total", model="m", reason="length") == 1
        assert found.of("octavo_scheduler_attempts_ended_total", model="m", reason="cancelled") == 1
        assert found.of("octavo_scheduler_refusals_total", reason="unknown_model") == 1
        assert found.of("octavo_scheduler_routers") == 1
        assert found.of("octavo_num_requests_running", replica="worker-1") == 0

    run(test)


def test_a_lost_replicas_work_stays_counted() -> None:
    async def test() -> None:
        metrics = SchedulerMetrics()
        async with scheduler(observers=(metrics,)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            router.generate([1, 2, 3], max_tokens=1)
            await worker.answer(await worker.plan(), (9, LENGTH))
            await shell.until(lambda found: found[0].num_running == 0)
            worker.call.cancel()
            await shell.until(lambda found: not found)
            found = observed(shell, metrics)
        assert found.of("octavo_scheduler_computed_tokens_total", model="m") == 3
        assert not found.has("octavo_replica_slots")

    run(test)


def test_each_wait_is_a_span_below_the_attempt_and_the_worker_learns_the_parent() -> None:
    async def test() -> None:
        exporter = InMemorySpanExporter()
        traces = QueueTraces(Tracer("octavo-scheduler", SimpleSpanProcessor(exporter), 1.0))
        async with scheduler(observers=(traces,)) as shell:
            router, worker = await watching(shell), await attaching(shell)
            request = router.request([1, 2, 3], max_tokens=1, request_id="r")
            call = shell.stub.Generate(request, metadata=(("traceparent", PARENT),))
            router.generate([1, 2, 3], max_tokens=1, stream_key=2)
            admissions: list[worker_pb2.Admission] = []
            while len(admissions) < 2:
                plan = await worker.plan()
                admissions += plan.admissions
                await worker.answer(plan, *[(9, LENGTH)] * len(plan.row_slots))
            await shell.until(lambda found: found[0].num_running == 0)
            assert (await end_of(call))[0].name == "OK"
        (span,) = exporter.get_finished_spans()
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert f"{span.parent.span_id:016x}" == SPAN_ID
        assert dict(span.attributes or {}) == {
            "octavo.request_id": "r",
            "octavo.num_tokens": 3,
            "octavo.queue_s": 0.0,
            "octavo.cached_tokens": 0,
            "octavo.recomputed_tokens": 0,
        }
        assert sorted(admission.traceparent for admission in admissions) == ["", PARENT]

    run(test)
