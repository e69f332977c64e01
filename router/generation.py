"""One request: a validated prompt and parameters in, the events of its answer out.

Runs n sequences, each read by a `choice`, and adds up usage. Cancels what is left of the sequences whenever the events
stop being read, whatever the reason. Knows no text and no protocol of clients.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from octavo.internal.v1 import scheduler_pb2
from router.choice import Choice
from router.metrics import RouterMetrics, SequenceMeter, abort_reason
from router.prepared import Prepared, scheduler_call
from router.requests import Event, Usage
from router.streams.inbox import Inbox
from router.streams.sequence import SequenceDriver
from router.streams.types import NewTokens, Output, StreamSpec
from router.traces import RequestTrace, RequestTracer

_LOG = logging.getLogger(__name__)

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
    choices = [Choice(index, prepared, _meter(prepared, context)) for index in range(num_choices)]
    drivers = [_make_driver(prepared, index, context, inbox) for index in range(num_choices)]
    context.metrics.begin(prepared.options.model, prepared.options.tenant, len(prepared.prompt_ids), num_choices)
    trace = None if context.tracer is None else context.tracer.begin(prepared, num_choices)
    failure: BaseException | None = None
    try:
        for driver in drivers:
            if trace is not None:
                driver.begin_attempt = trace.attempt
            driver.start()
        num_open = num_choices
        while num_open:
            for index, output in await inbox.take():
                choice, driver = choices[index], drivers[index]
                if choice.end is not None:
                    continue
                events = choice.take(output, driver)
                if choice.end is not None:
                    num_open -= 1
                    if isinstance(output, NewTokens):
                        driver.cancel()  # its text ended it, which the sequence cannot know
                for event in events:
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


def _log_end(prepared: Prepared, choices: list[Choice], failure: BaseException | None) -> None:
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


def _end_trace(trace: RequestTrace, prepared: Prepared, choices: list[Choice], failure: BaseException | None) -> None:
    ends = [choice.end for choice in choices if choice.end is not None]
    num_tokens = sum(choice.meter.num for choice in choices)
    all_ended = len(ends) == len(choices)
    trace.end(ends, len(prepared.prompt_ids), num_tokens, error="" if all_ended else abort_reason(failure))


def _usage(prepared: Prepared, choices: list[Choice]) -> Usage:
    ends = [choice.end for choice in choices if choice.end is not None]
    return Usage(
        prompt_tokens=len(prepared.prompt_ids),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=ends[0].receipt.cached_tokens or 0,
    )


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
    return context.make_driver(spec, call, partial(inbox.put, index))
