"""One sequence in flight: drives its state machine with a scheduler call, the token inlet and a timer.

Owns the call, the registration of the stream key and the timer, and lets go of all three when the sequence ends, by
whatever end. Decides nothing: `router.streams.stream` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from octavo.internal.v1 import scheduler_pb2
from octavo.tracing import Span
from router.errors import ErrorKind
from router.streams.scheduler_client import SchedulerClient, SchedulerState, read_event, read_status
from router.streams.stream import Stream
from router.streams.token_inlet import TokenInlet
from router.streams.types import (
    AttemptEnded,
    Availability,
    Failed,
    Input,
    Output,
    PromptDelta,
    ReceiptParts,
    StreamSpec,
    Submit,
    TokenDelta,
)

_LAST_WORDS_S = 2.0
"""How long the call of a sequence that has ended may take to end as well."""

_DEADLINE_GRACE_S = 0.5
"""How long the scheduler, which may be out of reach, has to end a sequence whose deadline has passed."""


class SequenceDriver:
    """`start` it once; every output but Submit goes to `deliver`, the last one being Completed or Failed."""

    def __init__(
        self,
        spec: StreamSpec,
        call: scheduler_pb2.GenerateRequest,
        scheduler: SchedulerClient,
        inlet: TokenInlet,
        deliver: Callable[[Output], None],
    ) -> None:
        """`call` is the attempt-independent part of the scheduler request."""
        self._stream = Stream(spec)
        self._call = call
        self._scheduler = scheduler
        self._inlet = inlet
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._accepted_at = self._loop.time()
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._leftover: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.begin_attempt: Callable[[int], Span] | None = None
        """Makes the span of an attempt, where the request is traced."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the sequence has ended, by whatever end."""

    @property
    def receipt(self) -> ReceiptParts:
        """How it has been served so far."""
        return self._stream.receipt

    def start(self) -> None:
        """Open the first attempt."""
        self._inlet.register(self._stream.spec.stream_key, self._take_tokens)
        if self._call.HasField("deadline_ns"):
            self._deadline = self._loop.call_later(self._call.deadline_ns / 1e9 + _DEADLINE_GRACE_S, self._expire)
        self._act(self._stream.start())

    def cancel(self) -> None:
        """End it from above: the scheduler call is cancelled and nothing more is delivered."""
        self._stream.stop()
        self._release()
        self._cancel_call()

    def fail(self, kind: ErrorKind, message: str) -> None:
        """End it from above, with an error as its last output."""
        self.cancel()
        self._deliver(Failed(kind, message))

    def availability(self, state: SchedulerState) -> None:
        """Tell it whether replicas of its model are ready."""
        self._feed(Availability(state.can_serve(self._call.model)))

    def _take_tokens(self, delta: TokenDelta | PromptDelta) -> None:
        tokens = self._stream.feed_plain(delta) if isinstance(delta, TokenDelta) else None
        if tokens is None:
            self._feed(delta)
        else:
            self._deliver(tokens)  # no timer moves

    def _feed(self, item: Input) -> None:
        self._act(self._stream.feed(item, self._loop.time()))

    def _wake(self) -> None:
        self._timer = None
        self._act(self._stream.wake(self._loop.time()))

    def _act(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if isinstance(output, Submit):
                self._submit(output)
            else:
                self._deliver(output)
        if self._stream.ended:
            self._release()
            if outputs and isinstance(outputs[-1], Failed):
                self._cancel_call()
        else:
            self._set_timer()

    def _expire(self) -> None:
        self.fail(ErrorKind.DEADLINE, "the deadline passed while the scheduler was out of reach")

    def _set_timer(self) -> None:
        due = self._stream.wake_at
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._wake)

    def _cancel_call(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _submit(self, submit: Submit) -> None:
        self._cancel_call()
        request = scheduler_pb2.GenerateRequest()
        request.CopyFrom(self._call)
        request.router_id = self._scheduler.state.router_id
        request.attempt = submit.attempt
        request.prior_token_ids.extend(submit.prior_token_ids)
        request.crash_group_sizes.extend(submit.crash_group_sizes)
        request.age_ns = int((self._loop.time() - self._accepted_at) * 1e9)
        if submit.prompt_logprobs_start is None:
            request.sampling.ClearField("num_prompt_logprobs")
        else:
            request.sampling.prompt_logprobs_start = submit.prompt_logprobs_start
        if request.HasField("deadline_ns"):
            request.deadline_ns = max(0, request.deadline_ns - request.age_ns)
        self._reader = self._loop.create_task(self._read(submit.attempt, request))

    async def _read(self, attempt: int, request: scheduler_pb2.GenerateRequest) -> None:
        """Feed the call's events, then its end. A cancelled task cancels its call and feeds nothing."""
        state = self._scheduler.state
        if not state.connected or self._call.model not in state.models:
            # A scheduler that has just started would refuse, for good, a model that no worker has offered it yet.
            self._feed(AttemptEnded(attempt, True, ErrorKind.UNAVAILABLE, "the scheduler is not there"))
            return
        end = AttemptEnded(attempt)
        span = None if self.begin_attempt is None else self.begin_attempt(attempt)
        cause = "cancelled"
        call = self._scheduler.generate(request, "" if span is None else span.traceparent)
        try:
            async for response in call:
                event = read_event(attempt, response)
                if event is not None:
                    self._feed(event)
            cause = ""
        except grpc.aio.AioRpcError as error:
            end = read_status(attempt, error)
            cause = error.code().name.lower()
        finally:
            # gRPC does not cancel a call itself whose reader is cancelled just when the request has been sent.
            call.cancel()
            if span is not None:
                span.end(error=cause)
        self._feed(end)

    def _release(self) -> None:
        self.on_end()
        self._inlet.unregister(self._stream.spec.stream_key)
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._timer = self._deadline = None
        if self._reader is not None and self._leftover is None:
            # A finished sequence's call ends by itself a moment later; cancelled now, it would look like a client's
            # going away. The timer also keeps the task alive.
            self._leftover = self._loop.call_later(_LAST_WORDS_S, self._reader.cancel)
