"""A running sum of everything that a core decided, so that two runs can be compared step by step.

Knows the core's answers: events, plans, refusals. Two runs have equal sums exactly when they decided alike so far (up
to 64 bits of a hash) and began with the same sum. What never changes a decision is not in it: token ids, sampling
parameters, routers' keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from scheduler_svc.core.plan import Planned, StepPlan
from scheduler_svc.core.types import Event, Refused


class Decisions:
    """The sum. `value` is all of its present state, so another can go on from there."""

    __slots__ = ("_state", "value")

    def __init__(self, value: int = 0) -> None:
        self._state = _begun(value)
        self.value = value

    def add_events(self, events: Iterable[Event]) -> None:
        """What a call of the core returned."""
        for event in events:
            self._state.update(repr(event).encode())
        self._turn()

    def add_refusal(self, refused: Refused) -> None:
        """The core did not accept a request."""
        self._state.update(f"refused {refused.reason.value} {refused.retry_after_ns}".encode())
        self._turn()

    def add_planned(self, replica_id: int, planned: Planned) -> None:
        """What `plan` returned for a replica."""
        self._state.update(f"plan {replica_id} {planned.limited_by.value}".encode())
        if planned.plan is not None:
            self._add_plan(planned.plan)
        self.add_events(planned.events)

    def _add_plan(self, plan: StepPlan) -> None:
        lists: list[Sequence[int]] = []
        for admission in plan.admissions:
            numbers = (admission.slot, admission.sequence_id, admission.num_computed_tokens, len(admission.token_ids))
            lists.append((*numbers, *admission.block_ids))
        num_rows, num_tokens = len(plan.row_slots), sum(plan.row_counts)
        lists += (
            plan.released_slots,
            plan.append_slots,
            plan.append_counts,
            plan.append_block_ids,
            plan.demote_device_ids,
            plan.demote_host_ids,
            plan.promote_host_ids,
            plan.promote_device_ids,
            plan.row_slots,
            (plan.step, num_rows, num_tokens, sum(plan.row_starts)),
        )
        if num_tokens != num_rows:  # else each row runs one token, and where they are follows from the steps before
            lists += plan.row_starts, plan.row_counts
        # Most are empty in most steps.
        self._state.update(b"".join([array("q", items).tobytes() + b"." if items else b"." for items in lists]))

    def _turn(self) -> None:
        self.value = int.from_bytes(self._state.digest(), "little")
        self._state = _begun(self.value)


def _begun(value: int) -> blake2b:
    return blake2b(value.to_bytes(8, "little"), digest_size=8)
