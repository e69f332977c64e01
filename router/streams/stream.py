"""One sequence: token deltas and scheduler events in, ordered tokens and resubmissions out.

Pure: no I/O and no clock; `now` is an argument, in seconds. The two paths are not ordered against each other, and
either may lose, repeat or delay what it carries; whatever happens, each token leaves here once, in order, and the
sequence ends once. It knows no text: stop strings belong to its caller, who calls `stop`. Its phases are those of
`phases`; what it holds is `held`'s.
"""

from __future__ import annotations

from dataclasses import replace

from router.streams.failures import grammar_error, no_new_token, not_taken_over, numeric_error
from router.streams.held import HeldAnswer
from router.streams.parts import MAX_FRUITLESS_ATTEMPTS, Overtaking, Patience, ProgressWatch, add_placement
from router.streams.phases import TRANSITIONS, IllegalMove, Move, Phase
from router.streams.types import (
    AttemptEnded,
    Availability,
    Completed,
    Failed,
    Finish,
    Finished,
    Input,
    NewTokens,
    Output,
    Preempted,
    Progress,
    PromptDelta,
    Queued,
    QueueMoved,
    ReceiptParts,
    Scheduled,
    StreamSpec,
    Submit,
    TokenDelta,
)

LOSS_GRACE_S = 2.0
"""How long tokens that the scheduler speaks of may be on their way before they count as lost."""

RECEIPT_GRACE_S = 0.25
"""How long a complete sequence waits for the event that says where it ran."""

_NO_TIMERS = (None, None, None, None)


