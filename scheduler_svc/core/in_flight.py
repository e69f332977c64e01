"""Which running sequence computes which block next, so that others wait for it instead of computing it too.

Knows digests and sequences of one replica; must not know who waits. Only the first full block of known tokens that a
sequence has not made findable is listed: whoever found all before it asks for exactly that one.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.kv_space import KvSpace, Prefix
from scheduler_svc.core.sequence import Sequence


class InFlight:
    """Leaders by the digest of their next block."""

    __slots__ = ("_kv", "_leaders")

    def __init__(self, kv: KvSpace) -> None:
        self._kv = kv
        self._leaders: dict[bytes, Sequence] = {}

    def note(self, sequence: Sequence) -> None:
        """A running sequence entered, or made blocks findable."""
        index = sequence.num_hashed_blocks
        is_full = self._kv.caching and (index + 1) * self._kv.block_size <= len(sequence.token_ids)
        if not is_full and sequence.in_flight_digest is None:
            return
        self.forget(sequence)
        if is_full:
            digest = self._kv.chain_of(sequence).digest(sequence.token_ids, index)
            if digest not in self._leaders:
                self._leaders[digest] = sequence
                sequence.in_flight_digest = digest

    def forget(self, sequence: Sequence) -> None:
        """It computes nothing here any more."""
        if sequence.in_flight_digest is not None:
            del self._leaders[sequence.in_flight_digest]
            sequence.in_flight_digest = None

    def computes(self, digest: bytes) -> bool:
        """Whether a running sequence computes this block next."""
        return digest in self._leaders

    def leader(self, sequence: Sequence, prefix: Prefix) -> tuple[Sequence, int] | None:
        """Who computes the block that follows the sequence's prefix, and how many full blocks they have in common."""
        index = prefix.num_blocks
        num_usable = self._kv.num_usable_blocks(sequence)
        if not self._leaders or index >= num_usable:
            return None
        digest = self._kv.chain_of(sequence).digest(sequence.token_ids, index)
        leader = self._leaders.get(digest)
        if leader is None:
            return None
        num_most = min(num_usable, len(leader.token_ids) // self._kv.block_size)
        return leader, self._num_common_blocks(sequence, leader, index + 1, num_most)

    def check(self, running: Iterable[Sequence]) -> bool:
        """Whether every leader runs and is listed by what it computes next."""
        leaders = {sequence.in_flight_digest: sequence for sequence in running if sequence.in_flight_digest is not None}
        return leaders == self._leaders and all(
            self._kv.chain_of(sequence).digest(sequence.token_ids, sequence.num_hashed_blocks) == digest
            for digest, sequence in self._leaders.items()
        )

    def _num_common_blocks(self, sequence: Sequence, leader: Sequence, num_known: int, num_most: int) -> int:
        """Full blocks with equal tokens; the first `num_known` have. A block's digest speaks for all before it."""
        ours, theirs = self._kv.chain_of(sequence), self._kv.chain_of(leader)
        ours.digest(sequence.token_ids, num_most - 1)
        theirs.digest(leader.token_ids, num_most - 1)
        low, high = num_known, num_most
        while low < high:
            middle = (low + high + 1) // 2
            if ours.digests[middle - 1] == theirs.digests[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low
