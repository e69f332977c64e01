"""Who must leave a replica when blocks or slots run short, and what becomes of its blocks. Decides; the replica acts.

Knows the rows and blocks of one replica; must not know queues or events. The victim is the worst, of least rank
(`order.py`). A running row that grows may displace anyone; a waiting one displaces only strictly worse ones, and only
if that makes enough room.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from operator import attrgetter

from scheduler_svc.core.kv_space import KvSpace, Prefix
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.order import Order
from scheduler_svc.core.rates import StepRates
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence

_rank = attrgetter("rank")


def displaceable(rows: Rows, sequence: Sequence, order: Order) -> list[Sequence]:
    """Of the running ones, those that a waiting one may displace, worst first."""
    if not rows.priorities or max(rows.priorities) <= sequence.priority:
        return []
    worse = rows.running[: bisect_left(rows.running, sequence.rank, key=_rank)]
    return [other for other in worse if order.may_displace(sequence, other)]


def num_freed_blocks(victims: list[Sequence], prefix: Prefix, kv: KvSpace) -> int:
    """Blocks that become idle, and stay so for a newcomer that takes `prefix`, when all the victims leave."""
    held = Counter(block for victim in victims for block in victim.block_ids)
    wanted = set(prefix.device)
    return sum(1 for block, num in held.items() if num == kv.pool.holds[block] and block not in wanted)


def choose_mode(wanted: PreemptionMode, kv: KvSpace, rates: StepRates) -> PreemptionMode:
    """What becomes of a victim's blocks: RECOMPUTE or SWAP.

    AUTO compares bytes to copy with tokens to compute; both grow with the blocks, so one block decides.
    """
    if kv.host is None or wanted is PreemptionMode.RECOMPUTE:
        return PreemptionMode.RECOMPUTE
    return PreemptionMode.SWAP if copies_pay(wanted, kv.block_size, rates) else PreemptionMode.RECOMPUTE


def copies_pay(wanted: PreemptionMode, block_size: int, rates: StepRates) -> bool:
    """AUTO: whether copying a block out and back takes no longer than computing its tokens; else, or unknown: true."""
    if wanted is not PreemptionMode.AUTO or rates.copy_ns is None or rates.token_ns is None:
        return True
    return 2 * rates.copy_ns <= block_size * rates.token_ns
