"""Lines for an operator's log: what holds the load up, and which setting changes it.

Looks at queues and replicas from time to time; decides nothing. Each line is said once per occasion.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from scheduler_svc.core.limits import SECOND_NS
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.replica import Replica

_GROWTH_NS = 60 * SECOND_NS
"""A queue must have grown for so long."""
_REMEDIES = {
    Limit.BLOCKS: "KV blocks are short: raise --num-kv-blocks or --kv-cache-memory",
    Limit.GROWTH: "KV blocks are short: raise --num-kv-blocks or --kv-cache-memory",
    Limit.SLOTS: "slots are short: raise --max-num-seqs",
    Limit.TOKENS: "the token budget is short: raise --max-num-batched-tokens",
    Limit.PREFILL_CAP: "prompts are held back for the decoding sequences: raise the target inter-token latency",
}
_ADD_REPLICA = "or add a replica"


class _Growing:
    """How long one queue was, over the last minute."""

    __slots__ = ("lengths", "said")

    def __init__(self) -> None:
        self.lengths: deque[tuple[int, int]] = deque()  # (time, length)
        self.said = False

    def has_grown(self, num_waiting: int, now: int) -> tuple[int, int] | None:
        """(length then, length now) if it is longer than at any time a minute and more ago, never being empty."""
        if num_waiting == 0:
            self.lengths.clear()
            self.said = False
            return None
        self.lengths.append((now, num_waiting))
        while len(self.lengths) > 1 and self.lengths[1][0] <= now - _GROWTH_NS:
            self.lengths.popleft()
        since, before = self.lengths[0]
        return (before, num_waiting) if now - since >= _GROWTH_NS and num_waiting > before else None


class Advisor:
    """What was said and what was seen."""

    __slots__ = ("_growing", "_kept_room", "_limits_seen")

    def __init__(self) -> None:
        self._growing: dict[str, _Growing] = {}
        self._limits_seen: dict[str, tuple[int, Counter[Limit]]] = {}  # model -> counts at a time in the last minutes
        self._kept_room: set[int] = set()

    def look(self, replicas: Iterable[Replica], lengths: Mapping[str, int], now: int) -> list[str]:
        """Lines that are due now."""
        attached = list(replicas)
        lines = [line for replica in attached if (line := self._on_preemptions(replica)) is not None]
        self._kept_room &= {replica.spec.replica_id for replica in attached}
        for model in sorted(lengths):
            own = [replica for replica in attached if replica.spec.model == model]
            line = self._on_queue(model, lengths[model], own, now)
            if line is not None:
                lines.append(line)
        return lines

    def _on_preemptions(self, replica: Replica) -> str | None:
        replica_id, spec = replica.spec.replica_id, replica.spec
        if not replica.growth.is_on:
            self._kept_room.discard(replica_id)
            return None
        if replica_id in self._kept_room:
            return None
        self._kept_room.add(replica_id)
        num_preempted, num_running = replica.counters.preemptions.total(), len(replica.rows.running)
        return (
            f"replica {spec.name}: {spec.num_device_blocks} KV blocks ({spec.num_cache_tokens} tokens) are too few for "
            f"the sequences that could run at once, {num_preempted} preemptions so far; admission keeps room for the "
            f"growth of those that run ({num_running} of {replica.max_running}). To run more, raise --num-kv-blocks or "
            f"--kv-cache-memory; to be spared preemptions for certain, lower --max-num-seqs"
        )

    def _on_queue(self, model: str, num_waiting: int, replicas: list[Replica], now: int) -> str | None:
        growing = self._growing.setdefault(model, _Growing())
        total: Counter[Limit] = Counter()
        for replica in replicas:
            total.update(replica.counters.limits)
        grown = growing.has_grown(num_waiting, now)
        seen_at, seen = self._limits_seen.setdefault(model, (now, total))
        if now - seen_at >= _GROWTH_NS:
            self._limits_seen[model] = (now, total)
        if grown is None or growing.said:
            return None
        growing.said = True
        remedy = "no replica is attached: start one with octavo worker"
        if replicas:
            recent = {limit: total[limit] - seen[limit] for limit in _REMEDIES if total[limit] > seen[limit]}
            worst = max(recent, key=lambda limit: recent[limit], default=None)
            remedy = f"{_REMEDIES[worst]}, {_ADD_REPLICA}" if worst is not None else "add a replica"
        return f"model {model}: the queue grew from {grown[0]} to {grown[1]} within a minute; {remedy}"
