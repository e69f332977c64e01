"""What a router counts: requests from their arrival to their end, tokens as they go out, and what was refused.

Knows what its catalogue means; must not know protocols. A `SequenceMeter` follows one sequence: what it does for each
delta is a look at the clock and a few additions on cells that were looked up once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from octavo.metrics import Distribution, MetricSet, Number
from router.errors import RouterError
from router.metrics_catalogue import (
    ABORTS,
    ATTEMPTS,
    CACHED_TOKENS,
    CATALOGUE,
    DECODE,
    E2E,
    GENERATION_SIZE,
    GENERATION_TOKENS,
    INTER_TOKEN,
    LOOP_LAG,
    NUM_CHOICES,
    PREFILL,
    PROMPT_SIZE,
    PROMPT_TOKENS,
    RECOVERED,
    RECOVERIES,
    REFUSALS,
    REQUESTS,
    SUCCESSES,
    TENANT_GENERATION_TOKENS,
    TENANT_PROMPT_TOKENS,
    TPOT,
    TTFT,
)
from router.streams.types import ReceiptParts

_LAG_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelCells:
    """The cells that every sequence of one model needs."""

    ttft: Distribution
    inter_token: Distribution
    tpot: Distribution
    e2e: Distribution
    prefill: Distribution
    decode: Distribution
    generation_tokens: Number
    generation_size: Distribution
    cached_tokens: Number
    attempts: Number
    recoveries: Number
    recovered: Number


class RouterMetrics:
    """One per router, used in its event loop alone. Times are of `clock`, in seconds."""

    def __init__(self, *, by_tenant: bool = False, clock: Callable[[], float] = monotonic) -> None:
        self.set = MetricSet(CATALOGUE)
        self.clock = clock
        self._by_tenant = by_tenant
        self._models: dict[str, ModelCells] = {}
        self._loop_lag = self.set.distribution(LOOP_LAG)

    def begin(self, model: str, tenant: str, num_prompt_tokens: int, num_choices: int) -> None:
        """A request passed every check and runs."""
        self.set.number(REQUESTS, model).add()
        self.set.number(PROMPT_TOKENS, model).add(num_prompt_tokens)
        self.set.distribution(PROMPT_SIZE, model).observe(num_prompt_tokens)
        self.set.distribution(NUM_CHOICES, model).observe(num_choices)
        if self._by_tenant:
            self.set.number(TENANT_PROMPT_TOKENS, model, tenant).add(num_prompt_tokens)

    def sequence(self, model: str, tenant: str, arrived_at: float) -> SequenceMeter:
        """Follow one sequence of a request that arrived then."""
        cells = self._models.get(model)
        if cells is None:
            cells = self._models[model] = self._cells(model)
        return SequenceMeter(self, cells, model, tenant, arrived_at)

    def refused(self, error: RouterError) -> None:
        """A request ended with an error, before or while it ran."""
        self.set.number(REFUSALS, error.kind.value, str(error.codes.http_status)).add()

    def ended(self, model: str, tenant: str, finish_reason: str, num_tokens: int) -> None:
        """A sequence is complete; `finish_reason` as in SUCCESSES."""
        self.set.number(SUCCESSES, model, finish_reason).add()
        if finish_reason == "stop_string":
            self.set.number(ABORTS, model, finish_reason).add()
        self.count_tenant(model, tenant, num_tokens)

    def aborted(self, model: str, tenant: str, reason: str, num_tokens: int) -> None:
        """A sequence was ended while it ran; `reason` as in ABORTS."""
        self.set.number(ABORTS, model, reason).add()
        self.count_tenant(model, tenant, num_tokens)

    def count_tenant(self, model: str, tenant: str, num_tokens: int) -> None:
        if self._by_tenant:
            self.set.number(TENANT_GENERATION_TOKENS, model, tenant).add(num_tokens)

    async def watch_loop(self) -> None:
        """Sample the event loop's lag until cancelled."""
        while True:
            due = self.clock() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._loop_lag.observe(max(0.0, self.clock() - due))

    def totals(self) -> str:
        """What there was from start to end, for the log."""
        total = self.set.total
        return (
            f"totals: {total(REQUESTS):.0f} requests, {total(PROMPT_TOKENS):.0f} prompt tokens, "
            f"{total(GENERATION_TOKENS):.0f} generated tokens, {total(SUCCESSES):.0f} sequences complete, "
            f"{total(ABORTS):.0f} aborted, {total(RECOVERIES):.0f} recoveries, {total(REFUSALS):.0f} errors"
        )

    def _cells(self, model: str) -> ModelCells:
        number, distribution = self.set.number, self.set.distribution
        return ModelCells(
            ttft=distribution(TTFT, model),
            inter_token=distribution(INTER_TOKEN, model),
            tpot=distribution(TPOT, model),
            e2e=distribution(E2E, model),
            prefill=distribution(PREFILL, model),
            decode=distribution(DECODE, model),
            generation_tokens=number(GENERATION_TOKENS, model),
            generation_size=distribution(GENERATION_SIZE, model),
            cached_tokens=number(CACHED_TOKENS, model),
            attempts=number(ATTEMPTS, model),
            recoveries=number(RECOVERIES, model),
            recovered=number(RECOVERED, model),
        )


