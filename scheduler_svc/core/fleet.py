"""The replicas that are attached, by model, and what any of them could ever take or will soon have time for.

Knows replicas, and of the waiting room how many go before one; must not know which sequence is where.
"""

from __future__ import annotations

from scheduler_svc.core.intake import Longest
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.room import WaitingRoom
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import IllegalTransition, RefusalReason, Refused, ReplicaSpec


class Fleet:
    """All replicas."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self.replicas: dict[int, Replica] = {}
        """By id, in the order in which they attached."""
        self._by_model: dict[str, list[Replica]] = {}
        self._longest: dict[str, Longest] = {}

    def attach(self, spec: ReplicaSpec) -> None:
        """Takes an empty replica into service. Raises IllegalTransition if the id is in use."""
        if spec.replica_id in self.replicas:
            raise IllegalTransition(f"replica id {spec.replica_id} is in use")
        replica = self.replicas[spec.replica_id] = Replica(spec, self._limits)
        self._by_model.setdefault(spec.model, []).append(replica)
        longest = self._longest.setdefault(spec.model, Longest())
        longest.max_model_len = max(longest.max_model_len, spec.max_model_len)
        longest.num_cache_tokens = max(longest.num_cache_tokens, spec.num_cache_tokens)

    def detach(self, replica_id: int) -> Replica:
        """The replica is gone. Raises IllegalTransition if the id is not attached."""
        replica = self.replica(replica_id)
        del self.replicas[replica_id]
        self._by_model[replica.spec.model].remove(replica)
        return replica

    def replica(self, replica_id: int) -> Replica:
        """An attached replica. Raises IllegalTransition if the id is not attached."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise IllegalTransition(f"replica id {replica_id} is not attached")
        return replica

    def of_model(self, model: str) -> list[Replica]:
        """The model's attached replicas."""
        return self._by_model.get(model, [])

    def longest(self, model: str) -> Longest:
        """The longest sequence of a model. Raises Refused if no replica ever served it."""
        longest = self._longest.get(model)
        if longest is None:
            served = ", ".join(sorted(self._longest)) or "none"
            raise Refused(RefusalReason.UNKNOWN_MODEL, "model", model, served, "name a model that is served")
        return longest

    def check_deadline(self, sequence: Sequence, room: WaitingRoom, now: int) -> None:
        """Raises Refused if a new sequence's first token is to be expected after its deadline."""
        assert sequence.deadline_at_ns is not None, "only who has a deadline can miss it"
        left_ns = sequence.deadline_at_ns - now
        if sequence.request.attempt > 1 and left_ns > 0:
            return
        expected_ns = self._wait_ns(sequence, room, now) + self._first_token_ns(sequence)
        if left_ns <= 0 or expected_ns > left_ns:
            raise Refused(
                RefusalReason.DEADLINE,
                "time to the first token",
                f"about {max(expected_ns, 0) / 1e9:.3g} s",
                f"the {left_ns / 1e9:.3g} s left to the deadline",
                "allow more time, or try again when the queue is shorter",
            )

    def _wait_ns(self, sequence: Sequence, room: WaitingRoom, now: int) -> int:
        """Time until it starts, at the pace of the last starts; 0 if a slot is free or no start was seen."""
        model = sequence.request.model
        num_free = sum(
            replica.max_running - len(replica.rows.running)
            for replica in self.of_model(model)
            if not replica.is_draining
        )
        num_before = room.queue(model).position(sequence) - num_free
        interval_ns = room.pace(model).interval_ns(now)
        return 0 if num_before < 0 or interval_ns is None else (num_before + 1) * interval_ns

    def _first_token_ns(self, sequence: Sequence) -> int:
        """Time to compute its prompt where that is quickest; 0 if no replica's rates are known."""
        times = []
        for replica in self.of_model(sequence.request.model):
            step_ns, token_ns = replica.rates.step_ns, replica.rates.token_ns
            if step_ns is None or token_ns is None:
                return 0
            num_cached = replica.kv.find_prefix(sequence).num_blocks * replica.spec.block_size
            times.append(step_ns + token_ns * (len(sequence.token_ids) - num_cached))
        return int(min(times, default=0.0))
