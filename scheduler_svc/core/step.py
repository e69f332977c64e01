"""A step in the making, and a step that waits for its answer.

Knows sequences as rows; decides only how a step's token budget is shared and whether a result answers a plan. Must not
know queues or where blocks come from.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.plan import Limit, StepResult
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.types import FinishReason, ResultMismatch


def chunk_tokens(num_wanted: int, num_left: int, others_want: bool) -> int:
    """Tokens for a row that wants `num_wanted` (at least 1) when `num_left` (at least 1) of the budget are left.

    A chunk that cannot finish its prompt anyway leaves a quarter, at least one token, to those behind it, so that a
    long prompt does not hold up short ones; what they do not want comes back to it when the step is closed.
    """
    if num_wanted <= num_left:
        return num_wanted
    if not others_want or num_left == 1:
        return num_left
    return num_left - max(1, num_left // 4)


@dataclass(slots=True)
class Eviction:
    """A sequence that lost its slot while a step was made."""

    sequence: Sequence
    reason: str
    num_blocks: int
    mode: PreemptionMode
    """What becomes of its blocks: RECOMPUTE or SWAP."""


@dataclass(slots=True)
class StepDraft:
    """What a step will do, until it is closed."""

    num_left: int
    """Tokens of the budget that nobody has yet."""
    token_limit: Limit = Limit.TOKENS
    """What set the budget."""
    appends: dict[Sequence, int] = field(default_factory=dict)
    """Steady rows at a block edge, with the block they got."""
    finals: dict[Sequence, None] = field(default_factory=dict)
    """Steady rows whose last token this step samples."""
    shares: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of each row that is not steady, best first."""
    admissions: dict[Sequence, int] = field(default_factory=dict)
    """Sequences that enter, with the tokens found in the prefix cache."""
    num_host_tokens: int = 0
    """Of those, in the host tier."""
    evictions: list[Eviction] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)
    """Sequences that need more blocks than there are; no plan holds a row of them any more."""
    follows: list[tuple[Sequence, Sequence, int]] = field(default_factory=list)
    """Waiting sequences that follow from now on, with leader and blocks in common."""
    num_requeued: int = 0
    """Evictions, from the first, of which the waiting room knows."""
    was_cut_short: bool = False
    """Whether a row wanted more tokens than it got."""

    def drop(self, sequence: Sequence) -> None:
        """Forgets a running sequence that is preempted; its tokens are free for others."""
        if sequence in self.admissions:
            raise ValueError(f"sequence {sequence.sequence_id} is preempted in the step that admits it")
        self.appends.pop(sequence, None)
        self.finals.pop(sequence, None)
        self.num_left += self.tokens_of(sequence)
        self.shares.pop(sequence, None)

    def tokens_of(self, sequence: Sequence) -> int:
        """Tokens that the step computes for a running sequence, once they are shared out."""
        return 1 if sequence.steady_row is not None else self.shares.get(sequence, 0)

    def spread_rest(self) -> None:
        """Gives what is left of the budget to the rows that want more, best first."""
        for sequence, share in self.shares.items():
            num_wanted = len(sequence.token_ids) - sequence.num_planned_tokens - share
            more = min(num_wanted, self.num_left)
            self.shares[sequence] = share + more
            self.num_left -= more
            self.was_cut_short = self.was_cut_short or more < num_wanted


@dataclass(slots=True)
class UnansweredPlan:
    """A plan that was handed out. The first `num_steady` rows were steady."""

    step: int
    rows: list[Sequence]
    starts: Items[int]
    counts: Items[int]
    num_to_sample: list[int]
    """Per row: 1 if it samples, 0 for an inner chunk."""
    num_steady: int
    num_tokens: int
    num_copies: int = 0
    """Blocks copied between the tiers."""
    edge_rows: list[int] = field(default_factory=list)
    """Steady rows at a block edge: all their earlier blocks are full."""
    final_rows: list[int] = field(default_factory=list)
    """Rows that sample the last token of their sequence."""
    departed: set[int] = field(default_factory=set)
    """Rows whose sequence left its slot since. Such a sequence settles or has ended; it runs nowhere."""
    last_of: list[Sequence] = field(default_factory=list)
    """Outgrown sequences of which this is the last plan; its answer completes them."""

    def row_of(self, sequence: Sequence) -> int | None:
        """The sequence's row, if it has one and did not depart."""
        try:
            return self.rows.index(sequence)
        except ValueError:
            return None

    def check(self, result: StepResult) -> None:
        """Raises ResultMismatch, naming what is wrong, unless the result answers this plan."""
        if result.step != self.step:
            raise ResultMismatch(f"the result is for step {result.step}, the oldest unanswered is {self.step}")
        num_rows, num_sampled = len(self.rows), list(result.num_sampled)
        if len(num_sampled) != num_rows:
            raise ResultMismatch(f"step {self.step} has {num_rows} rows, the result {len(num_sampled)}")
        if sum(num_sampled) != len(result.token_ids):
            raise ResultMismatch(
                f"step {self.step}: num_sampled adds up to {sum(num_sampled)}, token_ids holds {len(result.token_ids)}"
            )
        for row in (*result.finishes, *result.undelivered_rows):
            if not 0 <= row < num_rows:
                raise ResultMismatch(f"step {self.step} has {num_rows} rows, the result speaks of row {row}")
        if num_sampled != self.num_to_sample:
            for row, num in enumerate(num_sampled):
                self._check_row(row, num, result.finishes.get(row))
        for row, finish in result.finishes.items():
            self._check_row(row, num_sampled[row], finish)
        for row in self.final_rows:
            if row not in result.finishes and row not in result.undelivered_rows and not self._has_ended(row):
                raise ResultMismatch(f"step {self.step}: row {row} reached its last token and goes on")

    def _check_row(self, row: int, num: int, finish: FinishReason | None) -> None:
        expected = self.num_to_sample[row] if finish in (None, FinishReason.LENGTH) else 0
        if num != expected and not (num == 0 and self._has_ended(row)):
            raise ResultMismatch(f"step {self.step}: row {row} sampled {num} tokens, {expected} were to be")

    def _has_ended(self, row: int) -> bool:
        return row in self.departed and self.rows[row].state is State.ENDED


@dataclass(slots=True)
class Answer:
    """What a result meant for the sequences. Those that ended or settled hold no slot and no block any more."""

    finished: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    undelivered: list[Sequence] = field(default_factory=list)
    settled: list[Sequence] = field(default_factory=list)
    """Preempted ones that may wait now."""
    advanced: list[Sequence] = field(default_factory=list)
    """Running ones that filled a block."""
