"""What was decided about each sequence and why, for people who ask. Bounded, and nothing decides by it.

Keeps the first and the latest decisions of every live sequence, and those of the latest ended ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MAX_DECISIONS = 32
"""Decisions kept of one sequence: a quarter of them the first, the others the latest."""
_NUM_FIRST = _MAX_DECISIONS // 4


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was decided about a sequence."""

    at_ns: int
    """When, by the clock of the core's inputs."""
    what: str
    """"queued", "follows", "scheduled", "preempted", "updated" or how it ended."""
    reason: str
    """Why, for people."""
    replica_id: int | None = None
    num_blocks: int = 0
    """Blocks it got (scheduled) or gave back (preempted)."""
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to `Scheduler.explain`."""

    sequence_id: int
    request_id: str
    state: str
    """waiting, running, settling or ended."""
    waits_for: str
    """What a waiting one needs, for people; else empty."""
    position: int | None
    """Sequences of its model before it, while it waits."""
    priority: int
    deadline_at_ns: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    decisions: tuple[Decision, ...]
    num_forgotten: int
    """Decisions between the first and the latest that are not kept."""


class _Record:
    __slots__ = ("decisions", "num_forgotten")

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.num_forgotten = 0

    def note(self, decision: Decision) -> None:
        if len(self.decisions) == _MAX_DECISIONS:
            del self.decisions[_NUM_FIRST]
            self.num_forgotten += 1
        self.decisions.append(decision)


class History:
    """Decisions by sequence id."""

    __slots__ = ("_ended", "_live", "_max_ended")

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._live: dict[int, _Record] = {}
        self._ended: OrderedDict[int, Explanation] = OrderedDict()

    def note(self, sequence_id: int, decision: Decision) -> None:
        """Adds a decision about a live sequence."""
        record = self._live.get(sequence_id)
        if record is None:
            record = self._live[sequence_id] = _Record()
        record.note(decision)

    def decisions(self, sequence_id: int) -> tuple[tuple[Decision, ...], int]:
        """Of a live sequence: what is kept, and how many are not."""
        record = self._live.get(sequence_id)
        return (tuple(record.decisions), record.num_forgotten) if record is not None else ((), 0)

    def end(self, explanation: Explanation) -> None:
        """The sequence is live no longer."""
        self._live.pop(explanation.sequence_id, None)
        if self._max_ended:
            self._ended[explanation.sequence_id] = explanation
            if len(self._ended) > self._max_ended:
                self._ended.popitem(last=False)

    def ended(self, sequence_id: int) -> Explanation | None:
        """What was known when it ended, if that is kept."""
        return self._ended.get(sequence_id)

    def check(self, live: set[int]) -> bool:
        """Whether nothing is kept as live that is not."""
        return self._live.keys() <= live and len(self._ended) <= self._max_ended
