"""Which live sequences have a deadline, the earliest first.

Knows times and sequences; must not know where a sequence is. A changed deadline leaves its old entry behind, which is
skipped when it comes up.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from scheduler_svc.core.sequence import Sequence, State

_Entry = tuple[int, int, Sequence]


class Deadlines:
    """An agenda of deadlines."""

    __slots__ = ("_entries", "_sweep_at")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # a heap by (deadline, ticket)
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, sequence: Sequence) -> None:
        """A live sequence has this deadline now, if any."""
        if sequence.deadline_at_ns is None:
            return
        heappush(self._entries, (sequence.deadline_at_ns, sequence.ticket, sequence))
        if len(self._entries) > self._sweep_at:
            self._entries = [entry for entry in self._entries if _is_current(entry)]
            heapify(self._entries)
            self._sweep_at = 2 * len(self._entries) + 64

    def pop_passed(self, now: int) -> list[Sequence]:
        """Live sequences whose deadline has passed, earliest first; they are forgotten here."""
        passed: dict[Sequence, None] = {}
        while self._entries and self._entries[0][0] <= now:
            entry = heappop(self._entries)
            if _is_current(entry):
                passed[entry[2]] = None
        return list(passed)


def _is_current(entry: _Entry) -> bool:
    deadline, _, sequence = entry
    return sequence.state is not State.ENDED and sequence.deadline_at_ns == deadline
