"""How far the sequences of a replica are thought to grow, and how sure that is.

Knows lengths of one replica's sequences; must not know queues or blocks in use.
"""

from __future__ import annotations

from math import ceil

from scheduler_svc.core.lengths import Lengths
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import FinishReason

_MORE_CAUTION = 0.1
_KEEP_CAUTION = 0.98


class Growth:
    """What is known of growth on one replica."""

    __slots__ = ("_block_size", "_caution", "_lengths", "is_on")

    def __init__(self, block_size: int, num_expected_tokens: int) -> None:
        """`num_expected_tokens`: output tokens that a sequence is thought to get before others told how many."""
        self._block_size = block_size
        self.is_on = False
        """Whether somebody had to wait or leave for others to grow since the replica was last empty."""
        self._caution = 0.0  # part by which sequences are thought to get longer than usual
        self._lengths = Lengths(num_expected_tokens)

    def note_refusal(self) -> None:
        """A waiting sequence was not let in, for others to grow."""
        self.is_on = True

    def note_preemption(self) -> None:
        """A running sequence had to leave, for others to grow."""
        self._caution = min(1.0, self._caution + _MORE_CAUTION)
        self.is_on = True

    def note_end(self, num_output_tokens: int, reason: FinishReason | None) -> None:
        """A running sequence is complete; None: it was ended from outside, as one is that met a stop string."""
        was_cut = reason in (FinishReason.LENGTH, FinishReason.NUMERIC_ERROR, FinishReason.GRAMMAR_ERROR)
        self._lengths.note(num_output_tokens, was_cut=was_cut)
        self._caution *= _KEEP_CAUTION

    def note_empty(self) -> None:
        """Nothing runs: what comes may fare better."""
        self.is_on = False

    def num_remaining_tokens(self, sequence: Sequence, end: int) -> int:
        """Tokens that the sequence is thought to grow by; `end`: the length that it cannot pass."""
        most = max(0, end - len(sequence.token_ids))
        more = self._lengths.num_more(sequence.num_output_tokens, most)
        return min(most, ceil(more * (1 + self._caution)))

    @property
    def num_longest_blocks(self) -> int:
        """Blocks that no sequence is thought to grow by more than."""
        return ceil(self._lengths.longest_mean * (1 + self._caution)) // self._block_size + 1
