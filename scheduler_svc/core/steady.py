"""The rows that get exactly one token in every step: those whose known tokens are all computed but the last.

Knows positions alone; must not know blocks. All steady rows advance together, so nothing is written per row: a row is
looked at when it joins, at its block edges, at its last token, and when it leaves. The agenda says which those are.
"""

from __future__ import annotations

from scheduler_svc.core.sequence import Sequence


class SteadyRows:
    """Parallel lists over the steady rows. `tick` counts the steps they took; the agenda is by tick."""

    __slots__ = ("_agenda", "_block_size", "_due_tick", "_tick", "sequences", "slots", "starts")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tick = 0
        self._agenda: dict[int, dict[Sequence, int]] = {}  # tick -> sequence -> length at which it ends
        self._due_tick: dict[Sequence, int] = {}
        self.sequences: list[Sequence] = []
        self.slots: list[int] = []
        self.starts: list[int] = []
        """Tokens computed before each row's next step."""

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, start: int, end: int) -> None:
        """Adds a row that computes position `start` next; it is complete at `end` tokens, at least start + 2."""
        sequence.steady_row = len(self.sequences)
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self._note(sequence, min(-start % self._block_size, end - 2 - start), end)

    def leave(self, sequence: Sequence) -> int:
        """Removes a row; returns the position it would have computed next. The last row takes its index."""
        row = sequence.steady_row
        if row is None:
            raise ValueError(f"sequence {sequence.sequence_id} is no steady row")
        start = self.starts[row]
        last = self.sequences.pop()
        last_slot, last_start = self.slots.pop(), self.starts.pop()
        if last is not sequence:
            self.sequences[row], self.slots[row], self.starts[row] = last, last_slot, last_start
            last.steady_row = row
        sequence.steady_row = None
        self._forget(sequence)
        return start

    def start_of(self, sequence: Sequence) -> int:
        """Tokens computed before the row's next step. Raises ValueError for a sequence that is no steady row."""
        if sequence.steady_row is None:
            raise ValueError(f"sequence {sequence.sequence_id} is no steady row")
        return self.starts[sequence.steady_row]

    def pop_due(self) -> dict[Sequence, int]:
        """Rows that are to be looked at before the next step, with the length at which each is complete.

        Such a row stands at a block edge (start is a multiple of the block size), at its last token (start + 2 is its
        end), or both. It must `stay` or `leave`, or its step is its last.
        """
        due = self._agenda.pop(self._tick, {})
        for sequence in due:
            del self._due_tick[sequence]
        return due

    def stay(self, sequence: Sequence, end: int) -> None:
        """Notes when a row that was due, and goes on after this step, is due next."""
        start = self.start_of(sequence)
        self._note(sequence, min(self._block_size - start % self._block_size, end - 2 - start), end)

    def advance(self) -> None:
        """Every row computed one token more."""
        self.starts = [start + 1 for start in self.starts]
        self._tick += 1

    def _note(self, sequence: Sequence, num_ticks: int, end: int) -> None:
        due = self._tick + num_ticks
        self._due_tick[sequence] = due
        self._agenda.setdefault(due, {})[sequence] = end

    def _forget(self, sequence: Sequence) -> None:
        due = self._due_tick.pop(sequence, None)
        if due is not None:
            entry = self._agenda[due]
            del entry[sequence]
            if not entry:
                del self._agenda[due]
