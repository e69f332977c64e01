"""Which replica of a model a waiting sequence goes to.

Score, in tokens: the longest prefix that is cached there, or being computed, minus the replica's load. The replica that
plans takes a sequence unless another with room for it scores strictly better; then it is promised to that one, and the
promise counts as load there until the sequence starts. A promise binds nobody: each replica that plans decides anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence

_MAX_CHANGES = 4
"""How often the promise of one sequence may move to another replica; after that whoever plans takes it."""


@dataclass(slots=True)
class _Promise:
    replica_id: int
    num_tokens: int
    num_changes: int


class Placement:
    """Promises of waiting sequences."""

    __slots__ = ("_num_rows", "_num_tokens", "_promises")

    def __init__(self) -> None:
        self._promises: dict[Sequence, _Promise] = {}
        self._num_tokens: dict[int, int] = {}  # replica id -> tokens promised to it
        self._num_rows: dict[int, int] = {}

    def leaves(self, sequence: Sequence, num_blocks: int, replica: Replica, others: Iterable[Replica]) -> bool:
        """Whether `replica` leaves the sequence, of which it has so many blocks, to one of the others."""
        num_changes, before = self._take_back(sequence)
        if num_changes > _MAX_CHANGES:
            return False
        score = num_blocks * replica.spec.block_size - self._load(replica)
        best: tuple[Replica, int] | None = None
        for other in others:
            if other is replica or not self._has_slot(other) or not other.could_hold(sequence):
                continue
            load = self._load(other)
            if len(sequence.token_ids) - load <= score:
                continue  # not even a whole cached prompt would make it the better one
            found = other.kv.find_prefix(sequence)
            leader = other.rows.in_flight.leader(sequence, found)
            num_cached = (found.num_blocks if leader is None else leader[1]) * other.spec.block_size
            if num_cached - load > score and other.kv.num_missing_blocks(sequence, found) <= 0:
                score = num_cached - load
                best = (other, len(sequence.token_ids) - num_cached + 1)
        if best is None:
            return False
        replica_id = best[0].spec.replica_id
        self._promise(sequence, _Promise(replica_id, best[1], num_changes + (before not in (None, replica_id))))
        return True

    def forget(self, sequence: Sequence) -> None:
        """The sequence waits no longer."""
        self._take_back(sequence)

    def forget_replica(self, replica_id: int) -> None:
        """The replica is gone."""
        for sequence in [key for key, promise in self._promises.items() if promise.replica_id == replica_id]:
            self._take_back(sequence)
        self._num_tokens.pop(replica_id, None)
        self._num_rows.pop(replica_id, None)

    def check(self, waiting: set[Sequence]) -> bool:
        """Whether only waiting sequences are promised, and promises add up."""
        promises = self._promises.values()
        num_tokens = sum(promise.num_tokens for promise in promises)
        agrees = num_tokens == sum(self._num_tokens.values()) and len(promises) == sum(self._num_rows.values())
        return agrees and self._promises.keys() <= waiting

    def _load(self, replica: Replica) -> int:
        return replica.load_tokens + self._num_tokens.get(replica.spec.replica_id, 0)

    def _has_slot(self, replica: Replica) -> bool:
        num_rows = len(replica.rows.running) + self._num_rows.get(replica.spec.replica_id, 0)
        return num_rows < replica.max_running and not replica.is_draining

    def _promise(self, sequence: Sequence, promise: _Promise) -> None:
        replica_id = promise.replica_id
        self._promises[sequence] = promise
        self._num_tokens[replica_id] = self._num_tokens.get(replica_id, 0) + promise.num_tokens
        self._num_rows[replica_id] = self._num_rows.get(replica_id, 0) + 1

    def _take_back(self, sequence: Sequence) -> tuple[int, int | None]:
        promise = self._promises.pop(sequence, None)
        if promise is None:
            return 0, None
        self._num_tokens[promise.replica_id] -= promise.num_tokens
        self._num_rows[promise.replica_id] -= 1
        return promise.num_changes, promise.replica_id
