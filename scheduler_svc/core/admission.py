"""Which waiting sequences enter a step, and for whom a running one must leave.

Knows the waiting room and the replicas of a model; must not know events or results. Costs nothing per waiting sequence:
at most `_WINDOW` that do not fit are looked at, and none again until queue or memory changed.
"""

from __future__ import annotations

from scheduler_svc.core import suspects
from scheduler_svc.core.kv_space import Prefix
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.order import Order
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.preemption import displaceable, num_freed_blocks
from scheduler_svc.core.queue import AnyQueue
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.room import WaitingRoom
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.step import StepDraft

_WINDOW = 16
"""Waiting sequences that do not fit and are stepped over, in one plan, to find one behind them that does."""


class Admissions:
    """Admits from the waiting room."""

    def __init__(self, room: WaitingRoom, order: Order, limits: CoreLimits) -> None:
        self._room = room
        self._order = order
        self._max_overtakes = limits.max_overtakes
        self.placement = Placement()

    def requeue(self, draft: StepDraft) -> None:
        """Lets those wait that were preempted and have nothing to settle, and those that followed them."""
        for eviction in draft.evictions[draft.num_requeued :]:
            if eviction.sequence.state is State.WAITING:
                self._room.add(eviction.sequence)
            self._room.dissolve(eviction.sequence)
        draft.num_requeued = len(draft.evictions)

    def someone_may_enter(self, replica: Replica) -> bool:
        """Whether the first that waits finds a slot, or one that it may displace."""
        queue = self._room.queue(replica.spec.model)
        if not queue or replica.is_draining:
            return False
        return replica.has_slot or bool(displaceable(replica.rows, queue[0], self._order))

    def admit(self, replica: Replica, others: list[Replica], draft: StepDraft) -> Limit:
        """Admits as many as fit, best first; returns why not one more. `others`: the model's replicas."""
        queue = self._room.queue(replica.spec.model)
        if replica.is_draining:
            return Limit.DRAINING if queue else Limit.NOTHING_WAITING
        seen: set[Sequence] = set()
        blocked: list[Sequence] = []  # wait for blocks or rows and go before those looked at later
        limit, obstacles = Limit.NOTHING_WAITING, set[Limit]()
        while len(seen) < _WINDOW and all(other.num_overtakes < self._max_overtakes for other in blocked):
            if replica.blocked_at is not None and replica.blocked_at[1] == _state(queue, replica):
                return replica.blocked_at[0]
            sequence = _next(queue, seen)
            if sequence is None:
                break
            if not replica.has_slot and not self._may_displace(replica, draft, sequence):
                return Limit.SLOTS
            if replica.has_slot and draft.num_left < 1:
                return draft.token_limit
            seen.add(sequence)
            if not replica.could_hold(sequence):
                continue
            obstacle = self._try(queue, replica, others, draft, sequence)
            if obstacle is None:
                seen.discard(sequence)
                for other in blocked:
                    other.num_overtakes += 1
                continue
            limit = obstacle
            if obstacle is Limit.LEADER:
                seen.discard(sequence)
                continue
            obstacles.add(obstacle)
            if obstacle in (Limit.BLOCKS, Limit.GROWTH, Limit.SUSPECTS):
                blocked.append(sequence)
        if obstacles and obstacles <= {Limit.BLOCKS, Limit.GROWTH}:
            replica.blocked_at = (limit, _state(queue, replica))
        return limit

    def _try(
        self, queue: AnyQueue, replica: Replica, others: list[Replica], draft: StepDraft, sequence: Sequence
    ) -> Limit | None:
        """Admits the sequence, or says what stands against it."""
        prefix = replica.kv.find_prefix(sequence)
        found = replica.rows.in_flight.leader(sequence, prefix)
        num_shared = prefix.num_blocks if found is None else found[1]
        if len(others) > 1 and self.placement.leaves(sequence, num_shared, replica, others):
            return Limit.PLACEMENT
        if found is not None and sequence.suspect_bound is None and self._order.may_follow(sequence, found[0]):
            self.placement.forget(sequence)
            self._room.follow(sequence, *found)
            draft.follows.append((sequence, *found))
            return Limit.LEADER
        if not suspects.may_enter(replica.rows, sequence):
            return Limit.SUSPECTS
        worse = displaceable(replica.rows, sequence, self._order)
        if not replica.has_growth_room(sequence, prefix, worse):
            if replica.kv.num_missing_blocks(sequence, prefix) > 0:
                return Limit.BLOCKS
            replica.growth.note_refusal()
            return Limit.GROWTH
        if not self._make_room(replica, draft, (sequence, prefix), worse):
            return Limit.BLOCKS
        self._room.remove(sequence)
        self.placement.forget(sequence)
        sequence.num_overtakes = 0
        replica.admit(draft, sequence, prefix, others_wait=len(queue) > 0)
        return None

    def _make_room(
        self, replica: Replica, draft: StepDraft, newcomer: tuple[Sequence, Prefix], worse: list[Sequence]
    ) -> bool:
        """Whether slot and blocks suffice, after preempting of the `worse` if that makes them suffice."""
        kv, (sequence, prefix) = replica.kv, newcomer
        num_missing = kv.num_missing_blocks(sequence, prefix)
        if num_missing <= 0 and replica.has_slot:
            return True
        if not worse or num_freed_blocks(worse, prefix, kv) < num_missing:
            return False
        for victim in worse:
            replica.preempt(draft, victim, f"sequence {sequence.sequence_id} has a better priority")
            if replica.has_slot and draft.num_left > 0 and kv.num_missing_blocks(sequence, prefix) <= 0:
                break
        self.requeue(draft)
        return True

    def _may_displace(self, replica: Replica, draft: StepDraft, sequence: Sequence) -> bool:
        """Whether a slot, with at least one token of this step, can be had from strictly worse ones."""
        victims = displaceable(replica.rows, sequence, self._order)
        return bool(victims) if draft.num_left > 0 else any(draft.tokens_of(victim) for victim in victims)


def _next(queue: AnyQueue, seen: set[Sequence]) -> Sequence | None:
    """The best that waits and was not looked at in this step."""
    for sequence in queue:
        if sequence not in seen:
            return sequence
    return None


def _state(queue: AnyQueue, replica: Replica) -> tuple[int, int]:
    """While this stands still, what did not fit does not fit: blocks and slots come free when somebody leaves."""
    return (queue.num_changes, replica.rows.num_exits)
