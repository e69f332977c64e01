"""Snapshots of the core's load, for metrics and operators. Numbers alone: no sequence, no decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica's load at this moment. Counters count since it attached."""

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
    num_steps: int
    """Steps completed."""
    num_host_blocks: int = 0
    """KV blocks in host memory."""
    num_cached_host_blocks: int = 0
    """Of those, findable by prefix; the others are free."""
    num_demoted_blocks: int = 0
    """Copies from device to host."""
    num_promoted_blocks: int = 0
    """Copies from host to device."""
    num_prefilling: int = 0
    """Running sequences that have prompt (or lost) tokens to compute."""
    num_slots: int = 0
    """Sequences that may run at once."""
    is_draining: bool = False
    """Whether it takes no new sequences."""
    num_preemptions_by_kind: Mapping[str, int] = field(default_factory=dict)
    """"recompute" and "swap"."""
    num_steps_by_limit: Mapping[str, int] = field(default_factory=dict)
    """Plans by what stopped them from being bigger (the values of Limit)."""
    num_computed_tokens: int = 0
    """Tokens of answered steps."""
    num_sampled_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that admitted sequences found cached, in either tier."""
    num_host_cached_tokens: int = 0
    """Of those, in the host's."""
    num_recomputed_tokens: int = 0
    """Tokens computed once before: of preempted and resumed sequences."""
    step_ns: int | None = None
    """Time of a step without a token, by the replica's own steps; None: not known yet."""
    token_ns: float | None = None
    """Time that one more token in a step takes."""
    copy_ns: float | None = None
    """Time that the copy of one block between the tiers takes."""
    max_prefill_tokens: int | None = None
    """Prompt tokens that a step takes now while sequences decode; None: as many as fit."""
    has_kept_room: bool = False
    """Whether somebody had to wait or leave for others to grow since it was last empty."""


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """One tenant's part."""

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_served_tokens: int = 0
    """Tokens computed for it since it was last heard of, under the fair policy."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The core's load at this moment."""

    replicas: tuple[ReplicaStatistics, ...] = ()
    num_waiting: dict[str, int] = field(default_factory=dict)
    """Waiting sequences by model; preempted ones and followers of a leader included."""
    num_waiting_tokens: int = 0
    """Their known tokens, in all."""
    tenants: Mapping[str, TenantStatistics] = field(default_factory=dict)
    """Tenants with waiting sequences, and those that the fair policy keeps count of."""
    num_following: int = 0
    """Waiting sequences whose next blocks another is computing."""
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """Refusals by reason."""
    num_expired: int = 0
    """Sequences ended by their deadline."""
    start_interval_ns: Mapping[str, int] = field(default_factory=dict)
    """By model: time between two starts of those that had to wait for room; absent: none seen yet."""
