"""Answers to operators' questions, made from the core's state when asked.

Reads replicas, room and sequences; changes nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core import suspects
from scheduler_svc.core.history import Decision, Explanation
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.room import WaitingRoom
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.statistics import ReplicaStatistics


def replica_statistics(replica: Replica) -> ReplicaStatistics:
    """One replica's load and what it has done."""
    pool, host, spec, counters = replica.kv.pool, replica.kv.host, replica.spec, replica.counters
    step_ns = replica.rates.step_ns
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
        num_preemptions=counters.preemptions.total(),
        num_steps=counters.num_steps,
        num_host_blocks=spec.num_host_blocks,
        num_cached_host_blocks=host.pool.num_kept if host is not None else 0,
        num_demoted_blocks=host.num_demoted if host is not None else 0,
        num_promoted_blocks=host.num_promoted if host is not None else 0,
        num_prefilling=len(replica.rows.filling),
        num_slots=replica.max_running,
        is_draining=replica.is_draining,
        num_preemptions_by_kind=dict(counters.preemptions),
        num_steps_by_limit={limit.value: num for limit, num in counters.limits.items()},
        num_computed_tokens=counters.num_computed_tokens,
        num_sampled_tokens=counters.num_sampled_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        num_host_cached_tokens=counters.num_host_cached_tokens,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        step_ns=None if step_ns is None else int(step_ns),
        token_ns=replica.rates.token_ns,
        copy_ns=replica.rates.copy_ns,
        max_prefill_tokens=replica.max_prefill_tokens,
        has_kept_room=replica.growth.is_on,
    )


def explanation(
    sequence: Sequence, room: WaitingRoom, replicas: Iterable[Replica], history: tuple[tuple[Decision, ...], int]
) -> Explanation:
    """Where a sequence stands, what it waits for and how that came about."""
    waits = sequence.state is State.WAITING
    decisions, num_forgotten = history
    return Explanation(
        sequence_id=sequence.sequence_id,
        request_id=sequence.request.request_id,
        state=sequence.state.value,
        waits_for=_obstacles(sequence, room, replicas) if waits else "",
        position=room.queue(sequence.request.model).position(sequence) if waits else None,
        priority=sequence.priority,
        deadline_at_ns=sequence.deadline_at_ns,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        decisions=decisions,
        num_forgotten=num_forgotten,
    )


def _obstacles(sequence: Sequence, room: WaitingRoom, replicas: Iterable[Replica]) -> str:
    leader = room.leaders.get(sequence)
    if leader is not None:
        num_blocks = room.followers[leader][sequence]
        return f"sequence {leader.sequence_id}, which computes the {num_blocks} blocks that they share"
    obstacles = [f"{replica.spec.name}: {_obstacle(sequence, replica)}" for replica in replicas]
    return "; ".join(obstacles) or f"a replica of model {sequence.request.model!r}"


def _obstacle(sequence: Sequence, replica: Replica) -> str:
    if replica.is_draining:
        return "draining"
    if not replica.could_hold(sequence):
        return "too small for it"
    if not replica.has_slot:
        return f"no slot of {replica.max_running} is free"
    prefix = replica.kv.find_prefix(sequence)
    num_missing = replica.kv.num_missing_blocks(sequence, prefix)
    if num_missing > 0:
        return f"{num_missing} more KV blocks than the {replica.kv.pool.num_idle} that are free"
    if not suspects.may_enter(replica.rows, sequence):
        return f"too many rows ({suspects.num_in_flight(replica.rows)}) beside suspects of a crash"
    if not replica.has_growth_room(sequence, prefix):
        return "room is kept for the growth of running sequences"
    return "its turn"
