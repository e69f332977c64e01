"""A worker's spans: for each traced sequence one from its admission to its first token, and one from there to its end.

Knows plans and outcomes; must not put token ids into a span.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.tracing import Attributes, Span, Tracer
from worker_svc.observers import Step


@dataclass(slots=True)
class _Row:
    """A traced sequence in its slot."""

    traceparent: str
    span: Span
    num_steps: int = 0
    num_tokens: int = 0
    decodes: bool = False


class StepTraces:
    """An observer of the engine's steps. A sequence whose admission names no span costs nothing here."""

    def __init__(self, tracer: Tracer, replica: str) -> None:
        self._tracer = tracer
        self._replica = replica
        self._rows: dict[int, _Row] = {}

    def attached(self) -> None:
        pass

    def stepped(self, step: Step) -> None:
        plan = step.plan
        if not self._rows and not any(admission.traceparent for admission in plan.admissions):
            return
        for slot in plan.released_slots:
            self._end(slot, "released")
        begun_at_ns = time.time_ns() - (step.ended_ns - step.begun_ns)
        for admission in plan.admissions:
            if admission.traceparent:
                self._rows[admission.slot] = _Row(admission.traceparent, self._prefill(admission, begun_at_ns))
        for slot in plan.row_slots:
            if slot in self._rows:
                self._rows[slot].num_steps += 1
        for group in step.outcome.sampled:
            rows = zip(group.plan_rows.tolist(), group.finish_reasons.tolist(), strict=True)
            for plan_row, reason in rows:
                self._sampled(plan.row_slots[plan_row], reason)

    def lost(self) -> None:
        for slot in tuple(self._rows):
            self._end(slot, "attachment lost", error="attachment lost")

    def _prefill(self, admission: worker_pb2.Admission, begun_at_ns: int) -> Span:
        attributes: Attributes = {
            "octavo.replica": self._replica,
            "octavo.slot": admission.slot,
            "octavo.num_tokens": len(admission.token_ids),
            "octavo.num_computed_tokens": admission.num_computed_tokens,
        }
        return self._tracer.start("octavo.prefill", admission.traceparent, attributes, start_ns=begun_at_ns)

    def _sampled(self, slot: int, finish_reason: int) -> None:
        row = self._rows.get(slot)
        if row is None:
            return
        row.num_tokens += 1
        if not row.decodes:
            row.span.end({"octavo.num_steps": row.num_steps})
            attributes: Attributes = {"octavo.replica": self._replica, "octavo.slot": slot}
            row.span = self._tracer.start("octavo.decode", row.traceparent, attributes)
            row.decodes, row.num_steps = True, 0
        if finish_reason:
            name = types_pb2.FinishReason.Name(finish_reason)  # type: ignore[arg-type]
            self._end(slot, name.removeprefix("FINISH_REASON_").lower())

    def _end(self, slot: int, how: str, *, error: str = "") -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            attributes: Attributes = {
                "octavo.num_steps": row.num_steps,
                "octavo.num_tokens": row.num_tokens,
                "octavo.ended_by": how,
            }
            row.span.end(attributes, error=error)
