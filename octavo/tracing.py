"""Traces: spans of one request across the three processes, sent to an OpenTelemetry collector.

Knows OpenTelemetry, which is an extra and is imported only where `--otlp-endpoint` is given; there is no global tracer.
A parent travels as W3C traceparent text. Spans carry numbers and names of ours and never a prompt, an output or a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from octavo.process import StartError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

HEADER = "traceparent"
"""The HTTP header and the gRPC metadata key that carry a parent."""

Attributes = Mapping[str, str | int | float | bool]
SpanKind = Literal["internal", "server", "client"]

_FLUSH_MS = 2000
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.ASCII)


class Span:
    """One span that runs. `traceparent` makes others its children, in this process or another."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    @property
    def is_recording(self) -> bool:
        """False where the sampler chose not to keep the trace."""
        recording: bool = self._span.is_recording()
        return recording

    def add_event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happened, now."""
        self._span.add_event(name, attributes)

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """It is over; `error` is the kind of failure, empty for none."""
        from opentelemetry.trace import Status, StatusCode

        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracer:
    """Makes this process's spans. `close` sends what is left."""

    def __init__(self, service: str, processor: SpanProcessor, sampling_ratio: float) -> None:
        """`service` is the process's name in traces, such as `octavo-router`; finished spans go to `processor`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        sampler = ParentBased(TraceIdRatioBased(sampling_ratio))
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        parent: str = "",
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = "internal",
        start_ns: int | None = None,
    ) -> Span:
        """A span that begins now, or began at `start_ns` of the Unix clock; `parent` is a traceparent, or empty."""
        from opentelemetry.trace import SpanKind as Kind
        from opentelemetry.trace import set_span_in_context

        context = self._propagator.extract({HEADER: clean_traceparent(parent)})
        span = self._tracer.start_span(
            name, context, kind=Kind[kind.upper()], attributes=attributes, start_time=start_ns
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return Span(span, carrier.get(HEADER, ""))

    def close(self) -> None:
        """Send what is left, within two seconds, and stop."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def make_tracer(service: str, endpoint: str | None, sampling_ratio: float) -> Tracer | None:
    """A tracer that sends to `endpoint` in the background; None where none is given.

    `http://` goes in plain text, `https://` over TLS. Raises StartError when the extra is not installed or the endpoint
    is no URL.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise StartError(f"--otlp-endpoint {endpoint}: is no URL; write it as http://host:4317 or https://host:4317")
    return Tracer(service, _processor(_exporter(endpoint)), sampling_ratio)


def clean_traceparent(text: str) -> str:
    """A traceparent as it came from outside; empty where it is none."""
    return text if len(text) <= 256 and _TRACEPARENT.fullmatch(text) else ""


def _exporter(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as missing:
        raise StartError(
            f"--otlp-endpoint: {missing.name} is not installed. Run: pip install 'octavo[otel]', or leave it out"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))


def _processor(exporter: Any) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    make: Callable[[Any], SpanProcessor] = BatchSpanProcessor
    return make(exporter)