class SequenceMeter:
    """One sequence: `tokens` with each delta, then `complete` or `abort`, once."""

    __slots__ = ("_arrived_at", "_cells", "_clock", "_first_at", "_last_at", "_metrics", "_model", "_tenant", "num")

    def __init__(self, metrics: RouterMetrics, cells: ModelCells, model: str, tenant: str, arrived_at: float) -> None:
        self._metrics = metrics
        self._cells = cells
        self._clock = metrics.clock
        self._model = model
        self._tenant = tenant
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._last_at = arrived_at
        self.num = 0
        """Tokens handed out so far."""

    def tokens(self, count: int) -> None:
        """A delta of so many tokens goes out."""
        now = self._clock()
        cells = self._cells
        if self._first_at is None:
            self._first_at = now
            cells.ttft.observe(now - self._arrived_at)
        else:
            cells.inter_token.observe(now - self._last_at)
        self._last_at = now
        self.num += count
        cells.generation_tokens.value += count

    def complete(self, finish_reason: str, receipt: ReceiptParts) -> None:
        """The sequence is complete."""
        cells = self._cells
        self._end(receipt)
        cells.generation_size.observe(self.num)
        cells.cached_tokens.add(receipt.cached_tokens or 0)
        cells.recovered.add(receipt.num_attempts > 1)
        self._metrics.ended(self._model, self._tenant, finish_reason, self.num)

    def abort(self, reason: str, receipt: ReceiptParts) -> None:
        """The sequence was ended while it ran."""
        self._end(receipt)
        self._metrics.aborted(self._model, self._tenant, reason, self.num)

    def _end(self, receipt: ReceiptParts) -> None:
        cells, now = self._cells, self._clock()
        cells.e2e.observe(now - self._arrived_at)
        cells.attempts.add(receipt.num_attempts)
        cells.recoveries.add(receipt.num_attempts - 1)
        if self._first_at is None:
            return
        decode_s = self._last_at - self._first_at
        cells.decode.observe(decode_s)
        if self.num > 1:
            cells.tpot.observe(decode_s / (self.num - 1))
        if receipt.first_queue_s is not None:
            cells.prefill.observe(max(0.0, self._first_at - self._arrived_at - receipt.first_queue_s))


def abort_reason(failure: BaseException | None) -> str:
    """The word of ABORTS for what ended a request's sequences; a reader that goes away raises nothing of its own."""
    if isinstance(failure, RouterError):
        return failure.kind.value
    return "internal" if isinstance(failure, Exception) else "client_gone"
