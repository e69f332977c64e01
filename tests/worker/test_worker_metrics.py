"""What a worker counts and traces of its steps, and what it reads of its GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo import metrics_gpu
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.metrics import MetricSet
from octavo.metrics_gpu import Gpus, find_gpus
from octavo.phases import Phase
from octavo.tracing import Tracer
from tests.fakes.scraped import Scrape
from worker_svc.metrics import CATALOGUE, StepMetrics, WorkerMetrics
from worker_svc.observers import Step
from worker_svc.outcome import Address, Addresses, SampledRows, StepOutcome
from worker_svc.traces import StepTraces

LENGTH, NUMERIC_ERROR = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_NUMERIC_ERROR
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
HELLO = worker_pb2.Hello(
    name="host:1", model=types_pb2.ModelInfo(name="m", numerics="bf16 avx512", batch_invariant=True)
)


def sampled(rows: dict[int, int]) -> SampledRows:
    """Rows of the plan that sampled, with why each ended."""
    count = len(rows)
    reasons = np.array(list(rows.values()), np.int64)
    return SampledRows(
        plan_rows=np.array(list(rows), np.int64),
        addresses=Addresses.of(*[Address(1, row, 1) for row in rows]),
        token_ids=np.ones(count, np.int64),
        listed=reasons == 0,
        finish_reasons=reasons,
        output_positions=np.zeros(count, np.int64),
        logprobs={},
    )


def step(
    counts: dict[int, int], ends: dict[int, int] | None = None, begun_ms: int = 0, ended_ms: int = 10, **plan: Any
) -> Step:
    """A step that ran `counts` tokens by slot; `ends`: the rows that sampled, by index, with why each ended."""
    outcome = StepOutcome(1, len(counts), (sampled(ends),) if ends else (), (), copy_ns=2_000_000_000)
    message = worker_pb2.StepPlan(row_slots=list(counts), row_counts=list(counts.values()), **plan)
    return Step(message, outcome, begun_ms * 1_000_000, ended_ms * 1_000_000, {0}, 2)


def shown(metrics: WorkerMetrics) -> Scrape:
    body, _ = metrics.set.render()
    return Scrape(body.decode())


def test_steps_are_counted() -> None:
    metrics = WorkerMetrics()
    steps: StepMetrics = metrics.for_model(HELLO)
    steps.attached()
    steps.stepped(step({0: 5, 1: 1, 2: 1}, {1: 0, 2: NUMERIC_ERROR}))
    steps.stepped(step({1: 1}, {0: LENGTH}, begun_ms=1010, ended_ms=1030))
    steps.lost()
    steps.attached()
    steps.stepped(step({1: 1}, begun_ms=9000, ended_ms=9010))
    found = shown(metrics)
    assert found.of("octavo_step_time_seconds_count", model="m") == 3
    assert found.of("octavo_step_time_seconds_sum", model="m") == pytest.approx(0.04)
    assert found.of("octavo_step_rows_sum", model="m") == 5
    assert found.of("octavo_step_tokens_sum", model="m") == 9
    assert found.of("octavo_worker_tokens_total", kind="prefill") == 5
    assert found.of("octavo_worker_tokens_total", kind="decode") == 4
    assert found.of("octavo_worker_sampled_tokens_total") == 2
    assert found.of("octavo_numeric_errors_total") == 1
    assert found.of("octavo_zmq_refused_sends_total") == 6
    assert found.of("octavo_undelivered_rows_total") == 3
    assert found.of("octavo_worker_copy_seconds_total") == 6
    assert found.of("octavo_worker_idle_seconds_total") == pytest.approx(1.0)  # not the time without an attachment
    assert found.of("octavo_worker_attachments_total") == 2
    assert found.of("octavo_worker_info", replica="host:1", numerics="bf16 avx512", batch_invariant="true") == 1
    assert "9 tokens computed, 2 sampled" in metrics.totals()
    known = {name for metric in CATALOGUE for name in metric.sample_names}
    assert {name for name in found.names if name.startswith("octavo_")} <= known


def test_the_start_shows_its_phases() -> None:
    metrics = WorkerMetrics()
    metrics.show_phases([Phase("import", 1.5, ended=True), Phase("weights", 0.5, ended=False, done=1, total=3)])
    assert shown(metrics).of("octavo_worker_start_seconds", phase="weights") == 0.5


def admission(slot: int, traceparent: str = "") -> worker_pb2.Admission:
    return worker_pb2.Admission(slot=slot, token_ids=[1, 2, 3], num_computed_tokens=0, traceparent=traceparent)


def test_a_traced_sequence_has_a_span_for_prefill_and_one_for_decode() -> None:
    exporter = InMemorySpanExporter()
    traces = StepTraces(Tracer("octavo-worker", SimpleSpanProcessor(exporter), 1.0), "host:1")
    traces.stepped(step({3: 2, 4: 3}, {1: 0}, admissions=[admission(3, PARENT), admission(4)]))
    traces.stepped(step({3: 1, 4: 1}, {0: 0, 1: 0}))
    traces.stepped(step({3: 1}, {0: LENGTH}))
    prefill, decode = exporter.get_finished_spans()
    for span in (prefill, decode):
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert (prefill.name, dict(prefill.attributes or {})) == (
        "octavo.prefill",
        {
            "octavo.replica": "host:1",
            "octavo.slot": 3,
            "octavo.num_tokens": 3,
            "octavo.num_computed_tokens": 0,
            "octavo.num_steps": 2,
        },
    )
    assert (decode.name, dict(decode.attributes or {})) == (
        "octavo.decode",
        {
            "octavo.replica": "host:1",
            "octavo.slot": 3,
            "octavo.num_steps": 1,
            "octavo.num_tokens": 2,
            "octavo.ended_by": "length",
        },
    )


def test_a_slot_that_is_released_or_lost_ends_its_span() -> None:
    exporter = InMemorySpanExporter()
    traces = StepTraces(Tracer("octavo-worker", SimpleSpanProcessor(exporter), 1.0), "host:1")
    traces.stepped(step({0: 3}, admissions=[admission(0, PARENT), admission(1, PARENT)]))
    traces.stepped(step({1: 1}, released_slots=[0]))
    traces.lost()
    ended = [(span.attributes or {})["octavo.ended_by"] for span in exporter.get_finished_spans()]
    assert ended == ["released", "attachment lost"]


class FakeNvml:
    """pynvml as far as it is used: two GPUs, of which the second says nothing of its power."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-b":
            raise self.NVMLError("not found")
        return 1

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"Card" if handle == 0 else "Card"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=10 + handle, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == 0
        return 40 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("not supported")
        return 70_000


@pytest.mark.parametrize(("visible", "gpus"), [(None, {"0", "1"}), ("1", {"1"}), ("GPU-b,0", {"0", "1"}), ("", set())])
def test_gpus_that_the_process_sees_are_read(visible: str | None, gpus: set[str]) -> None:
    metrics = MetricSet(metrics_gpu.CATALOGUE)
    Gpus(FakeNvml(), visible).read_into(metrics)
    body, _ = metrics.render()
    found = Scrape(body.decode())
    assert {labels["gpu"] for name, labels, _ in found.samples if name == "octavo_gpu_memory_used_bytes"} == gpus
    if "1" in gpus:
        assert found.of("octavo_gpu_temperature_celsius", gpu="1", name="Card") == 41
        assert found.of("octavo_gpu_utilization_ratio", gpu="1") == 0.5
        assert not found.has("octavo_gpu_power_watts", gpu="1")
    if "0" in gpus:
        assert found.of("octavo_gpu_power_watts", gpu="0") == 70


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert find_gpus() is None
    else:
        metrics = MetricSet(metrics_gpu.CATALOGUE)
        found = find_gpus()
        assert found is not None
        found.read_into(metrics)
        assert metrics.total(metrics_gpu.MEMORY_TOTAL) > 0
