"""Sequences that were in flight when a replica crashed: how many rows may be in flight together with one.

Knows the rows of one replica; must not know queues. After a crash with n rows each of them may run again with at most
n / 2, itself included, until it has sampled a token: so what crashes replicas is alone at last, and named.
"""

from __future__ import annotations

from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


def may_enter(rows: Rows, sequence: Sequence) -> bool:
    """Whether a waiting sequence may run beside what is in flight."""
    if not rows.suspects and sequence.suspect_bound is None:
        return True
    bounds = [other.suspect_bound for other in (*rows.suspects, sequence) if other.suspect_bound is not None]
    return num_in_flight(rows) + 1 <= min(bounds)


def num_in_flight(rows: Rows) -> int:
    """Distinct sequences that run or have rows in unanswered plans."""
    return len({*rows.running, *(sequence for plan in rows.unanswered for sequence in plan.rows)})
