"""The percentile that every figure of ours is: one of the values, never one between two."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least so large a share of the values does not exceed; 0 of none (nearest rank)."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0
