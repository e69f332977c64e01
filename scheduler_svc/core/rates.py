"""What a replica's steps cost, from the steps it answered.

Knows durations and counts alone. A step takes `step_ns + token_ns * tokens`: the line through the mean recent step that
only decoded and the mean recent step that also computed prompts. Each kind is remembered until the next of its kind.
"""

from __future__ import annotations

_KEEP = 0.9
"""Weight of a step relative to the next of its kind."""


class MeanStep:
    """A mean in which each value weighs a little less than the one after it."""

    __slots__ = ("_weight", "ns", "tokens")

    def __init__(self) -> None:
        self._weight = self.tokens = self.ns = 0.0

    def note(self, num_tokens: int, duration_ns: int) -> None:
        self._weight = self._weight * _KEEP + 1
        self.tokens += (num_tokens - self.tokens) / self._weight
        self.ns += (duration_ns - self.ns) / self._weight


class StepRates:
    """Recent costs; None where nothing can be said yet."""

    __slots__ = ("_decode", "_prefill", "copy_ns")

    def __init__(self) -> None:
        self._decode = MeanStep()
        self._prefill = MeanStep()
        self.copy_ns: float | None = None
        """Time that the copy of one block between the tiers takes."""

    def note(self, num_rows: int, num_tokens: int, duration_ns: int) -> None:
        """A step of so many rows and tokens took so long; 0 is no measurement."""
        if duration_ns > 0:
            (self._prefill if num_tokens > num_rows else self._decode).note(num_tokens, duration_ns)

    def note_copies(self, num_blocks: int, copy_ns: int) -> None:
        """Copies of so many blocks took so long; 0 is no measurement."""
        if num_blocks == 0 or copy_ns <= 0:
            return
        each = copy_ns / num_blocks
        self.copy_ns = each if self.copy_ns is None else _KEEP * self.copy_ns + (1 - _KEEP) * each

    @property
    def token_ns(self) -> float | None:
        """Time that one more token in a step takes."""
        more_tokens = self._prefill.tokens - self._decode.tokens
        if not self._decode.tokens or more_tokens < 1:
            return None
        slope = (self._prefill.ns - self._decode.ns) / more_tokens
        return slope if slope > 0 else None

    @property
    def step_ns(self) -> float | None:
        """Time of a step without a token."""
        slope = self.token_ns
        return None if slope is None else max(0.0, self._decode.ns - slope * self._decode.tokens)

    def predict_ns(self, num_tokens: int) -> float | None:
        """About how long a step of so many tokens takes; rather too long where steps of one kind alone are known."""
        step_ns, token_ns = self.step_ns, self.token_ns
        if step_ns is not None and token_ns is not None:
            return step_ns + token_ns * num_tokens
        known = [mean for mean in (self._decode, self._prefill) if mean.tokens]
        return max((mean.ns * max(1.0, num_tokens / mean.tokens) for mean in known), default=None)


def prefill_cap(rates: StepRates, num_decoding: int, target_ns: int | None) -> int | None:
    """Prompt tokens that a step may take while so many rows decode; None: nothing is known that speaks against more.

    With a target: what is left of it after the fixed cost and the decoding rows. Without: eight times the tokens that
    take as long as the fixed cost, so that a prompt in chunks takes at most an eighth longer than in one piece.
    """
    step_ns, token_ns = rates.step_ns, rates.token_ns
    if step_ns is None or token_ns is None:
        return None
    if target_ns is not None:
        return int((target_ns - step_ns) / token_ns) - num_decoding
    return int(8 * step_ns / token_ns) if step_ns > 0 else None
