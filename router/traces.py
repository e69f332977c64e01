"""A router's spans: one for each request, and below it one for each attempt, whose context goes to the scheduler.

Knows what of a request may be in a trace: counts, names and times. Must not put text, token ids or keys into one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from octavo.tracing import Span, Tracer
from router.requests import ChoiceEnd
from router.streams.types import ReceiptParts

if TYPE_CHECKING:
    from router.prepared import Prepared

_Attributes: TypeAlias = dict[str, str | int | float | bool]

INCOMING: ContextVar[str] = ContextVar("traceparent", default="")
"""The traceparent of the call that is being answered; each surface sets it before it prepares a request."""


class RequestTracer:
    """Begins the spans of requests. `clock` is the one of `Prepared.arrived_at`."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._clock = clock

    def begin(self, prepared: Prepared, num_choices: int) -> RequestTrace:
        """The span of a request, from its arrival."""
        age_ns = int((self._clock() - prepared.arrived_at) * 1e9)
        attributes: _Attributes = {
            "octavo.request_id": prepared.options.request_id,
            "octavo.internal_id": prepared.internal_id,
            "gen_ai.request.model": prepared.options.model,
            "gen_ai.request.max_tokens": prepared.params.max_tokens,
            "octavo.num_choices": num_choices,
        }
        span = self._tracer.start(
            "octavo.request", prepared.traceparent, attributes, kind="server", start_ns=time.time_ns() - age_ns
        )
        return RequestTrace(self._tracer, span)


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    def attempt(self, attempt: int) -> Span:
        """The span of one call to the scheduler."""
        parent = self._span.traceparent
        return self._tracer.start("octavo.attempt", parent, {"octavo.attempt": attempt}, kind="client")

    def end(self, ends: Sequence[ChoiceEnd], num_prompt_tokens: int, num_output_tokens: int, *, error: str) -> None:
        """The request is over, with these complete choices; `error` says what ended the others, if any."""
        for end in ends:
            about: _Attributes = {"octavo.choice": end.index, "octavo.finish_reason": end.finish_reason}
            self._span.add_event("octavo.choice_end", about | receipt_attributes(end.receipt))
        attributes: _Attributes = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
        }
        if ends:
            attributes |= receipt_attributes(ends[0].receipt)
        self._span.end(attributes, error=error)


def receipt_attributes(receipt: ReceiptParts) -> _Attributes:
    """A receipt as a span shows it."""
    return {
        "octavo.queue_s": receipt.queue_s,
        "octavo.cached_tokens": receipt.cached_tokens or 0,
        "octavo.recomputed_tokens": receipt.recomputed_tokens,
        "octavo.num_preemptions": receipt.num_preemptions,
        "octavo.num_attempts": receipt.num_attempts,
        "octavo.replica": receipt.replica,
        "octavo.numerics": receipt.numerics,
        "octavo.batch_invariant": receipt.batch_invariant,
    }
