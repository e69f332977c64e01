"""The phases of one sequence and what moves between them, as one table; an illegal move raises and changes nothing.

OPEN      the attempt is at the scheduler, on no replica yet
RUNNING   a replica has it
WAITING   between attempts, until the backoff ends
SETTLING  told to be complete; the last tokens or the last event are awaited
ENDED     nothing more comes out
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Phase(enum.Enum):
    OPEN = "open"
    RUNNING = "running"
    WAITING = "waiting"
    SETTLING = "settling"
    ENDED = "ended"


class Move(enum.Enum):
    PLACED = "placed on a replica"
    LOST = "tokens lost on their way"
    BROKEN = "the attempt broke before a replica had it"
    CUT = "the attempt broke after a replica had it"
    RETRY = "the backoff is over"
    TOLD = "said to be complete while something is outstanding"
    END = "complete or failed"


TRANSITIONS: Mapping[tuple[Phase, Move], Phase] = {
    (Phase.OPEN, Move.PLACED): Phase.RUNNING,
    (Phase.OPEN, Move.LOST): Phase.OPEN,
    (Phase.OPEN, Move.BROKEN): Phase.WAITING,
    (Phase.OPEN, Move.TOLD): Phase.SETTLING,
    (Phase.OPEN, Move.END): Phase.ENDED,
    (Phase.RUNNING, Move.PLACED): Phase.RUNNING,
    (Phase.RUNNING, Move.LOST): Phase.OPEN,
    (Phase.RUNNING, Move.CUT): Phase.OPEN,
    (Phase.RUNNING, Move.TOLD): Phase.SETTLING,
    (Phase.RUNNING, Move.END): Phase.ENDED,
    (Phase.WAITING, Move.RETRY): Phase.OPEN,
    (Phase.WAITING, Move.TOLD): Phase.SETTLING,
    (Phase.WAITING, Move.END): Phase.ENDED,
    (Phase.SETTLING, Move.PLACED): Phase.SETTLING,
    (Phase.SETTLING, Move.LOST): Phase.OPEN,
    (Phase.SETTLING, Move.END): Phase.ENDED,
}


class IllegalMove(Exception):
    """A move that the table does not hold; the phase stays what it was."""
