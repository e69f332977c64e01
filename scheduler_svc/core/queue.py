"""The order in which sequences of one model are to start: by rank, or by tenants' shares and then by rank.

Knows sequences and their rank; must not know replicas or blocks. Adding to and removing from the middle of a queue
moves pointers; taking its first does not, and nothing walks it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from operator import attrgetter

from scheduler_svc.core.sequence import Sequence

_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences by rank; index 0 is first."""

    __slots__ = ("_by_rank", "num_changes")

    def __init__(self) -> None:
        self._by_rank: list[Sequence] = []  # ascending rank, so the first to start is last: popping it moves nothing
        self.num_changes = 0
        """Counts every change of what waits or in which order."""

    def __len__(self) -> int:
        return len(self._by_rank)

    def __getitem__(self, index: int) -> Sequence:
        return self._by_rank[-1 - index]

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._by_rank)

    def position(self, sequence: Sequence) -> int:
        """Sequences that go before it, whether it is in the queue or not."""
        return len(self._by_rank) - bisect_right(self._by_rank, sequence.rank, key=_rank)

    def add(self, sequence: Sequence) -> None:
        """Puts it in its place."""
        insort(self._by_rank, sequence, key=_rank)
        self.num_changes += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes it out. Raises ValueError if it is not there."""
        index = bisect_left(self._by_rank, sequence.rank, key=_rank)
        if index == len(self._by_rank) or self._by_rank[index] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} does not wait here")
        del self._by_rank[index]
        self.num_changes += 1

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Takes note of service; this order does not depend on it."""

    def served(self) -> Mapping[str, int]:
        """Tokens each tenant was charged for; none is kept."""
        return {}


class FairQueue:
    """A queue by rank for each tenant; the tenant that was served least for its weight goes first.

    The counters are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with input and
    output tokens counted alike: service adds tokens / weight, and a tenant that begins to wait is lifted to the least
    counter among those that wait, so that nobody saves up turns by not asking. While two tenants wait, their counters
    differ by no more than one of them can be charged for what it has running. Of tenants with equal counters the one
    that has stood there longest goes first, so that ties rotate.
    """

    __slots__ = (
        "_by_served",
        "_level",
        "_next_turn",
        "_num_waiting",
        "_places",
        "_queues",
        "_served",
        "_sweep_at",
        "_tokens",
        "_weights",
        "num_changes",
    )

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[str, WaitingQueue] = {}  # those that are not empty
        self._served: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._places: dict[str, tuple[float, int, str]] = {}  # tenant -> (counter, turn, tenant), of those that wait
        self._by_served: list[tuple[float, int, str]] = []  # the same, ascending
        self._next_turn = 0
        self._level = 0.0  # counter of the tenant that stopped waiting last
        self._sweep_at = 64  # tenants kept count of at which those are forgotten for whom it makes no difference
        self._num_waiting = 0
        self.num_changes = 0
        """Counts every change of what waits or in which order."""

    def __len__(self) -> int:
        return self._num_waiting

    def __getitem__(self, index: int) -> Sequence:
        for place, sequence in enumerate(self):
            if place == index:
                return sequence
        raise IndexError(f"{index} of {self._num_waiting}")

    def __iter__(self) -> Iterator[Sequence]:
        """Best first, each turn counted as if it were served for the tokens known now."""
        turns: list[tuple[float, int, str, int]] = []
        others = iter(self._by_served)
        following = next(others, None)
        while turns or following is not None:
            if following is not None and (not turns or following <= turns[0][:3]):
                heappush(turns, (*following, 0))
                following = next(others, None)
                continue
            served, turn, tenant, index = heappop(turns)
            queue = self._queues[tenant]
            sequence = queue[index]
            yield sequence
            if index + 1 < len(queue):
                # Its next turn is behind those that stand at the same counter already.
                after = served + len(sequence.token_ids) / self._weight(tenant)
                heappush(turns, (after, self._next_turn + turn, tenant, index + 1))

    def position(self, sequence: Sequence) -> int:
        """Sequences that go before it if all are alike: as many turns of each other tenant as it takes, by weight."""
        tenant = sequence.request.tenant
        own = self._queues.get(tenant)
        num_before = own.position(sequence) if own is not None else 0
        num_turns = num_before + 0.5
        others = ((name, len(queue)) for name, queue in self._queues.items() if name != tenant)
        share = num_turns / self._weight(tenant)
        return num_before + sum(min(length, round(share * self._weight(name))) for name, length in others)

    def add(self, sequence: Sequence) -> None:
        """Puts it in its place."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
            floor = self._by_served[0][0] if self._by_served else self._level
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
            self._take_place(tenant)
        queue.add(sequence)
        self._num_waiting += 1
        self.num_changes += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes it out. Raises ValueError if it is not there."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            raise ValueError(f"sequence {sequence.sequence_id} does not wait here")
        queue.remove(sequence)
        if not queue:
            del self._queues[tenant]
            self._leave_place(tenant)
            self._level = self._served[tenant]
        self._num_waiting -= 1
        self.num_changes += 1

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant was served so many tokens."""
        if num_tokens <= 0:
            return
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens / self._weight(tenant)
        self._tokens[tenant] = self._tokens.get(tenant, 0) + num_tokens
        if tenant in self._queues:
            self._leave_place(tenant)
            self._take_place(tenant)
            self.num_changes += 1
        elif len(self._served) > self._sweep_at:
            self._forget_lifted()

    def served(self) -> Mapping[str, int]:
        """Tokens that each tenant was charged for, of those that are kept count of."""
        return self._tokens

    def _take_place(self, tenant: str) -> None:
        place = self._places[tenant] = (self._served[tenant], self._next_turn, tenant)
        self._next_turn += 1
        insort(self._by_served, place)

    def _leave_place(self, tenant: str) -> None:
        del self._by_served[bisect_left(self._by_served, self._places.pop(tenant))]

    def _forget_lifted(self) -> None:
        """Forgets who waits for nothing and would be lifted to the present level anyway."""
        floor = self._by_served[0][0] if self._by_served else self._level
        for tenant in [name for name, served in self._served.items() if served <= floor and name not in self._queues]:
            del self._served[tenant]
            self._tokens.pop(tenant, None)
        self._sweep_at = 2 * len(self._served) + 64

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


AnyQueue = WaitingQueue | FairQueue
