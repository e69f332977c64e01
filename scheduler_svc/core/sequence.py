"""One sequence: its tokens, its order among others, and the states it may pass through.

Knows nothing of queues, replicas or plans beyond the numbers they keep here. Each number has one writer, named beside
it.
"""

from __future__ import annotations

import enum
from array import array

from scheduler_svc.core.order import Order, Rank
from scheduler_svc.core.prefix_cache import PrefixChain
from scheduler_svc.core.types import IllegalTransition, Request


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In a queue, without slot or blocks."""
    RUNNING = "running"
    """In a slot of a replica."""
    SETTLING = "settling"
    """Preempted while unanswered plans hold a row of it: the tokens they sample must be known before it may wait."""
    ENDED = "ended"
    """Its terminal event was returned."""


class Move(enum.Enum):
    """What may happen to a sequence."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    PREEMPT_UNANSWERED = "preempt with unanswered rows"
    SETTLE = "settle"
    END = "end"


TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.WAITING, Move.ADMIT): State.RUNNING,
    (State.RUNNING, Move.PREEMPT): State.WAITING,
    (State.RUNNING, Move.PREEMPT_UNANSWERED): State.SETTLING,
    (State.SETTLING, Move.SETTLE): State.WAITING,
    (State.WAITING, Move.END): State.ENDED,
    (State.RUNNING, Move.END): State.ENDED,
    (State.SETTLING, Move.END): State.ENDED,
}

_DEFAULT_ORDER = Order()


class Sequence:
    """A sequence from submission to its end. Compared by identity."""

    __slots__ = (
        "accepted_ns",
        "block_ids",
        "chain",
        "deadline_at_ns",
        "in_flight_digest",
        "num_charged_tokens",
        "num_foreign_blocks",
        "num_hashed_blocks",
        "num_lost_tokens",
        "num_overtakes",
        "num_planned_tokens",
        "num_prompt_tokens",
        "num_reported_tokens",
        "num_unanswered_rows",
        "priority",
        "queued_at_ns",
        "rank",
        "replica_id",
        "request",
        "slot",
        "state",
        "steady_row",
        "suspect_bound",
        "ticket",
        "token_ids",
    )

    def __init__(self, request: Request, now: int, ticket: int, order: Order = _DEFAULT_ORDER) -> None:
        """`ticket` counts submissions and breaks ties. Raises OverflowError or TypeError for what is no token id."""
        self.request = request
        self.state = State.WAITING
        self.priority = request.priority
        """Smaller is served first (scheduler, on an operator's word)."""
        self.deadline_at_ns = None if request.deadline_ns is None else now + request.deadline_ns
        """When its result is worthless (scheduler, on an operator's word)."""
        self.accepted_ns = now - request.age_ns
        """When its router accepted it."""
        self.ticket = ticket
        self.rank: Rank = order.rank(self)
        """Larger goes first (scheduler)."""
        self.token_ids = array("I", request.prompt_token_ids)
        """Prompt, then output, all known."""
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(request.prior_token_ids)
        self.queued_at_ns = now
        self.num_overtakes = 0
        """Sequences behind it that started while it waited for blocks (scheduler)."""
        self.num_reported_tokens = len(self.token_ids)
        """Known tokens at the last Progress event (scheduler)."""
        self.num_lost_tokens = len(self.token_ids) - 1 if request.prior_token_ids else 0
        """Tokens whose KV existed once, on a replica it has left (replica)."""
        self.num_charged_tokens = 0
        """Known tokens that its tenant was charged for (scheduler, under the fair policy)."""
        sizes = request.crash_group_sizes
        self.suspect_bound = max(1, sizes[-1] // 2) if sizes else None
        """Rows that may be in flight with it, itself included, until it has sampled a token again (replica)."""

        self.replica_id: int | None = None
        """The replica that runs it or settles it (replica)."""
        self.slot = 0
        """Its slot there, while it runs (replica)."""
        self.num_planned_tokens = 0
        """Tokens computed there once all plans are answered; while it is a steady row, that row knows (replica)."""
        self.steady_row: int | None = None
        """Its index among the replica's steady rows (steady rows)."""
        self.num_unanswered_rows = 0
        """While it settles: plans yet to be answered (replica)."""

        self.block_ids: list[int] = []
        """Its block table, while it runs (KV space)."""
        self.num_hashed_blocks = 0
        """Full blocks of the table that were offered to the prefix cache (KV space)."""
        self.num_foreign_blocks: int | None = None
        """Cached blocks that it found at first; all others of its prefix it computed itself (KV space)."""
        self.chain: PrefixChain | None = None
        """Hashes of its full blocks, for the kind of replica that asked last for the first time (KV space)."""
        self.in_flight_digest: bytes | None = None
        """Digest of the block it computes next, under which followers find it (in flight)."""

    @property
    def sequence_id(self) -> int:
        """The caller's name for it."""
        return self.request.sequence_id

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, prior ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Length, prompt included, at which max_tokens ends it."""
        return self.num_prompt_tokens + self.request.max_tokens

    def move(self, move: Move) -> None:
        """Changes state. Raises IllegalTransition, changing nothing, for a move that its state does not allow."""
        state = TRANSITIONS.get((self.state, move))
        if state is None:
            raise IllegalTransition(f"sequence {self.sequence_id} cannot {move.value} while {self.state.value}")
        self.state = state
