"""Spans and their parents; the exporter is OpenTelemetry's own in-memory one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.process import StartError
from octavo.tracing import Tracer, clean_traceparent, make_tracer

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


def traced(ratio: float = 1.0) -> tuple[Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracer("octavo-test", SimpleSpanProcessor(exporter), ratio), exporter


def test_a_child_in_another_process_joins_the_trace() -> None:
    ours, exporter = traced()
    theirs, other_exporter = traced()
    parent = ours.start("outer", PARENT, {"octavo.n": 1}, kind="server", start_ns=1_000)
    child = theirs.start("inner", parent.traceparent)
    child.end({"octavo.m": 2}, error="lost")
    parent.end()
    (outer,), (inner,) = exporter.get_finished_spans(), other_exporter.get_finished_spans()
    assert (outer.name, outer.start_time, dict(outer.attributes or {})) == ("outer", 1_000, {"octavo.n": 1})
    assert outer.parent is not None
    assert inner.parent is not None
    assert f"{outer.parent.span_id:016x}" == SPAN_ID
    assert inner.parent.span_id == outer.context.span_id
    assert f"{inner.context.trace_id:032x}" == TRACE_ID
    assert (inner.status.is_ok, inner.status.description) == (False, "lost")
    assert outer.resource.attributes["service.name"] == "octavo-test"


def test_the_caller_decides_what_is_sampled_and_else_the_ratio() -> None:
    never, exporter = traced(0.0)
    for parent, sampled in (("", False), (UNSAMPLED, False), (PARENT, True)):
        span = never.start("s", parent)
        assert span.is_recording is sampled
        assert bool(int(span.traceparent[-2:], 16) & 1) is sampled
        span.end()
    assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize(
    "text", ["", "nonsense", PARENT + "\n", PARENT.upper(), PARENT[:-1], "00-" + "é" * 40, "0" * 999]
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert clean_traceparent(text) == ""
    tracer, exporter = traced()
    tracer.start("s", text).end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_without_an_endpoint_there_is_no_tracer_and_no_library() -> None:
    assert make_tracer("octavo-test", None, 1.0) is None
    code = "import octavo.tracing, sys; assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(StartError, match=r"--otlp-endpoint collector:4317: is no URL; write it as http://host:4317"):
        make_tracer("octavo-test", "collector:4317", 1.0)


def test_without_the_extra_the_option_is_refused_with_the_remedy() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter"] = None
from octavo.process import StartError
from octavo.tracing import make_tracer
try:
    make_tracer("octavo-test", "http://127.0.0.1:4317", 1.0)
except StartError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'octavo[otel]'" in done.stdout
