"""What bounds the core and what it prefers: one frozen value, each field with its default and its meaning.

Knows numbers alone. Limits of a replica are in its ReplicaSpec; where both bound the same thing, the smaller one holds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

SECOND_NS = 1_000_000_000


class SchedulingPolicy(enum.Enum):
    """Who goes first among those that wait."""

    FCFS = "fcfs"
    """Who came first. Priorities and deadlines order nothing, and nobody displaces anybody."""
    PRIORITY = "priority"
    """The smaller priority number; strictly better work displaces running work, equal work never does. Among equals
    the earliest deadline, then who came first. Without priorities and deadlines this is FCFS."""
    FAIR = "fair"
    """The tenant that was served least for its weight. Inside a tenant as PRIORITY."""


class PreemptionMode(enum.Enum):
    """What becomes of the computed blocks of a sequence that loses its slot."""

    RECOMPUTE = "recompute"
    """They stay findable on the device until they are reused, then they are lost."""
    SWAP = "swap"
    """Those which are reused are copied to the host first, and back when the sequence goes on."""
    AUTO = "auto"
    """Whichever takes less time by the replica's own steps so far; SWAP until a copy was measured. Nor is a cached
    block copied to the host, or back, where computing it again takes less."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """What bounds the core beside the replicas' own limits."""

    max_waiting: int = 2048
    """Sequences that may wait; the next is refused with QUEUE_FULL. Resumed ones (attempt > 1) never are, and one group
    alone may always wait."""
    max_waiting_tokens: int = 4_000_000
    """Prompt and prior tokens that waiting sequences may hold together. One sequence alone may always wait."""
    max_waiting_per_tenant: int | None = None
    """As max_waiting, for each tenant; None: a tenant may fill the queue."""
    max_waiting_tokens_per_tenant: int | None = None
    """As max_waiting_tokens, for each tenant; None: a tenant may fill the queue."""
    max_num_seqs: int | None = None
    """Most sequences that run at once on a replica, if below its slots."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step, if below the replica's own limit. Each running row gets at least one, so no more rows
    than this run."""
    enable_prefix_caching: bool = True
    """Whether full blocks are findable by their content, also while another sequence computes them."""
    tenants_share_prefixes: bool = False
    """Whether a tenant finds the blocks of another one's prompts, and so could learn by their speed what they were."""
    max_unanswered_plans: int = 2
    """Plans that a replica may hold unanswered (pipelining depth)."""
    progress_tokens: int = 32
    """Output tokens between two Progress events of a sequence, at least."""
    max_overtakes: int = 64
    """Sequences that may start before one which waits for blocks, although it goes before them. After that many, no
    other starts until it does."""
    policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    """Who goes first."""
    aging_ns: int = 60 * SECOND_NS
    """The wait that is worth one step of priority, and the most a deadline is worth among equals. A sequence of
    priority p accepted at t goes before every one of priority q that is accepted later than t + (p - q + 1) *
    aging_ns: newcomers cannot hold it back any longer. FCFS knows no aging, and needs none."""
    tenant_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """FAIR: shares of the tenants, relative to one another; a tenant that is not named has 1."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """What becomes of the blocks of preempted sequences, on replicas with host blocks. SWAP needs prefix caching."""
    target_inter_token_ns: int | None = None
    """Time between two tokens of a sequence to aim at: while sequences decode, a step takes no more prompt tokens than
    the replica's measured rates allow for. None: as many as bring a step's fixed cost down to a ninth of it."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens in a step while sequences decode, whatever the measured rates say; None: they alone decide."""
    expected_output_tokens: int = 256
    """Output tokens that a sequence is thought to get, unless its request allows for fewer, before others that ended on
    its replica told how many: admission keeps blocks for the growth of those that run."""
    max_explained: int = 1024
    """Ended sequences that `explain` still knows."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_waiting_tokens", "max_unanswered_plans", "progress_tokens", "aging_ns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting_per_tenant",
            "max_waiting_tokens_per_tenant",
            "target_inter_token_ns",
            "max_prefill_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None for no such limit")
        for name in ("max_overtakes", "max_explained", "expected_output_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"tenant_weights[{tenant!r}] is {weight}; a weight is a finite number above 0")
        if self.preemption_mode is PreemptionMode.SWAP and not self.enable_prefix_caching:
            raise ValueError("preemption_mode is swap without prefix caching; enable it, or use auto or recompute")