class Stream:
    """The state machine. `start` first, then `feed` each input and `wake` at `wake_at`; act on what they return."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.phase = Phase.OPEN
        self.attempt = 1
        self.receipt = ReceiptParts()
        self._held = HeldAnswer(spec)
        # What every plain delta needs, at hand; the list is the answer's own.
        self._key, self._max_tokens, self._token_ids = spec.stream_key, spec.max_tokens, self._held.token_ids
        self._progress = ProgressWatch(LOSS_GRACE_S)
        self._overtaking = Overtaking()
        self._patience = Patience()
        self._crash_group_sizes: tuple[int, ...] = ()
        self._ready = True
        self._placed = self._call_over = False
        self._retry_at: float | None = None
        self._settle_at: float | None = None
        self._recovery_at: float | None = None
        self._outputs: list[Output] = []
        self._plain_position: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every output token held so far."""
        return tuple(self._held.token_ids)

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def wake_at(self) -> float | None:
        """When `wake` is due next."""
        if self.ended:
            return None
        timers = (self._retry_at, self._settle_at, self._recovery_at, self._progress.due)
        if timers == _NO_TIMERS:  # at nearly every token
            return None
        return min(at for at in timers if at is not None)

    def start(self) -> tuple[Output, ...]:
        """The first attempt."""
        self._submit()
        return self._take()

    def stop(self) -> None:
        """The caller ends the sequence (stop string met, client gone): nothing more comes out."""
        if not self.ended:
            self._move(Move.END)
            self._plain_position = None

    def feed(self, item: Input, now: float) -> tuple[Output, ...]:
        """Take one input. What belongs to another sequence or attempt is dropped before it is looked at."""
        if self.ended or not self._is_current(item):
            return ()
        match item:
            case TokenDelta():
                self._on_tokens(item, now)
                while (overtaken := self._overtaking.next(len(self._held.token_ids))) is not None:
                    self._on_tokens(overtaken, now)
            case PromptDelta():
                self._on_prompt(item, now)
            case Scheduled():
                self._on_scheduled(item)
            case Preempted():
                self.receipt = replace(self.receipt, num_preemptions=self.receipt.num_preemptions + 1)
            case Queued():
                self._outputs.append(QueueMoved(item.position, item.eta_s))
            case Progress():
                self._progress.told(item.num_output_tokens)
                self._watch_progress(now)
            case Finished():
                self._on_finished(item, now)
            case AttemptEnded():
                self._on_attempt_ended(item, now)
            case Availability():
                self._ready = item.ready
        self._end_if_complete(now)
        return self._take()

    def feed_plain(self, delta: TokenDelta) -> NewTokens | None:
        """What `feed` puts out for a delta that says nothing but the next tokens of a sequence that runs as it should.

        None, and nothing changed, for any other: that one is to be fed.
        """
        key, attempt, position, token_ids, logprobs, finish, *_ = delta
        if (
            position != self._plain_position
            or attempt != self.attempt
            or key != self._key
            or not token_ids
            or logprobs is not None
            or finish is not None
            or position + len(token_ids) >= self._max_tokens
        ):
            return None
        self._token_ids.extend(token_ids)
        self._plain_position = position + len(token_ids)
        return NewTokens._make((position, token_ids, None))

    def wake(self, now: float) -> tuple[Output, ...]:
        """Do what is due at `now`; early calls do nothing."""
        if self.ended:
            return ()
        if _is_due(self._retry_at, now):
            self._retry_at = None
            self._next_attempt(Move.RETRY)
        if _is_due(self._settle_at, now):
            self._settle_at = None
            if self._held.is_whole:
                self._complete()
            else:
                self._lose(now)
        if _is_due(self._progress.due, now) and not self.ended:
            self._lose(now)
        if _is_due(self._recovery_at, now) and not self.ended:
            self._give_up_waiting(now)
        return self._take()

    # The token path.

    def _is_current(self, item: Input) -> bool:
        if isinstance(item, (TokenDelta, PromptDelta)):
            return item.stream_key == self.spec.stream_key and item.attempt == self.attempt
        return isinstance(item, Availability) or item.attempt == self.attempt

    def _on_tokens(self, delta: TokenDelta, now: float) -> None:
        if self._held.misses_before(delta):
            if not self._held.may_be_overtaken_by(delta):
                self._lose(now)
                return
            self._overtaking.keep(delta)
            self._progress.told(delta.position)
            self._watch_progress(now)
            return
        fresh = self._held.add(delta)
        if fresh is not None:
            self._patience.reward()
            self._recovery_at = None
            self._outputs += self._held.prompt.tokens(fresh)
        if self._held.seal(delta) and self._held.prompt.missing:
            self._settle(now + LOSS_GRACE_S)
        self._watch_progress(now)

    def _on_prompt(self, delta: PromptDelta, now: float) -> None:
        outputs = self._held.add_prompt(delta)
        if outputs is None:
            self._lose(now)
        else:
            self._outputs += outputs

    def _watch_progress(self, now: float) -> None:
        if self.phase in (Phase.OPEN, Phase.RUNNING):
            self._progress.update(len(self._held.token_ids), now)

    # The scheduler's call.

    def _on_scheduled(self, event: Scheduled) -> None:
        if self.phase is not Phase.WAITING:
            self._move(Move.PLACED)
        self._placed = True
        self._recovery_at = None
        self._patience.restore()
        self.receipt = add_placement(self.receipt, event)

    def _on_finished(self, event: Finished, now: float) -> None:
        self._held.told(event)
        self._settle(now + LOSS_GRACE_S)

    def _on_attempt_ended(self, end: AttemptEnded, now: float) -> None:
        self._call_over = True
        if self.phase is Phase.SETTLING or self.phase is Phase.WAITING:
            return
        if self._held.is_whole:
            return
        if end.failure is not None and not end.retriable:
            self._fail(Failed(end.failure, end.message, end.retry_after_s))
            return
        if end.crash_group_size:
            self._crash_group_sizes = (*self._crash_group_sizes, end.crash_group_size)
        if end.tokens_lost:
            self._lose(now)
            return
        if self._recovery_at is None:
            self._recovery_at = now + self.spec.recovery_timeout_s
        if self.phase is Phase.RUNNING:
            self._next_attempt(Move.CUT)
            return
        self._move(Move.BROKEN)
        self._progress.clear()
        self._retry_at = now + self._patience.backoff_s()

    # Completion, loss, failure.

    def _end_if_complete(self, now: float) -> None:
        held = self._held
        if self.ended:
            return
        if held.finish is Finish.NUMERIC_ERROR:
            self._fail(numeric_error(self.receipt.replica))
        elif held.finish is Finish.GRAMMAR_ERROR:
            self._fail(grammar_error(held.num_known_tokens))
        elif held.is_whole:
            if not held.is_nameless and (self._placed or self._call_over or held.was_told):
                self._complete()
            else:
                self._settle(now + (LOSS_GRACE_S if held.is_nameless else RECEIPT_GRACE_S))

    def _settle(self, until: float) -> None:
        if self.phase is not Phase.SETTLING:
            self._move(Move.TOLD)
            self._settle_at = until
            self._retry_at = self._recovery_at = None
            self._progress.clear()

    def _complete(self) -> None:
        held = self._held
        self._move(Move.END)
        finish = held.finish or Finish.LENGTH
        self._outputs.append(Completed(finish, held.final_token_id, len(held.token_ids), self.receipt))

    def _fail(self, failed: Failed) -> None:
        self._move(Move.END)
        self._outputs.append(failed)

    def _lose(self, now: float) -> None:
        """Tokens of this attempt will not come: ask for them again, from what is held."""
        if self.phase is Phase.WAITING:
            return  # another attempt is coming anyway
        if self._patience.is_out_after_loss(self._held.counts):
            self._fail(no_new_token(MAX_FRUITLESS_ATTEMPTS, self.receipt.replica, self.spec))
            return
        self._next_attempt(Move.LOST)

    def _give_up_waiting(self, now: float) -> None:
        if self.phase is Phase.OPEN and self._ready:
            self._recovery_at = now + self.spec.recovery_timeout_s  # in the queue of a scheduler that can serve
            return
        self._fail(not_taken_over(self.spec))

    # Attempts.

    def _next_attempt(self, move: Move) -> None:
        self._move(move)
        self.attempt += 1
        self.receipt = replace(self.receipt, num_attempts=self.attempt)
        self._held.forget_told()
        self._settle_at = self._retry_at = None
        self._progress.clear()
        self._overtaking.clear()
        self._placed = self._call_over = False
        self._submit()

    def _submit(self) -> None:
        self._patience.begin_attempt(self._held.counts)
        # The scheduler runs only what has a token to come; a full sequence is here for its prompt's logprobs.
        prior = self._held.token_ids[: self.spec.max_tokens - 1]
        start = self._held.prompt.next_position if self._held.prompt.missing else None
        self._outputs.append(Submit(self.attempt, tuple(prior), self._crash_group_sizes, start))

    def _move(self, move: Move) -> None:
        try:
            self.phase = TRANSITIONS[self.phase, move]
        except KeyError:
            raise IllegalMove(f"a sequence that is {self.phase.value} cannot take: {move.value}") from None

    def _take(self) -> tuple[Output, ...]:
        is_plain = (
            self.phase is Phase.RUNNING
            and self._recovery_at is None
            and self._patience.is_full
            and self._held.grows_by_tokens_alone
            and not self._progress.expects_more_than(len(self._token_ids))
        )
        self._plain_position = len(self._token_ids) if is_plain else None
        outputs, self._outputs = tuple(self._outputs), []
        return outputs


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and now >= at
