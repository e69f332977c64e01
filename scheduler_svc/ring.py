"""A bounded ring of records, in segments that each begin with the core's state, so that what is left can be replayed.

Knows records as bytes. The oldest segment is forgotten first, whole. A state is taken where a segment begins, between
two inputs; one that would take too much of the ring is not kept, and what begins there cannot be replayed. Then it is
tried ever more seldom, for it takes time too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scheduler_svc.state import CoreState

_OVERHEAD_BYTES = 60
"""What a record takes beside its bytes."""
_RECORDS_PART = 4
"""A segment's records take this part of the ring, ..."""
_STATE_PART = 2
"""... and its state no more than this."""
_MOST_SKIPPED = 64
"""After states that took too much, so many segments at most begin without one."""
_WISE_PART = 8
"""A state that takes less leaves most of the ring to records."""


@dataclass(slots=True)
class Segment:
    """Records, and where they begin."""

    first: int
    """Number of its first record."""
    decisions: int
    """Sum of all decisions before it."""
    state: CoreState | None
    """The core's before the first record; None: it had just started, or there is a defect."""
    defect: str = ""
    """Why decisions cannot be made again from here."""
    records: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    """About what all of it takes in memory."""


class Ring:
    """The segments, at least one."""

    def __init__(self, max_bytes: int, capture: Callable[[], CoreState]) -> None:
        """`capture` tells the state of the core, which is that after the latest record."""
        self._max_bytes = max_bytes
        self._capture = capture
        self._segments = deque([Segment(0, 0, None)])
        self._num_bytes = 0
        self._defect = ""
        self._num_to_skip = 0
        self._next_skip = 1

    @property
    def oldest(self) -> Segment:
        """What a file begins with."""
        return self._segments[0]

    @property
    def num_noted(self) -> int:
        """Records so far, and so the number of the next one."""
        latest = self._segments[-1]
        return latest.first + len(latest.records)

    def __iter__(self) -> Iterator[bytes]:
        """The records that are left, in order."""
        for segment in self._segments:
            yield from segment.records

    def append(self, record: bytes, decisions: int) -> None:
        """Adds a record, after which the sum of all decisions is `decisions`. The core has taken its input."""
        self._add(self._segments[-1], len(record) + _OVERHEAD_BYTES).records.append(record)
        latest = self._segments[-1]
        state_bytes = latest.state.num_bytes if latest.state is not None else 0
        if latest.num_bytes - state_bytes >= self._max_bytes // _RECORDS_PART:
            self._begin_segment(decisions)
        while self._num_bytes > self._max_bytes and len(self._segments) > 1:
            self._num_bytes -= self._segments.popleft().num_bytes

    def forget(self, decisions: int) -> None:
        """Begins anew from the core's state, as if the ring had been full; the sum of all decisions is `decisions`."""
        self._begin_segment(decisions)
        self._segments = deque([self._segments[-1]])
        self._num_bytes = self._segments[0].num_bytes

    def _begin_segment(self, decisions: int) -> None:
        state = self._tried_state()
        self._segments.append(Segment(self.num_noted, decisions, state, self._defect if state is None else ""))
        self._add(self._segments[-1], state.num_bytes if state is not None else 0)

    def _tried_state(self) -> CoreState | None:
        """The core's state, unless it takes too much; then not for the next segments either."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        state = self._capture()
        if state.num_bytes * _STATE_PART <= self._max_bytes:
            self._next_skip = 1
            return state
        self._num_to_skip, self._next_skip = self._next_skip, min(2 * self._next_skip, _MOST_SKIPPED)
        self._defect = (
            f"the ring has forgotten its beginning, and the core's state of about {state.num_bytes} bytes takes more "
            f"than half of the ring's {self._max_bytes}; use a larger --flight-recorder-size, such as "
            f"{_WISE_PART * state.num_bytes}"
        )
        return None

    def _add(self, segment: Segment, num_bytes: int) -> Segment:
        segment.num_bytes += num_bytes
        self._num_bytes += num_bytes
        return segment
