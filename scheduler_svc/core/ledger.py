"""The live sequences, and everything kept about one from its submission to its end.

Knows the waiting room, deadlines, history and tenants' accounts; must not know replicas or steps. What is kept for a
sequence is forgotten with it here, in one place.
"""

from __future__ import annotations

from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.history import Decision, History
from scheduler_svc.core.limits import CoreLimits, SchedulingPolicy
from scheduler_svc.core.reports import explanation
from scheduler_svc.core.room import WaitingRoom
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import Queued


class Ledger:
    """Books on live sequences."""

    def __init__(self, limits: CoreLimits) -> None:
        self.sequences: dict[int, Sequence] = {}
        """By id."""
        self.room = WaitingRoom(limits)
        self.deadlines = Deadlines()
        self.history = History(limits.max_explained)
        self._is_fair = limits.policy is SchedulingPolicy.FAIR
        self._told: dict[Sequence, int] = {}  # those that asked for Queued -> position told last

    def open(self, sequence: Sequence, now: int) -> None:
        """A new sequence is accepted and waits."""
        self.room.group_places.note_accepted(sequence.request)
        self.sequences[sequence.sequence_id] = sequence
        self.deadlines.note(sequence)
        self.enqueue(sequence, now)
        num_tokens = len(sequence.token_ids)
        self.note(sequence, Decision(now, "queued", f"attempt {sequence.request.attempt}, {num_tokens} tokens"))

    def close(self, sequence: Sequence, now: int, how: str) -> None:
        """A sequence has ended."""
        self.charge(sequence)
        self.room.dissolve(sequence)
        self.room.group_places.note_ended(sequence.request)
        del self.sequences[sequence.sequence_id]
        self._told.pop(sequence, None)
        self.note(sequence, Decision(now, how, ""))
        self.history.end(explanation(sequence, self.room, (), self.history.decisions(sequence.sequence_id)))
        self.note_if_empty(sequence.request.model)

    def enqueue(self, sequence: Sequence, now: int) -> None:
        """A sequence waits, for the first time or again."""
        self.room.pace(sequence.request.model).note_waiting(now)
        self.room.add(sequence)

    def note_if_empty(self, model: str) -> None:
        """Time in which nobody waits for a model says nothing of how fast its sequences start."""
        if not self.room.queue(model):
            self.room.pace(model).note_empty()

    def note(self, sequence: Sequence, decision: Decision) -> None:
        """Writes a decision into a live sequence's history."""
        self.history.note(sequence.sequence_id, decision)

    def charge(self, sequence: Sequence) -> None:
        """Charges its tenant for the tokens it got to know since it was charged last."""
        if self._is_fair and sequence.num_charged_tokens:
            self._charge(sequence, len(sequence.token_ids) - sequence.num_charged_tokens)

    def charge_start(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Charges its tenant for the tokens that it computes when it starts; those computed again are charged once."""
        if self._is_fair:
            self._charge(sequence, len(sequence.token_ids) - max(sequence.num_charged_tokens, num_cached_tokens))

    def _charge(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_charged_tokens = len(sequence.token_ids)
        self.room.queue(sequence.request.model).charge(sequence.request.tenant, num_tokens)

    # Places in the queue -----------------------------------------------------------------------------------------

    def place(self, sequence: Sequence, now: int) -> Queued:
        """Where a waiting sequence stands, and when it should start."""
        model = sequence.request.model
        position = self._told[sequence] = self.room.queue(model).position(sequence)
        interval = self.room.pace(model).interval_ns(now)
        return Queued(sequence.sequence_id, position, None if interval is None else (position + 1) * interval)

    def forget_place(self, sequence: Sequence) -> None:
        """It waits no more."""
        self._told.pop(sequence, None)

    def changed_places(self, now: int) -> list[Queued]:
        """Of those that asked: the places that are not what was told last."""
        room = self.room
        moved = [
            sequence
            for sequence, told in self._told.items()
            if room.queue(sequence.request.model).position(sequence) != told
        ]
        return [self.place(sequence, now) for sequence in moved]
