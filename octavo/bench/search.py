"""Finds the hardest load that is still good enough, by doubling and then halving the gap.

Knows numbers alone: whether one is good enough, a function says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def find_limit(
    is_met: Callable[[float], Awaitable[bool]], first: float, most: float, *, in_whole_numbers: bool, precision: float
) -> float | None:
    """The largest load that meets, of those tried; None where `first` does not.

    Assumes that a harder load does no better. Ends once the gap is at most `precision` of the load, or 1 where loads
    are whole numbers.
    """
    low, high = None, first
    while await is_met(high):
        if high >= most:
            return high
        low, high = high, min(2 * high, most)
    if low is None:
        return None
    while high - low > max(precision * high, 1 if in_whole_numbers else 0):
        middle = (low + high) / 2
        if in_whole_numbers:
            middle = float(int(middle))
        low, high = (middle, high) if await is_met(middle) else (low, middle)
    return low
