"""Small pieces of a sequence's state, each with one rule; `stream` puts them together. Pure, as it is."""

from __future__ import annotations

from dataclasses import replace

from router.streams.types import (
    NewPromptLogprobs,
    NewTokens,
    Output,
    PromptDelta,
    ReceiptParts,
    Scheduled,
    TokenDelta,
)

MAX_FRUITLESS_ATTEMPTS = 3
"""Attempts whose tokens were lost, without one new token between them, that fail the sequence."""

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0


class Patience:
    """How often a sequence is tried again, and after how long; what comes of an attempt restores it."""

    def __init__(self) -> None:
        self._held_at_attempt = (0, 0)
        self._num_fruitless = 0
        self._backoff_s = FIRST_BACKOFF_S

    def begin_attempt(self, held: tuple[int, int]) -> None:
        """An attempt begins, of a sequence that holds so much."""
        self._held_at_attempt = held

    def restore(self) -> None:
        """A replica has taken it."""
        self._backoff_s = FIRST_BACKOFF_S

    def reward(self) -> None:
        """New tokens have come."""
        self._num_fruitless = 0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def is_full(self) -> bool:
        """Whether a reward would change nothing."""
        return self._num_fruitless == 0 and self._backoff_s == FIRST_BACKOFF_S

    def is_out_after_loss(self, held: tuple[int, int]) -> bool:
        """Whether tokens of this attempt, which were lost while so much was held, were lost once too often."""
        self._num_fruitless += held == self._held_at_attempt
        return self._num_fruitless >= MAX_FRUITLESS_ATTEMPTS

    def backoff_s(self) -> float:
        """How long to wait before the next attempt; the time after it is twice as long."""
        due, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        return due


class ProgressWatch:
    """Since when the scheduler has known of a token that has not arrived."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known_tokens = 0
        self._missing: tuple[int, float] | None = None

    @property
    def due(self) -> float | None:
        """When the missing token counts as lost; None while nothing is missing."""
        return self._missing[1] if self._missing else None

    def told(self, num_tokens: int) -> None:
        """The scheduler knows of so many output tokens."""
        self._known_tokens = max(self._known_tokens, num_tokens)

    def update(self, num_held_tokens: int, now: float) -> None:
        """Compare what is known with what is held. A token that is missing longest decides."""
        if self._missing is not None and num_held_tokens >= self._missing[0]:
            self._missing = None
        if self._missing is None and self._known_tokens > num_held_tokens:
            self._missing = (self._known_tokens, now + self._grace_s)

    def expects_more_than(self, num_held_tokens: int) -> bool:
        """Whether tokens beyond so many are known of, or were when it was last looked."""
        return self._missing is not None or self._known_tokens > num_held_tokens

    def clear(self) -> None:
        """Nothing is expected of this attempt any more."""
        self._known_tokens, self._missing = 0, None


class PromptGate:
    """Lets the prompt's logprobs out in order, and tokens only behind the last of them."""

    def __init__(self, positions: range | None) -> None:
        wanted = positions or range(0)
        self.next_position, self._end = wanted.start, wanted.stop
        self._held: list[Output] = []

    @property
    def missing(self) -> bool:
        """Whether prompt logprobs are still to come."""
        return self.next_position < self._end

    def tokens(self, tokens: NewTokens) -> list[Output]:
        """What may go out when these tokens have come."""
        if self.missing:
            self._held.append(tokens)
            return []
        return [tokens]

    def logprobs(self, delta: PromptDelta) -> list[Output]:
        """What may go out when these logprobs have come; they must not begin behind `next_position`."""
        skip = self.next_position - delta.start
        fresh = delta.logprobs[skip : skip + self._end - self.next_position]
        if not fresh:
            return []
        outputs: list[Output] = [NewPromptLogprobs(self.next_position, fresh)]
        self.next_position += len(fresh)
        if not self.missing:
            outputs += self._held
            self._held = []
        return outputs


class Overtaking:
    """Deltas of the replica that an attempt goes on at, which came before the last ones of the one it was taken off.

    Tokens of one replica keep their order, so what is ahead of others from the same one tells of a loss.
    """

    def __init__(self) -> None:
        self._ahead: list[TokenDelta] = []

    def keep(self, delta: TokenDelta) -> None:
        """A delta came too early."""
        self._ahead.append(delta)
        self._ahead.sort(key=lambda each: each.position)

    def next(self, num_held_tokens: int) -> TokenDelta | None:
        """The first that nothing is missing before any more; it is kept no longer."""
        if self._ahead and self._ahead[0].position <= num_held_tokens:
            return self._ahead.pop(0)
        return None

    def clear(self) -> None:
        """Another attempt begins."""
        self._ahead = []


def add_placement(receipt: ReceiptParts, event: Scheduled) -> ReceiptParts:
    """The receipt after one more admission: times and recomputation add up, the cache counts at the first."""
    return replace(
        receipt,
        queue_s=receipt.queue_s + event.queue_s,
        first_queue_s=event.queue_s if receipt.first_queue_s is None else receipt.first_queue_s,
        cached_tokens=event.cached_tokens if receipt.cached_tokens is None else receipt.cached_tokens,
        recomputed_tokens=receipt.recomputed_tokens + event.recomputed_tokens,
        replica=event.replica,
        numerics=event.numerics,
        batch_invariant=event.batch_invariant,
    )
