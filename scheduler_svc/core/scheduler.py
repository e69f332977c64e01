"""The scheduler core: a synchronous, deterministic state machine whose every effect is returned as data.

Knows sequences, models and replicas; must not know clocks, sockets, protobuf or text. `now` is the caller's monotonic
time in nanoseconds and must not run backwards. A call that raises changed nothing.

    submit -> [waiting] -> plan -> [running] -> complete -> ... -> Finished | Ended      (preempted ones wait again)
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core import told
from scheduler_svc.core.admission import Admissions
from scheduler_svc.core.advice import Advisor
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.history import Decision, Explanation
from scheduler_svc.core.intake import check_fields, new_sequence
from scheduler_svc.core.ledger import Ledger
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.order import Order
from scheduler_svc.core.plan import Limit, Planned, StepResult
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.reports import explanation, replica_statistics
from scheduler_svc.core.sequence import Move, Sequence, State
from scheduler_svc.core.statistics import Statistics
from scheduler_svc.core.types import (
    Ended,
    EndReason,
    Event,
    Finished,
    FinishReason,
    IllegalTransition,
    Progress,
    Refused,
    ReplicaLost,
    ReplicaSpec,
    Request,
    Ticked,
)

_NO_ROOM = frozenset((Limit.SLOTS, Limit.BLOCKS, Limit.GROWTH, Limit.TOKENS, Limit.PREFILL_CAP))
"""Why somebody waits who would start if others left or were done."""


class Scheduler:
    """All sequences and replicas of one scheduler process."""

    def __init__(self, limits: CoreLimits | None = None) -> None:
        self.limits = limits or CoreLimits()
        self.order = Order(self.limits)
        self.ledger = Ledger(self.limits)
        self.sequences = self.ledger.sequences
        """The live ones, by id."""
        self.room = self.ledger.room
        self.fleet = Fleet(self.limits)
        self.replicas = self.fleet.replicas
        """The attached ones, by id, in the order in which they attached."""
        self.admissions = Admissions(self.room, self.order, self.limits)
        self._advisor = Advisor()
        self._num_refused: Counter[str] = Counter()
        self._num_expired = 0
        self._next_ticket = 0

    # Sequences ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: int) -> list[Event]:
        """Accepts a sequence. Call `plan` for the replicas of its model afterwards.

        Returns Queued if asked for, or at once Finished(LENGTH) for a resumed one that holds all that fits. Raises
        Refused, and IllegalTransition if the id is in use.
        """
        if request.sequence_id in self.sequences:
            raise IllegalTransition(f"sequence id {request.sequence_id} is in use")
        try:
            return self._accept(request, now)
        except Refused as refused:
            self._num_refused[refused.reason.value] += 1
            raise

    def _accept(self, request: Request, now: int) -> list[Event]:
        check_fields(request)
        longest = self.fleet.longest(request.model)
        longest.check(request)
        num_tokens = len(request.prompt_token_ids) + len(request.prior_token_ids)
        if num_tokens >= longest.max_model_len or num_tokens > longest.num_cache_tokens:
            return [Finished(request.sequence_id, len(request.prior_token_ids), FinishReason.LENGTH)]
        self.room.check(request, now)
        sequence = new_sequence(request, now, self._next_ticket, self.order)
        self._next_ticket += 1
        if request.deadline_ns is not None and not self.room.group_places.has_for(request):
            self.fleet.check_deadline(sequence, self.room, now)
        self.ledger.open(sequence, now)
        return [self.ledger.place(sequence, now)] if request.queue_events else []

    def cancel(self, sequence_id: int, now: int) -> list[Event]:
        """Ends a sequence wherever it is; its blocks are free at once. An id that has ended (or never was) is no error:
        a cancellation may cross the end on its way."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return []
        return [self._end_early(sequence, EndReason.CANCELLED, now)]

    def update(
        self, sequence_id: int, now: int, *, priority: int | None = None, deadline_ns: int | None = None
    ) -> list[Event]:
        """Changes a live sequence's priority and deadline (nanoseconds from now), and so its place; None: as it was.

        Call `plan` for the replicas of its model afterwards. Raises IllegalTransition if the id is not live.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise IllegalTransition(f"sequence id {sequence_id} is not live")
        new_priority = sequence.priority if priority is None else priority
        new_deadline = sequence.deadline_at_ns if deadline_ns is None else now + deadline_ns
        if sequence.state is State.RUNNING:
            self._home(sequence).rows.rerank(sequence, new_priority, new_deadline, self.order)
            self.room.dissolve(sequence)
        else:
            if sequence.state is State.WAITING:
                self.room.remove(sequence)
            sequence.priority, sequence.deadline_at_ns = new_priority, new_deadline
            sequence.rank = self.order.rank(sequence)
            if sequence.state is State.WAITING:
                self.room.add(sequence)
        self.ledger.deadlines.note(sequence)
        until = "no deadline" if new_deadline is None else f"deadline in {(new_deadline - now) / 1e9:.3f} s"
        self._note(sequence, now, "updated", f"priority {new_priority}, {until}")
        return []

    # Replicas ----------------------------------------------------------------------------------------------------

    def attach(self, replica: ReplicaSpec, now: int) -> list[Event]:
        """Takes an empty replica into service; call `plan` for it. Raises IllegalTransition if the id is in use."""
        del now
        self.fleet.attach(replica)
        return []

    def detach(self, replica_id: int, now: int) -> list[Event]:
        """A replica is gone: what ran there ends with REPLICA_LOST, what waits goes on waiting."""
        replica = self.fleet.detach(replica_id)
        self.admissions.placement.forget_replica(replica_id)
        ended, suspects = replica.rows.end_all()
        events: list[Event] = []
        for sequence in ended:
            num_rows = len(suspects) if sequence in suspects else 0
            events.append(
                told.ended(self.ledger, sequence, EndReason.REPLICA_LOST, now, ReplicaLost(replica_id, num_rows))
            )
        return events

    def drain(self, replica_id: int, now: int) -> list[Event]:
        """The replica takes no more sequences: what waits goes elsewhere, what runs there goes on until none is left.

        Call `plan` for the other replicas of its model. Raises IllegalTransition if the id is not attached.
        """
        del now
        replica = self.fleet.replica(replica_id)
        replica.is_draining = True
        for sequence in replica.rows.running:
            self.room.dissolve(sequence)
        return []

    def undrain(self, replica_id: int, now: int) -> list[Event]:
        """The replica takes sequences again; call `plan` for it. Raises IllegalTransition if the id is not attached."""
        del now
        self.fleet.replica(replica_id).is_draining = False
        return []

    # Steps -------------------------------------------------------------------------------------------------------

    def plan(self, replica_id: int, now: int) -> Planned:
        """Decides the replica's next step. Call it after submit, attach, and complete, until it returns no plan.

        A plan counts as sent: answer it with `complete`, or `detach` the replica. Its events may be of sequences that
        are not on this replica: those whose deadline has passed end here, before they cost another step.
        """
        replica = self.fleet.replica(replica_id)
        expired = self._expire(now)
        if replica.is_full:
            return Planned(None, expired, Limit.UNANSWERED_PLANS)
        draft = replica.open_step()
        self.admissions.requeue(draft)
        replica.share_tokens(draft, others_wait=self.admissions.someone_may_enter(replica))
        limit = self.admissions.admit(replica, self.fleet.of_model(replica.spec.model), draft)
        plan = replica.close_step(draft)
        events = [*expired, *told.of_step(self.ledger, replica, draft, now)]
        replica.no_room_at = replica.counters.num_steps if limit in _NO_ROOM else None
        if limit is Limit.NOTHING_WAITING and draft.was_cut_short:
            limit = draft.token_limit
        if plan is not None:
            replica.counters.limits[limit] += 1
        return Planned(plan, events, limit)

    def complete(self, replica_id: int, result: StepResult, now: int) -> list[Event]:
        """Takes the answer to the replica's oldest unanswered plan. Call `plan` for it afterwards.

        Raises ResultMismatch, changing nothing, for anything else: the replica disagrees and must be detached.
        """
        answer = self.fleet.replica(replica_id).complete(result)
        events: list[Event] = [
            told.ended(self.ledger, sequence, EndReason.UNDELIVERED, now) for sequence in answer.undelivered
        ]
        events += [told.finished(self.ledger, sequence, reason, now) for sequence, reason in answer.finished]
        for sequence in answer.settled:
            self.ledger.enqueue(sequence, now)
        for sequence in answer.advanced:
            if sequence.state is not State.RUNNING:
                continue
            self.ledger.charge(sequence)
            self.room.note_advance(sequence)
            if len(sequence.token_ids) - sequence.num_reported_tokens >= self.limits.progress_tokens:
                sequence.num_reported_tokens = len(sequence.token_ids)
                events.append(Progress(sequence.sequence_id, sequence.num_output_tokens))
        return events

    def tick(self, now: int) -> Ticked:
        """What time alone brings about; call it about once a second, and `plan` for all replicas afterwards."""
        events = [*self._expire(now), *self.ledger.changed_places(now)]
        return Ticked(events, self._advisor.look(self.replicas.values(), self.room.lengths(), now))

    # Looking in --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running sequence holds, on all replicas; returns how many blocks."""
        return sum(replica.kv.forget_idle() for replica in self.replicas.values())

    def explain(self, sequence_id: int) -> Explanation | None:
        """What was decided about a sequence and what it waits for; None for one that was never here, or long ago."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return self.ledger.history.ended(sequence_id)
        replicas = self.fleet.of_model(sequence.request.model)
        return explanation(sequence, self.room, replicas, self.ledger.history.decisions(sequence_id))

    def statistics(self) -> Statistics:
        """A snapshot of the load."""
        intervals = {model: pace.mean_interval_ns for model, pace in self.room.paces.items()}
        return Statistics(
            replicas=tuple(replica_statistics(replica) for replica in self.replicas.values()),
            num_waiting=self.room.lengths(),
            num_waiting_tokens=self.room.num_tokens,
            tenants=self.room.tenant_statistics(),
            num_following=len(self.room.leaders),
            num_refused=dict(self._num_refused),
            num_expired=self._num_expired,
            start_interval_ns={model: interval for model, interval in intervals.items() if interval is not None},
        )

    # Helpers -----------------------------------------------------------------------------------------------------

    def _home(self, sequence: Sequence) -> Replica:
        assert sequence.replica_id is not None, "a sequence that runs or settles has a replica"
        return self.replicas[sequence.replica_id]

    def _note(self, sequence: Sequence, now: int, what: str, reason: str) -> None:
        self.ledger.note(sequence, Decision(now, what, reason, sequence.replica_id))

    def _expire(self, now: int) -> list[Event]:
        passed = self.ledger.deadlines.pop_passed(now)
        self._num_expired += len(passed)
        return [self._end_early(sequence, EndReason.DEADLINE, now) for sequence in passed]

    def _end_early(self, sequence: Sequence, reason: EndReason, now: int) -> Ended:
        """Ends a sequence wherever it is."""
        if sequence.state is State.WAITING:
            self.room.remove(sequence)
            self.admissions.placement.forget(sequence)
            sequence.move(Move.END)
        else:
            self._home(sequence).end_early(sequence)
        return told.ended(self.ledger, sequence, reason, now)
