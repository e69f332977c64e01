"""From the scheduler's options to the core's limits; nothing else."""

from __future__ import annotations

from scheduler_svc.config import SchedulerConfig, tenant_weights
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy


def core_limits(config: SchedulerConfig) -> CoreLimits:
    """The limits that the core is given."""
    target_ms = config.target_inter_token_latency_ms
    return CoreLimits(
        max_waiting=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_waiting_per_tenant=config.max_waiting_requests_per_tenant,
        max_waiting_tokens_per_tenant=config.max_waiting_tokens_per_tenant,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        tenants_share_prefixes=config.share_prefixes_between_tenants,
        policy=SchedulingPolicy(config.scheduling_policy),
        aging_ns=int(config.aging_time * 1e9),
        tenant_weights=tenant_weights(config.tenant_weights),
        preemption_mode=PreemptionMode(config.preemption_mode),
        target_inter_token_ns=None if target_ms is None else int(target_ms * 1e6),
        max_prefill_tokens=config.max_prefill_tokens,
        expected_output_tokens=config.expected_output_tokens,
    )
