"""Who must leave a replica when blocks or slots run short. Decides; the replica acts.

The victim is the worst: largest priority number, then newest. A running row that grows may displace anyone; a waiting
one displaces only strictly worse ones, and only if that makes enough room.
"""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from scheduler_svc.core.kv_space import KvSpace
from scheduler_svc.core.sequence import Sequence


def strictly_worse(running: list[Sequence], sequence: Sequence) -> list[Sequence]:
    """Of the running ones (by ascending rank), those that a waiting one may displace, worst first."""
    return list(takewhile(lambda other: other.priority > sequence.priority, running))


def num_freed_blocks(victims: list[Sequence], prefix: list[int], kv: KvSpace) -> int:
    """Blocks that become idle, and stay so for a newcomer that takes `prefix`, when all the victims leave."""
    held = Counter(block for victim in victims for block in victim.block_ids)
    wanted = set(prefix)
    return sum(1 for block, num in held.items() if num == kv.pool.holds[block] and block not in wanted)
