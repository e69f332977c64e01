"""Room that admission keeps for the growth of sequences that run, once some had to be preempted for want of blocks.

Knows lengths and blocks of one replica's sequences; must not know queues. What a replica must hold at most is foreseen
as in Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025): all grow by one token a
step until each is as long as sequences here usually get, and leaves; the peak is just before somebody leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.sequence import Sequence

_MORE_CAUTION = 0.1
_KEEP_CAUTION = 0.98
_KEEP_LENGTH = 0.95
"""Weight of one finished sequence's length relative to the next one's."""


class Growth:
    """Whether room is kept on a replica, and how much."""

    __slots__ = ("_block_size", "_caution", "_typical", "is_on")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.is_on = False
        """Whether a sequence was preempted for blocks since the replica was last empty."""
        self._caution = 0.0  # part by which sequences are thought to get longer than usual
        self._typical: float | None = None  # output tokens of a finished sequence

    def note_preemption(self) -> None:
        """A running sequence had to leave, for others to grow."""
        if self.is_on:
            self._caution = min(1.0, self._caution + _MORE_CAUTION)
        self.is_on = True

    def note_finish(self, num_output_tokens: int) -> None:
        """A sequence is complete."""
        if self._typical is None:
            self._typical = float(num_output_tokens)
        self._typical += (1 - _KEEP_LENGTH) * (num_output_tokens - self._typical)
        self._caution *= _KEEP_CAUTION

    def note_empty(self) -> None:
        """Nothing runs: what comes may fare better."""
        self.is_on = False

    def num_remaining_tokens(self, sequence: Sequence, end: int) -> int:
        """Tokens that the sequence is thought to grow by; `end`: the length that it cannot pass."""
        num_tokens = len(sequence.token_ids)
        if self._typical is None:
            return max(0, end - num_tokens)
        usual = sequence.num_prompt_tokens + int(self._typical * (1 + self._caution))
        return max(0, min(end, max(usual, num_tokens + self._block_size)) - num_tokens)

    def peak_blocks(self, lengths: Iterable[tuple[int, int]]) -> int:
        """Most blocks that sequences of so many (tokens, remaining tokens) hold at once, sharing none.

        The peak of tokens is found exactly, and its blocks are counted; the peak of blocks may be up to one block a
        sequence higher.
        """
        # The last token that is sampled needs no place.
        by_growth = sorted(((max(0, rest - 1), tokens) for tokens, rest in lengths), reverse=True)
        best_total, best_index, total_now = -1, -1, 0
        for index, (growth, tokens) in enumerate(by_growth):
            # When this one has grown up, those before it have grown as much and go on; those behind it have left.
            total_now += tokens
            total = total_now + (index + 1) * growth
            if total > best_total:
                best_total, best_index = total, index
        size = self._block_size
        return sum(-(-(tokens + by_growth[best_index][0]) // size) for _, tokens in by_growth[: best_index + 1])
