"""Who waits: one ordered queue per model, and the bounds on all of them.

Knows sequences and their rank; must not know replicas or blocks. Adding to and removing from the middle of a queue
moves pointers; taking its first does not, and nothing walks it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.sequence import Rank, Sequence
from scheduler_svc.core.types import CoreLimits, RefusalReason, Refused, Request

_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences in the order in which they are to start; index 0 is first."""

    __slots__ = ("_by_rank", "num_changes")

    def __init__(self) -> None:
        self._by_rank: list[Sequence] = []  # ascending rank, so the first to start is last: popping it moves nothing
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._by_rank)

    def __getitem__(self, index: int) -> Sequence:
        return self._by_rank[-1 - index]

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._by_rank)

    def position(self, rank: Rank) -> int:
        """Sequences that go before one of this rank."""
        return len(self._by_rank) - bisect_right(self._by_rank, rank, key=_rank)

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


class WaitingRoom:
    """The queues of all models, and room in them."""

    __slots__ = ("_limits", "_num_reserved", "_reserved", "num_tokens", "num_waiting", "queues")

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self.queues: dict[str, WaitingQueue] = {}
        self._reserved: dict[tuple[int, str], int] = {}  # group -> members that have a place but did not come yet
        self._num_reserved = 0
        self.num_waiting = 0
        self.num_tokens = 0
        """Known tokens of all that wait."""

    def queue(self, model: str) -> WaitingQueue:
        """The queue of a model."""
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = WaitingQueue()
        return queue

    def lengths(self) -> dict[str, int]:
        """Waiting sequences by model."""
        return {model: len(queue) for model, queue in self.queues.items()}

    def check(self, request: Request) -> None:
        """Raises Refused if a first attempt finds no room for itself and the rest of its group."""
        if request.attempt > 1 or _group(request) in self._reserved:
            return
        num_waiting = self.num_waiting + self._num_reserved
        if num_waiting + request.group_size > self._limits.max_waiting:
            raise Refused(
                RefusalReason.QUEUE_FULL,
                "number of waiting sequences",
                f"{num_waiting} (and {request.group_size} more)",
                self._limits.max_waiting,
                "try again later",
            )
        num_tokens = request.group_size * (len(request.prompt_token_ids) + len(request.prior_token_ids))
        if num_waiting and self.num_tokens + num_tokens > self._limits.max_waiting_tokens:
            raise Refused(
                RefusalReason.QUEUE_FULL,
                "waiting tokens",
                f"{self.num_tokens} (and {num_tokens} more)",
                self._limits.max_waiting_tokens,
                "try again later",
            )

    def reserve(self, request: Request) -> None:
        """Takes note that a member of a group came, the first one on behalf of all."""
        if request.group_size == 1 or request.attempt > 1:
            return
        group = _group(request)
        num_left = self._reserved.pop(group, None)
        if num_left is None:
            num_left = request.group_size
        else:
            self._num_reserved -= num_left
        if num_left > 1:
            self._reserved[group] = num_left - 1
            self._num_reserved += num_left - 1

    def end_reservation(self, request: Request) -> None:
        """Takes note that a member of a group ended: no place is kept for those that did not come."""
        self._num_reserved -= self._reserved.pop(_group(request), 0)

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait."""
        self.queue(sequence.request.model).add(sequence)
        self.num_waiting += 1
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits; its tokens must not have changed since."""
        self.queue(sequence.request.model).remove(sequence)
        self.num_waiting -= 1
        self.num_tokens -= len(sequence.token_ids)


def _group(request: Request) -> tuple[int, str]:
    return (request.router_id, request.group_id)
