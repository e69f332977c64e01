"""Who goes before whom: the rank of a sequence, and whether one that waits may displace one that runs.

Knows priorities, deadlines and times of one sequence or two; must not know queues, replicas or tenants' service.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.limits import CoreLimits, SchedulingPolicy
from scheduler_svc.core.types import Request

Rank = tuple[int, int, int]
"""Larger goes first."""


class Ranked(Protocol):
    """What the order asks of a sequence. `rank` is what `Order.rank` gave when the sequence came or was updated."""

    accepted_ns: int
    deadline_at_ns: int | None
    priority: int
    ticket: int
    request: Request

    @property
    def rank(self) -> Rank: ...


class Order:
    """The order that the limits ask for.

    A rank is fixed when the sequence comes (or is updated), so no queue is ever sorted anew: instead of growing old, a
    sequence is placed in time.

        due = priority * aging_ns + min(deadline, accepted + aging_ns)         the smallest goes first

    Among equals this is the earliest deadline, one without deadline being due aging_ns after it was accepted, and who
    came first. A sequence of priority p accepted at t goes before every one of priority q which is accepted later than
    t + (p - q + 1) * aging_ns: that is how long newcomers can hold it back.
    """

    __slots__ = ("_aging_ns", "_policy")

    def __init__(self, limits: CoreLimits | None = None) -> None:
        limits = limits or CoreLimits()
        self._policy = limits.policy
        self._aging_ns = limits.aging_ns

    def rank(self, sequence: Ranked) -> Rank:
        """The sequence's rank, from what it says of itself now."""
        accepted = sequence.accepted_ns
        due = accepted
        if self._policy is not SchedulingPolicy.FCFS:
            due = accepted + self._aging_ns
            if sequence.deadline_at_ns is not None:
                due = min(due, sequence.deadline_at_ns)
            due += sequence.priority * self._aging_ns
        return (-due, -accepted, -sequence.ticket)

    def may_displace(self, waiting: Ranked, running: Ranked) -> bool:
        """Whether the waiting one is strictly better and, by its rank, not yet held back by the other's age."""
        if self._policy is SchedulingPolicy.FCFS or running.priority <= waiting.priority:
            return False
        if self._policy is SchedulingPolicy.FAIR and running.request.tenant != waiting.request.tenant:
            return False
        return running.rank < waiting.rank

    def may_follow(self, follower: Ranked, leader: Ranked) -> bool:
        """Whether the leader is not worse than the follower, so that waiting for it costs the follower no place."""
        return self._policy is SchedulingPolicy.FCFS or leader.priority <= follower.priority
