"""What operators see, from the core's snapshots to protobuf. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.core.history import Decision, Explanation
from scheduler_svc.core.statistics import ReplicaStatistics, Statistics, TenantStatistics


def statistics_to_wire(statistics: Statistics, stalled: Collection[int], now: int) -> pb.GetStatisticsResponse:
    """The whole load; `stalled` are ids of replicas."""
    return pb.GetStatisticsResponse(
        replicas=replicas_to_wire(statistics, stalled),
        queues=[
            pb.QueueLoad(model=model, num_waiting=num, start_interval_ns=statistics.start_interval_ns.get(model))
            for model, num in statistics.num_waiting.items()
        ],
        tenants=[_tenant_to_wire(name, tenant) for name, tenant in statistics.tenants.items()],
        num_waiting_tokens=statistics.num_waiting_tokens,
        num_following=statistics.num_following,
        num_refused=statistics.num_refused,
        num_expired=statistics.num_expired,
        now_ns=now,
    )


def replicas_to_wire(statistics: Statistics, stalled: Collection[int]) -> list[pb.Replica]:
    """The replicas, each with the queue of its model."""
    waiting = statistics.num_waiting
    return [
        _replica_to_wire(replica, waiting.get(replica.model, 0), replica.replica_id in stalled)
        for replica in statistics.replicas
    ]


def _replica_to_wire(statistics: ReplicaStatistics, num_waiting: int, is_stalled: bool) -> pb.Replica:
    return pb.Replica(
        name=statistics.name,
        model=statistics.model,
        num_running=statistics.num_running,
        num_waiting=num_waiting,
        num_blocks=statistics.num_blocks,
        num_used_blocks=statistics.num_used_blocks,
        num_cached_blocks=statistics.num_cached_blocks,
        num_preemptions=statistics.num_preemptions,
        num_steps=statistics.num_steps,
        num_slots=statistics.num_slots,
        num_prefilling=statistics.num_prefilling,
        num_host_blocks=statistics.num_host_blocks,
        num_cached_host_blocks=statistics.num_cached_host_blocks,
        num_demoted_blocks=statistics.num_demoted_blocks,
        num_promoted_blocks=statistics.num_promoted_blocks,
        is_draining=statistics.is_draining,
        is_stalled=is_stalled,
        num_unanswered_plans=statistics.num_unanswered_plans,
        load_tokens=statistics.load_tokens,
        num_computed_tokens=statistics.num_computed_tokens,
        num_sampled_tokens=statistics.num_sampled_tokens,
        num_cached_tokens=statistics.num_cached_tokens,
        num_host_cached_tokens=statistics.num_host_cached_tokens,
        num_recomputed_tokens=statistics.num_recomputed_tokens,
        num_steps_by_limit=statistics.num_steps_by_limit,
        num_preemptions_by_kind=statistics.num_preemptions_by_kind,
        step_ns=None if statistics.step_ns is None else int(statistics.step_ns),
        token_ns=statistics.token_ns,
        copy_ns=statistics.copy_ns,
        max_prefill_tokens=statistics.max_prefill_tokens,
        has_kept_room=statistics.has_kept_room,
    )


def _tenant_to_wire(name: str, tenant: TenantStatistics) -> pb.TenantLoad:
    return pb.TenantLoad(
        tenant=name,
        num_waiting=tenant.num_waiting,
        num_waiting_tokens=tenant.num_waiting_tokens,
        num_served_tokens=int(tenant.num_served_tokens),
    )


def explanation_to_wire(explanation: Explanation, replicas: Mapping[int, str], now: int) -> pb.SequenceExplanation:
    """What was decided about a sequence; `replicas` gives the names of ids."""
    deadline = explanation.deadline_at_ns
    return pb.SequenceExplanation(
        sequence_id=explanation.sequence_id,
        request_id=explanation.request_id,
        state=explanation.state,
        waits_for=explanation.waits_for,
        position=explanation.position,
        priority=explanation.priority,
        deadline_in_ns=None if deadline is None else deadline - now,
        num_prompt_tokens=explanation.num_prompt_tokens,
        num_output_tokens=explanation.num_output_tokens,
        decisions=[_decision_to_wire(decision, replicas, now) for decision in explanation.decisions],
        num_forgotten=explanation.num_forgotten,
    )


def _decision_to_wire(decision: Decision, replicas: Mapping[int, str], now: int) -> pb.Decision:
    replica_id = decision.replica_id
    return pb.Decision(
        age_ns=max(0, now - decision.at_ns),
        what=decision.what,
        reason=decision.reason,
        replica="" if replica_id is None else replicas.get(replica_id, f"replica {replica_id}"),
        num_blocks=decision.num_blocks,
        num_cached_tokens=decision.num_cached_tokens,
        num_recomputed_tokens=decision.num_recomputed_tokens,
    )
