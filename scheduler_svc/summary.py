"""The line about the load that the log gets now and then, and the totals at the end.

Pure arithmetic on two readings of the metrics. Knows no clock; must not know the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.statistics import Statistics
from scheduler_svc.metrics import (
    COMPUTED,
    ENDS,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    RECOMPUTED,
    REFUSALS,
    SAMPLED,
    SchedulerMetrics,
)


@dataclass(frozen=True)
class Reading:
    """Counters since the start, and the load, at one time."""

    at_ns: int
    num_computed_tokens: int
    num_sampled_tokens: int
    num_looked_up_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_host_blocks: int
    num_cached_host_blocks: int


def take_reading(metrics: SchedulerMetrics, statistics: Statistics, now_ns: int) -> Reading:
    """The present; `metrics` must have read `statistics`."""
    total = metrics.set.total
    replicas = statistics.replicas
    return Reading(
        at_ns=now_ns,
        num_computed_tokens=int(total(COMPUTED)),
        num_sampled_tokens=int(total(SAMPLED)),
        num_looked_up_tokens=int(total(PREFIX_QUERIES)),
        num_hit_tokens=int(total(PREFIX_HITS)),
        num_preemptions=int(total(PREEMPTIONS)),
        num_running=sum(each.num_running for each in replicas),
        num_waiting=sum(statistics.num_waiting.values()),
        num_blocks=sum(each.num_blocks for each in replicas),
        num_used_blocks=sum(each.num_used_blocks for each in replicas),
        num_host_blocks=sum(each.num_host_blocks for each in replicas),
        num_cached_host_blocks=sum(each.num_cached_host_blocks for each in replicas),
    )


def load_line(before: Reading, now: Reading) -> str | None:
    """What happened between two readings, and how it stands; None where nothing did and nothing is to be done."""
    num_computed = now.num_computed_tokens - before.num_computed_tokens
    if not (num_computed or now.num_running or now.num_waiting):
        return None
    seconds = max(1, now.at_ns - before.at_ns) / 1e9
    num_sampled = now.num_sampled_tokens - before.num_sampled_tokens
    # A row that samples computed the token before it: the rest is prompts, and what was lost and computed again.
    prompt_rate = max(0, num_computed - num_sampled) / seconds
    parts = [
        f"prompt {prompt_rate:.1f} tok/s",
        f"generation {num_sampled / seconds:.1f} tok/s",
        f"{now.num_running} running",
        f"{now.num_waiting} waiting",
        f"KV {_percent(now.num_used_blocks, now.num_blocks)}",
    ]
    if now.num_host_blocks:
        parts.append(f"host KV {_percent(now.num_cached_host_blocks, now.num_host_blocks)}")
    looked_up = now.num_looked_up_tokens - before.num_looked_up_tokens
    parts.append(f"prefix hits {_percent(now.num_hit_tokens - before.num_hit_tokens, looked_up)}")
    parts.append(f"{now.num_preemptions - before.num_preemptions} preemptions")
    return ", ".join(parts)


def totals_line(metrics: SchedulerMetrics) -> str:
    """What there was from start to end."""
    total = metrics.set.total
    hits = _percent(total(PREFIX_HITS), total(PREFIX_QUERIES))
    return (
        f"totals: {total(ENDS):.0f} attempts ended, {total(REFUSALS):.0f} refused, {total(COMPUTED):.0f} tokens "
        f"computed, {total(SAMPLED):.0f} sampled, {total(PREEMPTIONS):.0f} preemptions, {total(RECOMPUTED):.0f} tokens "
        f"recomputed, prefix hits {hits}"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
