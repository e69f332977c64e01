"""Snapshots of the core's load, for metrics and operators. Numbers alone: no sequence, no decision."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica's load at this moment."""

    replica_id: int
    name: str
    model: str
    num_running: int
    """Sequences in slots."""
    num_blocks: int
    """KV blocks of the device."""
    num_used_blocks: int
    """Of those, held by running sequences."""
    num_free_blocks: int
    """Of those, held by none: num_blocks - num_used_blocks."""
    num_cached_blocks: int
    """Of the free ones, findable by prefix."""
    num_unanswered_plans: int
    load_tokens: int
    """Known tokens of its sequences whose computation is not answered yet, plus one per running sequence."""
    num_preemptions: int
    """Since it attached."""
    num_steps: int
    """Steps completed since it attached."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The core's load at this moment."""

    replicas: tuple[ReplicaStatistics, ...] = ()
    num_waiting: dict[str, int] = field(default_factory=dict)
    """Waiting sequences by model; preempted ones included."""
    num_waiting_tokens: int = 0
    """Their known tokens, in all."""
