"""What a replica has done since it attached, counted. Nothing is decided by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.plan import Limit


@dataclass(slots=True)
class ReplicaCounters:
    """Counts of one replica."""

    num_steps: int = 0
    """Steps answered."""
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    """By what became of the blocks."""
    limits: Counter[Limit] = field(default_factory=Counter)
    """Plans by what kept them from being bigger."""

    def note_step(self, num_tokens: int, num_sampled: int) -> None:
        """A step was answered."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_sampled_tokens += num_sampled
