"""The scheduler core: a synchronous, deterministic state machine whose every effect is returned as data.

Knows sequences, models and replicas; must not know clocks, sockets, protobuf or text. `now` is the caller's monotonic
time in nanoseconds and must not run backwards. A call that raises changed nothing.

    submit -> [waiting] -> plan -> [running] -> complete -> ... -> Finished | Ended      (preempted ones wait again)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from scheduler_svc.core.admission import Admissions
from scheduler_svc.core.plan import Limit, Planned, StepResult
from scheduler_svc.core.queue import WaitingRoom
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Move, Sequence, State
from scheduler_svc.core.statistics import ReplicaStatistics, Statistics
from scheduler_svc.core.step import StepDraft
from scheduler_svc.core.types import (
    CoreLimits,
    Ended,
    EndReason,
    Event,
    Finished,
    FinishReason,
    IllegalTransition,
    Preempted,
    Progress,
    Queued,
    RefusalReason,
    Refused,
    ReplicaLost,
    ReplicaSpec,
    Request,
    Scheduled,
)

_MAX_CRASHES_ALONE = 2
"""A sequence that crashed a replica so often while alone there is failed."""


class Scheduler:
    """All sequences and replicas of one scheduler process."""

    def __init__(self, limits: CoreLimits | None = None) -> None:
        self.limits = limits or CoreLimits()
        self.sequences: dict[int, Sequence] = {}
        """The live ones, by id."""
        self.replicas: dict[int, Replica] = {}
        """The attached ones, by id, in the order in which they attached."""
        self.room = WaitingRoom(self.limits)
        self.admissions = Admissions(self.room, self.limits.max_overtakes)
        self._longest: dict[str, _Longest] = {}
        self._tickets = count()

    # Sequences ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: int) -> list[Event]:
        """Accepts a sequence. Call `plan` for the replicas of its model afterwards.

        Returns Queued if asked for, or at once Finished(LENGTH) for a resumed one that holds all that fits. Raises
        Refused, and IllegalTransition if the id is in use.
        """
        if request.sequence_id in self.sequences:
            raise IllegalTransition(f"sequence id {request.sequence_id} is in use")
        _check_fields(request)
        longest = self._longest.get(request.model)
        if longest is None:
            served = ", ".join(sorted(self._longest)) or "none"
            raise Refused(RefusalReason.UNKNOWN_MODEL, "model", request.model, served, "name a model that is served")
        longest.check(request)
        num_tokens = len(request.prompt_token_ids) + len(request.prior_token_ids)
        if num_tokens >= longest.max_model_len or num_tokens > longest.num_cache_tokens:
            return [Finished(request.sequence_id, len(request.prior_token_ids), FinishReason.LENGTH)]
        self.room.check(request)
        sequence = _new_sequence(request, now, next(self._tickets))
        self.room.reserve(request)
        self.sequences[request.sequence_id] = sequence
        self.room.add(sequence)
        if not request.queue_events:
            return []
        return [Queued(request.sequence_id, self.room.queue(request.model).position(sequence.rank))]

    def cancel(self, sequence_id: int, now: int) -> list[Event]:
        """Ends a sequence wherever it is; its blocks are free at once. An id that has ended (or never was) is no error:
        a cancellation may cross the end on its way."""
        del now
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return []
        self._take_out(sequence)
        return [self._ended(sequence, EndReason.CANCELLED)]

    # Replicas ----------------------------------------------------------------------------------------------------

    def attach(self, replica: ReplicaSpec, now: int) -> list[Event]:
        """Takes an empty replica into service; call `plan` for it. Raises IllegalTransition if the id is in use."""
        del now
        if replica.replica_id in self.replicas:
            raise IllegalTransition(f"replica id {replica.replica_id} is in use")
        self.replicas[replica.replica_id] = Replica(replica, self.limits)
        longest = self._longest.setdefault(replica.model, _Longest())
        longest.max_model_len = max(longest.max_model_len, replica.max_model_len)
        longest.num_cache_tokens = max(longest.num_cache_tokens, replica.num_cache_tokens)
        return []

    def detach(self, replica_id: int, now: int) -> list[Event]:
        """A replica is gone: what ran there ends with REPLICA_LOST, what waits goes on waiting."""
        del now
        replica = self._replica(replica_id)
        del self.replicas[replica_id]
        self.admissions.placement.forget_replica(replica_id)
        ended, suspects = replica.rows.end_all()
        events: list[Event] = []
        for sequence in ended:
            num_rows = len(suspects) if sequence in suspects else 0
            events.append(self._ended(sequence, EndReason.REPLICA_LOST, ReplicaLost(replica_id, num_rows)))
        return events

    def plan(self, replica_id: int, now: int) -> Planned:
        """Decides the replica's next step. Call it after submit, attach, and complete, until it returns no plan.

        A plan counts as sent: answer it with `complete`, or `detach` the replica.
        """
        replica = self._replica(replica_id)
        if replica.is_full:
            return Planned(None, (), Limit.UNANSWERED_PLANS)
        draft = replica.open_step()
        self.admissions.requeue(draft)
        replica.share_tokens(draft, others_wait=self.admissions.someone_may_enter(replica))
        others = [other for other in self.replicas.values() if other.spec.model == replica.spec.model]
        limit = self.admissions.admit(replica, others, draft)
        plan = replica.close_step(draft)
        if limit is Limit.NOTHING_WAITING and draft.was_cut_short:
            limit = Limit.TOKENS
        return Planned(plan, self._plan_events(replica, draft, now), limit)

    def complete(self, replica_id: int, result: StepResult, now: int) -> list[Event]:
        """Takes the answer to the replica's oldest unanswered plan. Call `plan` for it afterwards.

        Raises ResultMismatch, changing nothing, for anything else: the replica disagrees and must be detached.
        """
        answer = self._replica(replica_id).complete(result)
        events: list[Event] = [self._ended(sequence, EndReason.UNDELIVERED) for sequence in answer.undelivered]
        events += [self._finished(sequence, reason) for sequence, reason in answer.finished]
        for sequence in answer.settled:
            self.room.add(sequence)
        for sequence in answer.advanced:
            num_known = len(sequence.token_ids)
            if (
                sequence.state is State.RUNNING
                and num_known - sequence.num_reported_tokens >= self.limits.progress_tokens
            ):
                sequence.num_reported_tokens = num_known
                events.append(Progress(sequence.sequence_id, sequence.num_output_tokens))
        return events

    # Looking in --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running sequence holds, on all replicas; returns how many blocks."""
        return sum(replica.kv.forget_idle() for replica in self.replicas.values())

    def statistics(self) -> Statistics:
        """A snapshot of the load."""
        replicas = tuple(_replica_statistics(replica) for replica in self.replicas.values())
        return Statistics(replicas, self.room.lengths(), self.room.num_tokens)

    # Helpers -----------------------------------------------------------------------------------------------------

    def _replica(self, replica_id: int) -> Replica:
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise IllegalTransition(f"replica id {replica_id} is not attached")
        return replica

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.room.remove(sequence)
            self.admissions.placement.forget(sequence)
            sequence.move(Move.END)
        else:
            assert sequence.replica_id is not None, "a sequence that runs or settles has a replica"
            self.replicas[sequence.replica_id].rows.end_early(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self.sequences[sequence.sequence_id]
        self.room.end_reservation(sequence.request)

    def _ended(self, sequence: Sequence, reason: EndReason, lost: ReplicaLost | None = None) -> Ended:
        self._forget(sequence)
        return Ended(sequence.sequence_id, reason, lost)

    def _finished(self, sequence: Sequence, reason: FinishReason) -> Finished:
        self._forget(sequence)
        return Finished(sequence.sequence_id, sequence.num_output_tokens, reason)

    def _plan_events(self, replica: Replica, draft: StepDraft, now: int) -> list[Event]:
        replica_id = replica.spec.replica_id
        events: list[Event] = [self._finished(sequence, FinishReason.LENGTH) for sequence in draft.outgrown]
        for eviction in draft.evictions:
            sequence = eviction.sequence
            sequence.queued_at_ns = now
            events.append(Preempted(sequence.sequence_id, replica_id, eviction.reason, eviction.num_blocks))
        for sequence, num_cached in draft.admissions.items():
            num_again = max(0, sequence.num_lost_tokens - num_cached)
            waited_ns = now - sequence.queued_at_ns
            events.append(Scheduled(sequence.sequence_id, replica_id, num_cached, num_again, waited_ns))
        return events


@dataclass(slots=True)
class _Longest:
    """The longest sequence that any replica of a model, attached or not, could take."""

    max_model_len: int = 0
    num_cache_tokens: int = 0

    def check(self, request: Request) -> None:
        """Raises Refused if the prompt and one token can never fit."""
        num_tokens = len(request.prompt_token_ids) + 1
        for name, limit, remedy in (
            ("max_model_len", self.max_model_len, "shorten the prompt"),
            ("the KV cache in tokens", self.num_cache_tokens, "shorten the prompt or give the worker more KV memory"),
        ):
            if num_tokens > limit:
                raise Refused(RefusalReason.TOO_LONG, f"prompt + 1 token against {name}", num_tokens, limit, remedy)


def _check_fields(request: Request) -> None:
    num_prior = len(request.prior_token_ids)
    checks = (
        (request.prompt_token_ids, "number of prompt_token_ids", 0, "at least 1", "send a prompt"),
        (
            request.max_tokens > num_prior,
            "max_tokens",
            request.max_tokens,
            f"more than the {num_prior} prior tokens",
            "",
        ),
        (request.attempt >= 1, "attempt", request.attempt, "at least 1", ""),
        (request.age_ns >= 0, "age_ns", request.age_ns, "at least 0", ""),
        (request.group_size >= 1, "group_size", request.group_size, "at least 1", ""),
        (
            request.group_size == 1 or request.group_id,
            "group_id",
            "empty",
            "a name if group_size > 1",
            "name the group",
        ),
    )
    for is_fine, name, value, limit, remedy in checks:
        if not is_fine:
            raise Refused(RefusalReason.INVALID, name, value, limit, remedy or f"correct {name}")
    num_alone = list(request.crash_group_sizes).count(1)
    if num_alone >= _MAX_CRASHES_ALONE:
        raise Refused(
            RefusalReason.POISON,
            "number of crashes of a replica that ran this sequence alone",
            num_alone,
            _MAX_CRASHES_ALONE - 1,
            "the request is not tried again",
        )


def _new_sequence(request: Request, now: int, ticket: int) -> Sequence:
    try:
        return Sequence(request, now, ticket)
    except (OverflowError, TypeError) as error:
        limit = "unsigned 32-bit integers"
        raise Refused(RefusalReason.INVALID, "a token id", str(error), limit, "send ids of the vocabulary") from error


def _replica_statistics(replica: Replica) -> ReplicaStatistics:
    pool, spec = replica.kv.pool, replica.spec
    return ReplicaStatistics(
        replica_id=spec.replica_id,
        name=spec.name,
        model=spec.model,
        num_running=len(replica.rows.running),
        num_blocks=pool.num_blocks,
        num_used_blocks=pool.num_blocks - pool.num_idle,
        num_free_blocks=pool.num_idle,
        num_cached_blocks=pool.num_kept,
        num_unanswered_plans=len(replica.rows.unanswered),
        load_tokens=replica.load_tokens,
        num_preemptions=replica.num_preemptions,
        num_steps=replica.num_steps,
    )
