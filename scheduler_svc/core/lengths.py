"""How many more tokens a sequence is thought to get, by those that ended on the same replica lately.

Knows numbers of output tokens alone. What a limit cut short says "at least so many": the share of sequences that go on
past a length is estimated as by Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations" (JASA 1958).

    share that gets longer   1 ----.
                                   '---.______          past all that was seen: `num_beyond` tokens more
                             0 ----------------'----    the mean of what is left is the area right of a length
"""

from __future__ import annotations

from bisect import bisect_right

_NUM_REMEMBERED = 128
_REFRESH = 8
"""The curve is drawn anew when one in so many of the ends remembered is not in it."""


class Lengths:
    """Ends of sequences, and the curve through them."""

    __slots__ = ("_areas", "_ends", "_lengths", "_num_beyond", "_num_new", "_shares", "_were_cut", "longest_mean")

    def __init__(self, num_beyond: int) -> None:
        """`num_beyond`: tokens that a sequence is thought to get which has more than any that was seen."""
        self._num_beyond = num_beyond
        # Output tokens, and whether there would have been more, oldest first.
        self._ends: list[int] = []
        self._were_cut: list[bool] = []
        self._num_new = 0  # of those, the ones that the curve does not know
        # From lengths[i] to the next, shares[i] of all sequences go on; areas[i] is the area up to there.
        self._lengths, self._shares, self._areas = [0], [1.0], [0.0]
        self.longest_mean = float(num_beyond)
        """The most that `num_more` says of any length."""

    def note(self, num_tokens: int, *, was_cut: bool) -> None:
        """A sequence ended with so many output tokens; `was_cut`: by a limit, without which it would have gone on."""
        self._ends.append(num_tokens)
        self._were_cut.append(was_cut)
        if len(self._ends) > _NUM_REMEMBERED:
            del self._ends[0], self._were_cut[0]
        self._num_new += 1
        if self._num_new * _REFRESH >= len(self._ends):
            self._num_new = 0
            self._draw()

    def num_more(self, num_tokens: int, most: int) -> float:
        """Mean of the tokens that a sequence with so many will still get if it gets no more than `most`."""
        share = self._shares[bisect_right(self._lengths, num_tokens) - 1]
        if num_tokens >= self._lengths[-1] or share == 0:
            return min(most, self._num_beyond)
        return (self._area(num_tokens + most) - self._area(num_tokens)) / share

    def _area(self, length: int) -> float:
        index = bisect_right(self._lengths, length) - 1
        width = length - self._lengths[index]
        if index == len(self._lengths) - 1:
            width = min(width, self._num_beyond)
        return self._areas[index] + self._shares[index] * width

    def _draw(self) -> None:
        lengths, shares, areas = [0], [1.0], [0.0]
        share, num_left = 1.0, len(self._ends)
        for length, (num_ended, num_gone) in sorted(self._counts().items()):
            area = areas[-1] + share * (length - lengths[-1])
            share *= 1 - num_ended / num_left
            num_left -= num_gone
            if length == 0:
                shares[0] = share
                continue
            lengths.append(length)
            shares.append(share)
            areas.append(area)
        self._lengths, self._shares, self._areas = lengths, shares, areas
        total = areas[-1] + share * self._num_beyond
        means = [(total - before) / share for before, share in zip(areas, shares, strict=True) if share]
        self.longest_mean = max([float(self._num_beyond), *means])

    def _counts(self) -> dict[int, list[int]]:
        """By length: how many ended of themselves there, and how many ended there at all."""
        counts: dict[int, list[int]] = {}
        for length, was_cut in zip(self._ends, self._were_cut, strict=True):
            count = counts.setdefault(length, [0, 0])
            count[0] += not was_cut
            count[1] += 1
        return counts
