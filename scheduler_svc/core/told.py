"""What steps and ends mean for those who are told of them: events, history and tenants' accounts.

Knows the ledger, a replica and its step; decides nothing. Each function writes into the ledger what its events say.
"""

from __future__ import annotations

from scheduler_svc.core.history import Decision
from scheduler_svc.core.ledger import Ledger
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import StepDraft
from scheduler_svc.core.types import (
    Ended,
    EndReason,
    Event,
    Finished,
    FinishReason,
    Preempted,
    ReplicaLost,
    Scheduled,
)


def ended(ledger: Ledger, sequence: Sequence, reason: EndReason, now: int, lost: ReplicaLost | None = None) -> Ended:
    """An attempt is over without completing its sequence."""
    ledger.close(sequence, now, reason.value)
    return Ended(sequence.sequence_id, reason, lost)


def finished(ledger: Ledger, sequence: Sequence, reason: FinishReason, now: int) -> Finished:
    """A sequence is complete."""
    ledger.close(sequence, now, f"finished: {reason.name}")
    return Finished(sequence.sequence_id, sequence.num_output_tokens, reason)


def of_step(ledger: Ledger, replica: Replica, draft: StepDraft, now: int) -> list[Event]:
    """A step was made: who outgrew the pool, follows, was preempted or started."""
    events: list[Event] = [finished(ledger, sequence, FinishReason.LENGTH, now) for sequence in draft.outgrown]
    replica_id, model = replica.spec.replica_id, replica.spec.model
    for follower, leader, num_blocks in draft.follows:
        reason = f"sequence {leader.sequence_id} computes the {num_blocks} blocks that they share"
        ledger.note(follower, Decision(now, "follows", reason, replica_id))
    for eviction in draft.evictions:
        sequence, num_blocks = eviction.sequence, eviction.num_blocks
        sequence.queued_at_ns = now
        decision = Decision(now, "preempted", f"{eviction.reason}; {eviction.mode.value}", replica_id, num_blocks)
        ledger.note(sequence, decision)
        ledger.charge(sequence)
        events.append(Preempted(sequence.sequence_id, replica_id, eviction.reason, num_blocks, eviction.mode))
    replica.counters.num_host_cached_tokens += draft.num_host_tokens
    events += [_started(ledger, replica, sequence, num, now) for sequence, num in draft.admissions.items()]
    if draft.admissions:
        num_tokens = sum(len(sequence.token_ids) for sequence in draft.admissions)
        if replica.had_no_room:
            ledger.room.pace(model).note_starts(len(draft.admissions), num_tokens, now)
        else:
            ledger.room.pace(model).note_found_room(now)
        ledger.note_if_empty(model)
    return events


def _started(ledger: Ledger, replica: Replica, sequence: Sequence, num_cached: int, now: int) -> Scheduled:
    num_again = max(0, sequence.num_lost_tokens - num_cached)
    replica.counters.num_cached_tokens += num_cached
    replica.counters.num_recomputed_tokens += num_again
    ledger.charge_start(sequence, num_cached)
    ledger.forget_place(sequence)
    replica_id, num_blocks = replica.spec.replica_id, len(sequence.block_ids)
    reason = f"first of those that fit, {len(replica.rows.running)} running with it"
    ledger.note(sequence, Decision(now, "scheduled", reason, replica_id, num_blocks, num_cached, num_again))
    return Scheduled(sequence.sequence_id, replica_id, num_cached, num_again, now - sequence.queued_at_ns)
