"""One request: a validated prompt and parameters in, the events of its answer out.

Runs n sequences, turns their tokens into text, applies stop strings and adds up usage. Cancels what is left of the
sequences whenever the events stop being read, whatever the reason. Knows no protocol of clients.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from octavo.internal.v1 import scheduler_pb2
from router.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorKind,
    Exhausted,
    InternalError,
    InvalidRequest,
    NotFound,
    RouterError,
    Unavailable,
)
from router.metrics import RouterMetrics, SequenceMeter, abort_reason
from router.prepared import Prepared, scheduler_call
from router.replies.output import Reply
from router.replies.types import NOTHING, ReplyPiece
from router.requests import (
    ChoiceEnd,
    Event,
    PromptInfo,
    QueueInfo,
    TextDelta,
    TokenInfo,
    Usage,
)
from router.streams.inbox import Inbox
from router.streams.sequence import SequenceDriver
from router.streams.types import (
    Completed,
    Failed,
    Finish,
    NewPromptLogprobs,
    NewTokens,
    Output,
    QueueMoved,
    ReceiptParts,
    StreamSpec,
    TokenLogprob,
)
from router.text.detokenize import Detokenizer, OutputText
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer
from router.traces import RequestTrace, RequestTracer

_LOG = logging.getLogger(__name__)

_DEFAULT_RETRY_S = 1.0


DriverFactory = Callable[[StreamSpec, scheduler_pb2.GenerateRequest, Callable[[Output], None]], SequenceDriver]


@dataclass(frozen=True)
class StreamContext:
    """What every stream of this router shares."""

    draw_key: Callable[[], int]
    make_driver: DriverFactory
    recovery_timeout_s: float
    token_endpoint: str
    metrics: RouterMetrics
    tracer: RequestTracer | None = None


async def run(prepared: Prepared, context: StreamContext) -> AsyncGenerator[Event, None]:
    """The events, ending with one ChoiceEnd a choice and one Usage. Raises RouterError; close it to cancel."""
    inbox = Inbox()
    num_choices = prepared.params.best_of
    choices = [_Choice(index, prepared, _meter(prepared, context)) for index in range(num_choices)]
    drivers = [_make_driver(prepared, index, context, inbox) for index in range(num_choices)]
    context.metrics.begin(prepared.options.model, prepared.options.tenant, len(prepared.prompt_ids), num_choices)
    trace = None if context.tracer is None else context.tracer.begin(prepared, num_choices)
    failure: BaseException | None = None
    try:
        for driver in drivers:
            if trace is not None:
                driver.begin_attempt = trace.attempt
            driver.start()
        while not all(choice.end for choice in choices):
            for index, output in await inbox.take():
                for event in choices[index].take(output, drivers[index]):
                    yield event
        yield _usage(prepared, choices)
    except BaseException as error:  # also a reader's going away, which raises inside
        failure = error
        raise
    finally:
        for choice, driver in zip(choices, drivers, strict=True):
            if choice.end is None:
                choice.meter.abort(abort_reason(failure), driver.receipt)
                driver.cancel()
        if trace is not None:
            _end_trace(trace, prepared, choices, failure)
        _log_end(prepared, choices, failure)


def _log_end(prepared: Prepared, choices: list[_Choice], failure: BaseException | None) -> None:
    """Ids and sizes, never a text."""
    reasons = {choice.end.finish_reason if choice.end else abort_reason(failure) for choice in choices}
    _LOG.info(
        "request %s (%s) of %s: %s; %d prompt tokens, %d output tokens",
        prepared.shown_id,
        prepared.internal_id,
        prepared.options.model,
        ", ".join(sorted(reasons)),
        len(prepared.prompt_ids),
        sum(choice.meter.num for choice in choices),
        extra={"request_id": prepared.shown_id},
    )


def _meter(prepared: Prepared, context: StreamContext) -> SequenceMeter:
    options = prepared.options
    return context.metrics.sequence(options.model, options.tenant, prepared.arrived_at)


def _end_trace(trace: RequestTrace, prepared: Prepared, choices: list[_Choice], failure: BaseException | None) -> None:
    ends = [choice.end for choice in choices if choice.end is not None]
    num_tokens = sum(choice.meter.num for choice in choices)
    all_ended = len(ends) == len(choices)
    trace.end(ends, len(prepared.prompt_ids), num_tokens, error="" if all_ended else abort_reason(failure))


def _usage(prepared: Prepared, choices: list[_Choice]) -> Usage:
    ends = [choice.end for choice in choices if choice.end is not None]
    return Usage(
        prompt_tokens=len(prepared.prompt_ids),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=ends[0].receipt.cached_tokens or 0,
    )


class _Choice:
    """One of the n answers: its text so far, and its end."""

    def __init__(self, index: int, prepared: Prepared, meter: SequenceMeter) -> None:
        params, tokenizer = prepared.params, prepared.text.tokenizer
        hidden = _hidden_ids(prepared, tokenizer)
        self.index = index
        self.end: ChoiceEnd | None = None
        self.meter = meter
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._text = OutputText(
            Detokenizer(tokenizer.bytes_table, prepared.prompt_ids, hidden),
            StopMatcher(params.stop, include_match=params.include_stop_str_in_output),
            params.min_tokens,
        )
        self._reply = None if prepared.reply is None else Reply(prepared.reply)

    def take(self, output: Output, driver: SequenceDriver) -> Iterable[Event]:
        """The events that one output makes. Raises RouterError for a failed sequence."""
        if self.end is not None:
            return
        match output:
            case NewTokens():
                yield from self._take_tokens(output, driver)
            case NewPromptLogprobs():
                yield PromptInfo(output.start, tuple(self._prompt_infos(output)))
            case QueueMoved():
                yield QueueInfo(output.position, output.eta_s)
            case Completed():
                yield from self._complete(output)
            case Failed():
                raise _error(output, self._prepared.grammar_field)

    def _take_tokens(self, tokens: NewTokens, driver: SequenceDriver) -> Iterable[Event]:
        step = self._text.push(tokens.token_ids)
        used = tokens.token_ids[: step.num_tokens]
        infos: tuple[TokenInfo, ...] = ()
        if tokens.logprobs:
            infos = tuple(self._info(token_id, entry) for token_id, entry in zip(used, tokens.logprobs, strict=False))
        self.meter.tokens(len(used))
        piece = ReplyPiece(step.text) if self._reply is None else self._reply.push(step.text)
        yield self._delta(piece, tokens.position, used, infos)
        is_over = self._reply is not None and self._reply.is_over
        if step.stop is not None or is_over:
            driver.cancel()
            if not is_over:
                yield from self._flush_reply(self._text.num_tokens)
            yield self._finish("stop", self._text.num_tokens, driver.receipt, stop_string=step.stop)

    def _complete(self, done: Completed) -> Iterable[Event]:
        step = self._text.finish()
        if step.text:
            piece = ReplyPiece(step.text) if self._reply is None else self._reply.push(step.text)
            yield self._delta(piece, done.num_tokens)
        yield from self._flush_reply(done.num_tokens)
        counted = done.num_counted_tokens
        if step.stop is not None:
            yield self._finish("stop", counted, done.receipt, stop_string=step.stop)
        elif done.finish is Finish.STOP_TOKEN:
            yield self._finish("stop", counted, done.receipt, stop_token_id=done.final_token_id)
        else:
            yield self._finish("length" if done.finish is Finish.LENGTH else "stop", counted, done.receipt)

    def _flush_reply(self, position: int) -> Iterable[Event]:
        """What the reply still holds."""
        piece = NOTHING if self._reply is None else self._reply.finish()
        if piece != NOTHING:
            yield self._delta(piece, position)

    def _delta(
        self, piece: ReplyPiece, position: int, ids: tuple[int, ...] = (), infos: tuple[TokenInfo, ...] = ()
    ) -> TextDelta:
        return TextDelta(self.index, piece.content, position, ids, infos, piece.reasoning, piece.tool_calls)

    def _finish(
        self,
        reason: str,
        num_tokens: int,
        receipt: ReceiptParts,
        *,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> ChoiceEnd:
        seed = self._prepared.params.seed_of(self.index)
        if reason == "stop" and self._reply is not None and self._reply.has_calls:
            reason = "tool_calls"
        self.end = ChoiceEnd(self.index, reason, num_tokens, receipt, seed, stop_string, stop_token_id)
        by_string, by_token = stop_string is not None, stop_token_id is not None
        self.meter.complete("stop_string" if by_string else "stop_token" if by_token else reason, receipt)
        return self.end

    def _info(self, token_id: int, entry: TokenLogprob) -> TokenInfo:
        """The token with its bytes, and its alternatives with theirs."""
        raw = self._tokenizer.token_bytes
        top = tuple(TokenInfo(other, raw(other), logprob) for other, logprob in entry.top)
        return TokenInfo(token_id, raw(token_id), entry.logprob, top)

    def _prompt_infos(self, found: NewPromptLogprobs) -> Iterable[TokenInfo]:
        ids = self._prepared.prompt_ids[found.start : found.start + len(found.logprobs)]
        return (self._info(token_id, entry) for token_id, entry in zip(ids, found.logprobs, strict=True))


def _hidden_ids(prepared: Prepared, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that add no text: special ones, but for the marks by which a reply is read."""
    if not prepared.params.skip_special_tokens:
        return frozenset()
    marks = prepared.reply.marks if prepared.reply is not None else ()
    return tokenizer.special_ids - {tokenizer.token_id(mark) for mark in marks} if marks else tokenizer.special_ids


