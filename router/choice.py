"""One of a request's answers: what its sequence puts out, made into text, and its end.

Detokenizes, matches stop strings, follows thinking and tool calls, and counts. Says what happens and how it ended;
cancelling the sequence is its caller's. Knows no protocol of clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

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
from router.metrics import SequenceMeter
from router.prepared import Prepared
from router.replies.output import Reply
from router.replies.types import NOTHING, ReplyPiece
from router.requests import ChoiceEnd, Event, PromptInfo, QueueInfo, TextDelta, TokenInfo
from router.streams.types import (
    Completed,
    Failed,
    Finish,
    NewPromptLogprobs,
    NewTokens,
    Output,
    QueueMoved,
    ReceiptParts,
    TokenLogprob,
)
from router.text.detokenize import Detokenizer, OutputText
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer

_DEFAULT_RETRY_S = 1.0


class Served(Protocol):
    """A sequence, as far as its choice asks."""

    @property
    def receipt(self) -> ReceiptParts:
        """How it has been served so far."""


class Choice:
    """`end` is None while it goes on; `meter` counts it."""

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

    def take(self, output: Output, served: Served) -> Sequence[Event]:
        """The events that one output makes; `served` is its sequence. Raises RouterError for a failed one.

        Nothing more is to be taken once `end` is set. Where tokens set it, the text ended the answer.
        """
        match output:
            case NewTokens():
                return self._take_tokens(output, served)
            case NewPromptLogprobs():
                return (PromptInfo(output.start, tuple(self._prompt_infos(output))),)
            case QueueMoved():
                return (QueueInfo(output.position, output.eta_s),)
            case Completed():
                return self._complete(output)
            case Failed():
                raise _error(output, self._prepared.grammar_field)
        return ()

    def _take_tokens(self, tokens: NewTokens, served: Served) -> Sequence[Event]:
        position, ids, logprobs = tokens
        text, stop, num_used = self._text.push(ids)
        if num_used != len(ids):
            ids = ids[:num_used]
        infos = tuple(map(self._info, ids, logprobs)) if logprobs else ()
        self.meter.tokens(num_used)
        if self._reply is None:
            delta = TextDelta._make((self.index, text, position, ids, infos, "", ()))
            return (delta,) if stop is None else (delta, self._stop(stop, served.receipt))
        events: list[Event] = [self._delta(self._reply.push(text), position, ids, infos)]
        if self._reply.is_over:
            events.append(self._stop(stop, served.receipt))
        elif stop is not None:
            events += self._flush_reply(self._text.num_tokens)
            events.append(self._stop(stop, served.receipt))
        return events

    def _complete(self, done: Completed) -> Sequence[Event]:
        events: list[Event] = []
        step = self._text.finish()
        if step.text:
            piece = ReplyPiece(step.text) if self._reply is None else self._reply.push(step.text)
            events.append(self._delta(piece, done.num_tokens))
        events += self._flush_reply(done.num_tokens)
        counted = done.num_counted_tokens
        if step.stop is not None:
            end = self._finish("stop", counted, done.receipt, stop_string=step.stop)
        elif done.finish is Finish.STOP_TOKEN:
            end = self._finish("stop", counted, done.receipt, stop_token_id=done.final_token_id)
        else:
            end = self._finish("length" if done.finish is Finish.LENGTH else "stop", counted, done.receipt)
        return [*events, end]

    def _flush_reply(self, position: int) -> Iterable[Event]:
        """What the reply still holds."""
        piece = NOTHING if self._reply is None else self._reply.finish()
        return () if piece == NOTHING else (self._delta(piece, position),)

    def _delta(
        self, piece: ReplyPiece, position: int, ids: tuple[int, ...] = (), infos: tuple[TokenInfo, ...] = ()
    ) -> TextDelta:
        return TextDelta(self.index, piece.content, position, ids, infos, piece.reasoning, piece.tool_calls)

    def _stop(self, stop_string: str | None, receipt: ReceiptParts) -> ChoiceEnd:
        """The end by what the text says: a stop string, or a reply that is over."""
        return self._finish("stop", self._text.num_tokens, receipt, stop_string=stop_string)

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
