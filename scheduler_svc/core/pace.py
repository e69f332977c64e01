"""How fast the sequences of one model start, and what that says of those that wait.

Knows times and counts; must not know sequences or queues. Only time during which somebody waited for room counts: who
finds some starts at once, however long the next one will have to wait.
"""

from __future__ import annotations

_KEEP = 0.875
"""What one start leaves of the memory of earlier ones."""
_UNKNOWN_RETRY_NS = 1_000_000_000
"""Retry delay before anything has started that had to wait."""


class Pace:
    """Mean time between two starts of those that had to wait for room, over the last few."""

    __slots__ = ("_interval_ns", "_marked_at_ns", "_tokens_per_start")

    def __init__(self) -> None:
        self._marked_at_ns: int | None = None  # the last start, or when somebody began to wait
        self._interval_ns: float | None = None
        self._tokens_per_start = 1.0

    def note_waiting(self, now: int) -> None:
        """Somebody waits."""
        if self._marked_at_ns is None:
            self._marked_at_ns = now

    def note_found_room(self, now: int) -> None:
        """Some started where there was room for them: who still waits does so for room from now on."""
        self._marked_at_ns = now

    def note_starts(self, num_starts: int, num_tokens: int, now: int) -> None:
        """So many started where there had been no room, with so many known tokens in all."""
        marked_at = self._marked_at_ns if self._marked_at_ns is not None else now
        keep = _KEEP**num_starts if self._interval_ns is not None else 0.0
        self._interval_ns = keep * (self._interval_ns or 0.0) + (1 - keep) * (now - marked_at) / num_starts
        self._tokens_per_start = keep * self._tokens_per_start + (1 - keep) * num_tokens / num_starts
        self._marked_at_ns = now

    def note_empty(self) -> None:
        """Nobody waits any more."""
        self._marked_at_ns = None

    @property
    def mean_interval_ns(self) -> int | None:
        """Time between the last starts; None: nobody had to wait for room yet."""
        return None if self._interval_ns is None else int(self._interval_ns)

    def interval_ns(self, now: int) -> int | None:
        """Time between two starts; the present wait counts once it is longer. None: nobody had to wait yet."""
        if self._interval_ns is None:
            return None
        waited = now - self._marked_at_ns if self._marked_at_ns is not None else 0
        return int(max(self._interval_ns, waited))

    def retry_after_ns(self, num_sequences: int, num_tokens: int, now: int) -> int:
        """Time until so many sequences, and sequences of so many tokens, have started."""
        interval = self.interval_ns(now)
        if interval is None:
            return _UNKNOWN_RETRY_NS
        num_starts = max(1.0, num_sequences, num_tokens / max(1.0, self._tokens_per_start))
        return int(num_starts * interval)