def _make_driver(prepared: Prepared, index: int, context: StreamContext, inbox: Inbox) -> SequenceDriver:
    spec = StreamSpec(
        stream_key=context.draw_key(),
        max_tokens=prepared.params.max_tokens,
        stop_token_ids=frozenset(prepared.params.stop_token_ids),
        recovery_timeout_s=context.recovery_timeout_s,
        endpoint=context.token_endpoint,
        wants_logprobs=prepared.num_logprobs is not None,
        prompt_logprob_positions=prepared.prompt_logprob_positions if index == 0 else None,
    )
    call = scheduler_call(prepared, index, spec)
    return context.make_driver(spec, call, lambda output: inbox.put(index, output))


def _error(failed: Failed, grammar_field: str) -> RouterError:
    """A failed sequence as the client's error."""
    match failed.kind:
        case ErrorKind.INVALID_ARGUMENT:
            return InvalidRequest(grammar_field if failed.by_grammar else "prompt", failed.message)
        case ErrorKind.NOT_FOUND:
            return NotFound("model", failed.message)
        case ErrorKind.EXHAUSTED:
            return Exhausted(failed.message, failed.retry_after_s or _DEFAULT_RETRY_S)
        case ErrorKind.DEADLINE:
            return DeadlineExceeded(failed.message)
        case ErrorKind.UNAVAILABLE:
            return Unavailable(failed.message)
        case ErrorKind.CANCELLED:
            return Cancelled(failed.message)
    return InternalError(failed.message)
