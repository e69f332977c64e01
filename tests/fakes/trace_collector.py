"""An OpenTelemetry collector that keeps what it is sent, on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector sees it; ids are hexadecimal, `parent_id` empty for a root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    is_error: bool
    start_ns: int
    end_ns: int


class TraceCollector(pb_grpc.TraceServiceServicer):
    """Keeps the spans of every export."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_received(service, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """What has come so far."""
        with self._lock:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        """Those of that name."""
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def collecting() -> Iterator[TraceCollector]:
    """A collector that listens; its `endpoint` is what `--otlp-endpoint` takes."""
    collector = TraceCollector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        is_error=span.status.code == 2,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
