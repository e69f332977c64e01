"""The scheduler's spans: one for each wait of a sequence, below the attempt that its router named.

Knows calls and the core's events; must not put tenants, salts or tokens into a span.
"""

from __future__ import annotations

from octavo.tracing import Attributes, Span, Tracer
from scheduler_svc.core.statistics import ReplicaStatistics
from scheduler_svc.core.types import Ended, Event, Finished, Preempted, Scheduled
from scheduler_svc.parties import Call


class QueueTraces:
    """An observer of the engine. Calls without a traceparent are not traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[int, Span] = {}

    def accepted(self, call: Call) -> None:
        if call.traceparent:
            self._begin(call, {"octavo.num_tokens": call.num_tokens})

    def saw(self, event: Event, call: Call) -> None:
        if not call.traceparent:
            return
        match event:
            case Scheduled():
                attributes: Attributes = {
                    "octavo.queue_s": event.queue_ns / 1e9,
                    "octavo.cached_tokens": event.cached_tokens,
                    "octavo.recomputed_tokens": event.recomputed_tokens,
                }
                self._end(call, attributes)
            case Preempted():
                self._begin(call, {"octavo.preempted_by": event.mode.value, "octavo.num_blocks": event.num_blocks})
            case Finished():
                self._end(call)
            case Ended():
                self._end(call, error=event.reason.value)

    def leaving(self, replica: ReplicaStatistics) -> None:
        pass

    def _begin(self, call: Call, attributes: Attributes) -> None:
        shown = {"octavo.request_id": call.request_id, **attributes}
        self._spans[call.sequence_id] = self._tracer.start("octavo.queue", call.traceparent, shown)

    def _end(self, call: Call, attributes: Attributes | None = None, *, error: str = "") -> None:
        """Ends the wait, if the sequence waits."""
        span = self._spans.pop(call.sequence_id, None)
        if span is not None:
            span.end(attributes, error=error)
