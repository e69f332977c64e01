"""Who holds slots and blocks on one replica, and the plans it has not answered.

Owns entering and leaving: whichever way a sequence leaves, slot, blocks and list entries go together. Must not know
why one enters or leaves, nor how steps are filled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from operator import attrgetter

from scheduler_svc.core.foresight import Foresight
from scheduler_svc.core.in_flight import InFlight
from scheduler_svc.core.kv_space import KvSpace, Prefix
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.order import Order
from scheduler_svc.core.sequence import Move, Sequence, State
from scheduler_svc.core.steady import SteadyRows
from scheduler_svc.core.step import UnansweredPlan
from scheduler_svc.core.types import ReplicaSpec

_rank = attrgetter("rank")


class Rows:
    """The sequences of one replica."""

    def __init__(self, spec: ReplicaSpec, caching: bool, *, tenants_share: bool = False) -> None:
        self._replica_id = spec.replica_id
        self._max_model_len = spec.max_model_len
        self.kv = KvSpace(
            spec.fingerprint,
            spec.block_size,
            spec.num_device_blocks,
            caching,
            spec.num_host_blocks,
            tenants_share=tenants_share,
        )
        self.in_flight = InFlight(self.kv)
        """Who computes which block next."""
        self.priorities: Counter[int] = Counter()
        """Priorities of the running ones."""
        self.suspects: dict[Sequence, None] = {}
        """Running ones that may have crashed a replica."""
        self.num_exits = 0
        """Counts every sequence that left."""
        self.load_tokens: int | None = None
        """Kept by the replica until rows or plans change."""
        self.foresight: Foresight | None = None
        """What the running ones are thought to hold; kept by the replica until somebody comes or leaves."""
        self.num_most_blocks = 0
        """Blocks that the running ones would hold together, sharing none, if each got as long as it may."""
        self.running: list[Sequence] = []
        """All that hold a slot, by ascending rank: the first is the victim."""
        self.filling: list[Sequence] = []
        """Of those, the ones with more than one known token to compute, by ascending rank."""
        self.steady = SteadyRows(spec.block_size)
        """Of those, the ones with one. The rest waits for the answer to its last row."""
        self.unanswered: deque[UnansweredPlan] = deque()
        self.free_slots = list(range(spec.num_slots - 1, -1, -1))
        self.released_slots: list[int] = []
        """Slots left since the last plan; the next one tells the worker."""

    def enter(self, sequence: Sequence, prefix: Prefix) -> None:
        """Gives a waiting sequence a slot and its blocks. The caller saw that they suffice."""
        sequence.move(Move.ADMIT)
        self.kv.admit(sequence, prefix)
        sequence.slot = self.free_slots.pop()
        sequence.replica_id = self._replica_id
        sequence.num_planned_tokens = prefix.num_blocks * self.kv.block_size
        insort(self.running, sequence, key=_rank)
        insort(self.filling, sequence, key=_rank)
        self.priorities[sequence.priority] += 1
        if sequence.suspect_bound is not None:
            self.suspects[sequence] = None
        self.in_flight.note(sequence)
        self.num_most_blocks += self.kv.num_blocks_for(self.end_of(sequence))
        self.load_tokens = self.foresight = None

    def end_of(self, sequence: Sequence) -> int:
        """Length, prompt included, at which the worker ends the sequence with LENGTH."""
        return min(sequence.max_tokens, self._max_model_len)

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Makes findable what is full among so many computed and answered tokens of a running sequence."""
        self.kv.commit(sequence, num_computed_tokens)
        self.in_flight.note(sequence)

    def clear(self, sequence: Sequence) -> None:
        """A suspect has sampled a token, and the replica still lives."""
        del self.suspects[sequence]
        sequence.suspect_bound = None

    def rerank(self, sequence: Sequence, priority: int, deadline_at_ns: int | None, order: Order) -> None:
        """Changes priority and deadline of a running sequence, and its place among the others."""
        is_filling = sequence.steady_row is None and sequence in self.filling
        _remove(self.running, sequence)
        if is_filling:
            _remove(self.filling, sequence)
        self._count_priority(sequence.priority, -1)
        sequence.priority, sequence.deadline_at_ns = priority, deadline_at_ns
        sequence.rank = order.rank(sequence)
        self._count_priority(priority, 1)
        insort(self.running, sequence, key=_rank)
        if is_filling:
            insort(self.filling, sequence, key=_rank)

    def has_or_computes(self, digest: bytes | None) -> bool:
        """Whether the block of this digest is findable here or about to be."""
        return digest is not None and (self.kv.has(digest) or self.in_flight.computes(digest))

    def fill_up(self, sequence: Sequence) -> None:
        """Takes note that all known tokens of a filling sequence are planned."""
        _remove(self.filling, sequence)

    def evict(self, sequence: Sequence, mode: PreemptionMode) -> None:
        """Preempts; `mode`: whether its blocks are worth a copy to the host.

        The sequence settles if unanswered plans hold rows of it, else it may wait at once.
        """
        num_unanswered = sum(1 for plan in self.unanswered if plan.row_of(sequence) is not None)
        block_ids = sequence.block_ids
        self._vacate(sequence, self._num_answered_tokens(sequence))
        self.kv.mark(block_ids, mode)
        sequence.num_unanswered_rows = num_unanswered
        sequence.move(Move.PREEMPT_UNANSWERED if num_unanswered else Move.PREEMPT)
        if not num_unanswered:
            sequence.replica_id = None

    def end(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Ends a sequence that runs or settles here; the blocks of so many of its tokens stay findable."""
        if sequence.state is State.RUNNING:
            self._vacate(sequence, num_computed_tokens)
        sequence.replica_id = None
        sequence.move(Move.END)

    def end_early(self, sequence: Sequence) -> None:
        """Ends a sequence that runs or settles here, for a reason from outside."""
        self.end(sequence, self._num_answered_tokens(sequence))

    def end_all(self) -> tuple[list[Sequence], set[Sequence]]:
        """Ends everything, for the replica is gone. Returns what ended, best first, and who was in unanswered plans."""
        suspects = {sequence for plan in self.unanswered for sequence in plan.rows}
        settling = [sequence for sequence in suspects if sequence.state is State.SETTLING]
        ended = sorted([*self.running, *settling], key=_rank, reverse=True)
        for sequence in ended:
            self.end(sequence, num_computed_tokens=0)
        return ended, suspects

    def _vacate(self, sequence: Sequence, num_computed_tokens: int) -> None:
        if sequence.steady_row is not None:
            sequence.num_planned_tokens = self.steady.leave(sequence)
        elif sequence in self.filling:
            _remove(self.filling, sequence)
        _remove(self.running, sequence)
        self.free_slots.append(sequence.slot)
        self.released_slots.append(sequence.slot)
        for plan in self.unanswered:
            row = plan.row_of(sequence)
            if row is not None:
                plan.departed.add(row)
        self.kv.commit(sequence, num_computed_tokens)
        self.in_flight.forget(sequence)
        self.kv.release(sequence)
        self._count_priority(sequence.priority, -1)
        self.suspects.pop(sequence, None)
        self.num_exits += 1
        self.num_most_blocks -= self.kv.num_blocks_for(self.end_of(sequence))
        self.load_tokens = self.foresight = None
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_planned_tokens)

    def _count_priority(self, priority: int, sign: int) -> None:
        self.priorities[priority] += sign
        if not self.priorities[priority]:
            del self.priorities[priority]

    def _num_answered_tokens(self, sequence: Sequence) -> int:
        """Computed tokens of a sequence, unanswered plans not counted."""
        for plan in self.unanswered:
            row = plan.row_of(sequence)
            if row is not None:
                return plan.starts[row]
        if sequence.steady_row is not None:
            return self.steady.start_of(sequence)
        return sequence.num_planned_tokens


def _remove(by_rank: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(by_rank, sequence.rank, key=_rank)
    if by_rank[index] is not sequence:
        raise ValueError(f"sequence {sequence.sequence_id} is not where its rank says")
    del by_rank[index]
