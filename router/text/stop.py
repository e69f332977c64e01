"""Stop strings over a growing text: what may be shown, and where the text ends.

Knows characters and nothing of tokens or requests. The result does not depend on how the text was cut into pieces, so
a resumed or batched stream ends where an unbroken one does: the first match is the first to be *completed*, and of
several completed by the same character the longest, so nothing that belongs to a stop string is ever shown. Only a
suffix that may still become a match is held back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopStep:
    """`text` may be shown now. `matched` is the stop string that ended the sequence, or None while it goes on."""

    text: str
    matched: str | None


class StopMatcher:
    """Follows one sequence. After a match it accepts no more text."""

    def __init__(self, stop: tuple[str, ...], *, include_match: bool = False) -> None:
        """`stop` holds non-empty strings; `include_match` shows the matched string instead of cutting before it."""
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._include_match = include_match
        self._held = ""
        self._ended = False

    @property
    def watches(self) -> bool:
        """Whether there is any stop string to look for."""
        return bool(self._stop)

    def push(self, text: str, *, armed: bool = True) -> StopStep:
        """Take the next piece of text. While not `armed`, a match completed inside this piece is ignored."""
        if self._ended:
            raise ValueError("text after the stop string that ended the sequence")
        if not self._stop:
            return StopStep(text, None)
        num_held_chars = len(self._held)
        buffer = self._held + text
        if armed and (match := self._first_match(buffer, num_held_chars)) is not None:
            start, stop = match
            self._ended = True
            self._held = ""
            return StopStep(buffer[: start + len(stop)] if self._include_match else buffer[:start], stop)
        keep_from = self._first_open_suffix(buffer)
        self._held = buffer[keep_from:]
        return StopStep(buffer[:keep_from], None)

    def flush(self) -> str:
        """The text ended without a match: what was held back is text like any other."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_held_chars: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends after the held characters, which were searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = buffer.find(stop, max(0, num_held_chars - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _first_open_suffix(self, buffer: str) -> int:
        """Index of the longest suffix that is a proper prefix of a stop string; the length of the text if none is."""
        first = len(buffer)
        for stop in self._stop:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), first)
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    first = start
                    break
                start = buffer.find(stop[0], start + 1, first)
        return first
