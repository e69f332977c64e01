"""Which waiting sequences enter a step, and for whom a running one must leave.

Knows the queue and one replica at a time; must not know events or results. Costs nothing per waiting sequence: at most
`_WINDOW` that do not fit are looked at, and none again until queue or pool changed.
"""

from __future__ import annotations

from scheduler_svc.core.placement import Placement
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.preemption import num_freed_blocks, strictly_worse
from scheduler_svc.core.queue import WaitingQueue, WaitingRoom
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import StepDraft

_WINDOW = 16
"""Waiting sequences that do not fit and are stepped over, in one plan, to find one behind them that does."""


class Admissions:
    """Admits from the waiting room."""

    def __init__(self, room: WaitingRoom, max_overtakes: int) -> None:
        self._room = room
        self._max_overtakes = max_overtakes
        self.placement = Placement()

    def requeue(self, draft: StepDraft) -> None:
        """Lets those wait that were preempted and have nothing to settle."""
        for sequence in draft.unqueued:
            self._room.add(sequence)
        draft.unqueued.clear()

    def someone_may_enter(self, replica: Replica) -> bool:
        """Whether the first that waits finds a slot, or one that it may displace."""
        queue = self._room.queue(replica.spec.model)
        if not queue:
            return False
        return replica.has_slot or bool(strictly_worse(replica.rows.running, queue[0]))

    def admit(self, replica: Replica, others: list[Replica], draft: StepDraft) -> Limit:
        """Admits as many as fit, best first; returns why not one more. `others`: the model's replicas."""
        queue = self._room.queue(replica.spec.model)
        blocked: list[Sequence] = []  # wait for blocks and go before those looked at later
        limit, index = Limit.NOTHING_WAITING, 0
        while index < min(len(queue), _WINDOW):
            if replica.blocked_at == (queue.num_changes, replica.kv.pool.num_releases):
                return Limit.BLOCKS
            sequence = queue[index]
            if not replica.has_slot and not _may_displace(replica, draft, sequence):
                return Limit.SLOTS
            if replica.has_slot and draft.num_left < 1:
                return Limit.TOKENS
            if not replica.could_hold(sequence):
                index += 1
                continue
            prefix = replica.kv.find_prefix(sequence)
            if len(others) > 1 and self.placement.leaves(sequence, prefix, replica, others):
                limit = Limit.PLACEMENT
                index += 1
            elif self._make_room(replica, draft, sequence, prefix):
                self._enter(queue, replica, draft, sequence, prefix)
                for other in blocked:
                    other.num_overtakes += 1
            else:
                limit = Limit.BLOCKS
                blocked.append(sequence)
                index += 1
            if any(other.num_overtakes >= self._max_overtakes for other in blocked):
                break
        if blocked and limit is Limit.BLOCKS and len(others) == 1:
            replica.blocked_at = (queue.num_changes, replica.kv.pool.num_releases)
        return limit

    def _enter(
        self, queue: WaitingQueue, replica: Replica, draft: StepDraft, sequence: Sequence, prefix: list[int]
    ) -> None:
        self._room.remove(sequence)
        self.placement.forget(sequence)
        sequence.num_overtakes = 0
        replica.admit(draft, sequence, prefix, others_wait=len(queue) > 0)

    def _make_room(self, replica: Replica, draft: StepDraft, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether slot and blocks suffice, after preempting strictly worse ones if that makes them suffice."""
        kv = replica.kv
        num_missing = kv.num_missing_blocks(sequence, prefix)
        if num_missing <= 0 and replica.has_slot:
            return True
        victims = strictly_worse(replica.rows.running, sequence)
        if not victims or num_freed_blocks(victims, prefix, kv) < num_missing:
            return False
        for victim in victims:
            replica.preempt(draft, victim, f"sequence {sequence.sequence_id} has a better priority")
            if replica.has_slot and draft.num_left > 0 and kv.num_missing_blocks(sequence, prefix) <= 0:
                break
        self.requeue(draft)
        return True


def _may_displace(replica: Replica, draft: StepDraft, sequence: Sequence) -> bool:
    """Whether a slot, with at least one token of this step, can be had from strictly worse ones."""
    victims = strictly_worse(replica.rows.running, sequence)
    return bool(victims) if draft.num_left > 0 else any(draft.tokens_of(victim) for victim in victims)
