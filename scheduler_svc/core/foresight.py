"""What the running sequences of a replica will hold at most, together with one more.

Knows tokens and the tokens to come; must not know sequences. Foreseen as in Gong et al., "Past-Future Scheduler for LLM
Serving under SLA Guarantees" (ASPLOS 2025): all grow by one token a step until each is as long as it gets, and leaves;
the peak is just before somebody leaves. While all grow together the peak stays what it is, so it is foreseen anew only
when somebody came or left, or the foresight is old.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Foresight:
    """The running ones, longest growth first, with the tokens held when each has grown up.

    held[i] = tokens of 0 ... i + (i + 1) * growth[i]          those behind have left by then
    """

    __slots__ = ("_before", "_behind", "_block_size", "_growths", "_sums", "_tokens", "made_at_step", "num_shared")

    def __init__(
        self, lengths: Iterable[tuple[int, int]], block_size: int, *, num_shared: int = 0, made_at_step: int = 0
    ) -> None:
        """`lengths`: tokens, and tokens to come, of each. `num_shared`: blocks that they hold in common."""
        self._block_size = block_size
        self.num_shared = num_shared
        self.made_at_step = made_at_step
        # The last token that is sampled needs no place.
        rows = sorted(((1 - max(1, rest), tokens) for tokens, rest in lengths))
        self._growths = [growth for growth, _ in rows]  # negative, so that they ascend
        self._tokens = [tokens for _, tokens in rows]
        self._sums = [0]
        for tokens in self._tokens:
            self._sums.append(self._sums[-1] + tokens)
        held = [self._sums[i + 1] - (i + 1) * growth for i, growth in enumerate(self._growths)]
        # Of the first i, and of those from i on with one more beside them: who has grown up at the peak.
        self._before, best = [-1], -1
        for i, num in enumerate(held):
            best = i if best < 0 or num > held[best] else best
            self._before.append(best)
        self._behind, best = [-1], -1
        for i in range(len(held) - 1, -1, -1):
            best = i if best < 0 or held[i] - self._growths[i] >= held[best] - self._growths[best] else best
            self._behind.append(best)
        self._behind.reverse()

    def peak_blocks(self, tokens: int, rest: int) -> int:
        """Most blocks that they and one more of so many tokens, with so many to come, hold at once, sharing none.

        The peak of tokens is found exactly, and its blocks are counted; the peak of blocks may be up to one block a
        sequence higher.
        """
        growth = max(1, rest) - 1
        place = bisect_left(self._growths, -growth)
        best = (self._sums[place] + tokens + (place + 1) * growth, growth)
        for index, more in ((self._before[place], 0), (self._behind[place], 1)):
            if index >= 0:
                at = -self._growths[index]
                best = max(best, (self._sums[index + 1] + more * tokens + (index + 1 + more) * at, at))
        peak_at, size = best[1], self._block_size
        num_there = bisect_right(self._growths, -peak_at)
        own = -(-(tokens + peak_at) // size) if growth >= peak_at else 0
        return own + sum([-(-(each + peak_at) // size) for each in self._tokens[:num_there]])
