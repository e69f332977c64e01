"""Which replica of a model a waiting sequence goes to.

Score, in tokens: the longest prefix that is cached there, or being computed, minus the replica's load. The replica that
plans takes a sequence unless another with room for it scores strictly better; then it is promised to that one, and the
promise counts as load there until the sequence starts. A promise binds nobody: each replica that plans decides anew.
Knows replicas and one sequence at a time; must not know queues or who goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core import suspects
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence

_MAX_CHANGES = 4
"""How often the promise of one sequence may move to another replica; after that whoever plans takes it."""


@dataclass(slots=True)
class Promise:
    """Where a sequence is to go."""

    replica: Replica
    num_tokens: int
    """Tokens that it will compute there."""
    num_cached: int
    """Tokens that it has there."""
    num_changes: int
    """How often it went elsewhere before."""


class Placement:
    """Promises of waiting sequences."""

    __slots__ = ("_num_rows", "_num_tokens", "_promises")

    def __init__(self) -> None:
        self._promises: dict[Sequence, Promise] = {}
        self._num_tokens: dict[int, int] = {}  # replica id -> tokens promised to it
        self._num_rows: dict[int, int] = {}

    def leaves(self, sequence: Sequence, num_blocks: int, replica: Replica, others: Iterable[Replica]) -> bool:
        """Whether `replica` leaves the sequence, of which it has so many blocks, to one of the others."""
        if self._is_better_off(sequence, num_blocks, replica):
            return True
        num_changes, before = self._take_back(sequence)
        if num_changes > _MAX_CHANGES:
            return False
        num_known = len(sequence.token_ids)
        score = num_blocks * replica.spec.block_size - self._load(replica)
        first = replica.kv.first_digest(sequence)
        best: tuple[Replica, int] | None = None  # (replica, tokens that it has)
        for other in others:
            if other is replica:
                continue
            load = self._load(other)
            if num_known - load <= score:
                continue  # not even a whole cached prompt would make it the better one
            if -load <= score and other.kv.is_like(replica.kv) and not other.rows.has_or_computes(first):
                continue  # it has nothing of it, and more to do
            if not self._has_slot(other) or not other.could_hold(sequence):
                continue
            num_cached = self._num_cached_tokens(other, sequence)
            if num_cached is not None and num_cached - load > score:
                score = num_cached - load
                best = (other, num_cached)
        if best is None:
            return False
        num_changes += before not in (None, best[0])
        self._promise(sequence, Promise(best[0], num_known - best[1] + 1, best[1], num_changes))
        return True

    def _is_better_off(self, sequence: Sequence, num_blocks: int, replica: Replica) -> bool:
        """Whether the replica that it is promised to still is the better one: then no other need be looked at."""
        promise = self._promises.get(sequence)
        if promise is None or promise.replica is replica or promise.replica.is_draining:
            return False
        other = promise.replica
        if other.growth.is_on or other.rows.suspects or sequence.suspect_bound is not None:
            return False
        num_rows = len(other.rows.running) + self._num_rows[other.spec.replica_id]
        num_new = other.kv.num_blocks_for(len(sequence.token_ids) - promise.num_cached)
        if num_rows > other.max_running or num_new > other.kv.pool.num_idle:
            return False
        score = num_blocks * replica.spec.block_size - self._load(replica)
        return promise.num_cached - (self._load(other) - promise.num_tokens) > score

    def _num_cached_tokens(self, replica: Replica, sequence: Sequence) -> int | None:
        """Tokens that the replica has or computes; None if there is something that keeps the sequence out."""
        if not suspects.may_enter(replica.rows, sequence):
            return None
        found = replica.kv.find_prefix(sequence)
        if replica.kv.num_missing_blocks(sequence, found) > 0 or not replica.has_growth_room(sequence, found):
            return None
        leader = replica.rows.in_flight.leader(sequence, found)
        return (found.num_blocks if leader is None else leader[1]) * replica.spec.block_size

    def forget(self, sequence: Sequence) -> None:
        """The sequence waits no longer."""
        self._take_back(sequence)

    def forget_replica(self, replica_id: int) -> None:
        """The replica is gone."""
        for sequence in [
            key for key, promise in self._promises.items() if promise.replica.spec.replica_id == replica_id
        ]:
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

    def _promise(self, sequence: Sequence, promise: Promise) -> None:
        replica_id = promise.replica.spec.replica_id
        self._promises[sequence] = promise
        self._num_tokens[replica_id] = self._num_tokens.get(replica_id, 0) + promise.num_tokens
        self._num_rows[replica_id] = self._num_rows.get(replica_id, 0) + 1

    def _take_back(self, sequence: Sequence) -> tuple[int, Replica | None]:
        promise = self._promises.pop(sequence, None)
        if promise is None:
            return 0, None
        replica_id = promise.replica.spec.replica_id
        self._num_tokens[replica_id] -= promise.num_tokens
        self._num_rows[replica_id] -= 1
        return promise.num_changes, promise.replica
