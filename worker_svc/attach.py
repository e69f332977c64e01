"""The connection to the scheduler: one Attach call at a time, opened anew whenever it ends.

Knows gRPC and the order of a worker's words: phases of the start, then Hello, then results. Must not know what a plan
means. What arrives goes to an inbox, each piece with the attachment it came from, so that words of a lost one are
recognised. Imports nothing heavy: it speaks before torch is loaded.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import grpc

from octavo.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from octavo.keepalive import keepalive_options

_LOG = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 1.0
_GOODBYE_S = 2.0
# Worker and scheduler start together: nothing is amiss until the one has been away this long.
_PATIENCE_S = 3.0

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Plans carry whole prompts, from a peer that the operator chose.
    ("grpc.max_receive_message_length", -1),
    # A scheduler whose machine vanished is noticed, also while nothing is to be said. Under load an answer takes long.
    *keepalive_options(interval_s=10, timeout_s=20),
    ("grpc.http2.max_pings_without_data", 0),
    # Its pings would add to the keepalive's, for messages that are all small.
    ("grpc.http2.bdp_probe", 0),
    # One worker talks to one scheduler: nothing to share a connection with.
    ("grpc.use_local_subchannel_pool", 1),
)


class Attachment(Protocol):
    """One Attach call, as the engine sees it."""

    @property
    def incarnation(self) -> int:
        """The number that this call's Hello carries."""
        ...

    def say(self, request: scheduler_pb2.AttachRequest) -> None:
        """Sends a message, in order, without waiting."""
        ...

    def abandon(self) -> None:
        """Breaks the call off; a new one follows."""
        ...


@dataclass(frozen=True)
class Opened:
    """A new attachment begins, empty; everything known from earlier ones is void."""

    attachment: Attachment


@dataclass(frozen=True)
class Received:
    """A message from the scheduler."""

    attachment: Attachment
    response: scheduler_pb2.AttachResponse


@dataclass(frozen=True)
class Lost:
    """An attachment has ended."""

    attachment: Attachment


@dataclass(frozen=True)
class Stop:
    """The process has been asked to end."""


Event = Opened | Received | Lost | Stop
Inbox = SimpleQueue[Event]


class AttachCall:
    """An Attach call in progress. Safe to use from any thread."""

    def __init__(self, stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
        self.incarnation = secrets.randbits(64)
        self._outbox: SimpleQueue[scheduler_pb2.AttachRequest | None] = SimpleQueue()
        self._call = stub.Attach(self._requests())

    def say(self, request: scheduler_pb2.AttachRequest) -> None:
        self._outbox.put(request)

    def abandon(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]
        self.finish()

    def finish(self) -> None:
        """Says nothing more: what was said is sent, then this side of the call closes."""
        self._outbox.put(None)

    def responses(self) -> Iterator[scheduler_pb2.AttachResponse]:
        """What the scheduler says, until the call ends. Raises grpc.RpcError when it is lost."""
        yield from self._call

    def _requests(self) -> Iterator[scheduler_pb2.AttachRequest]:
        while (request := self._outbox.get()) is not None:
            yield request


class SchedulerLink:
    """Keeps the worker attached, from a thread of its own, until `close`."""

    def __init__(self, address: str, inbox: Inbox, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Without `credentials` the channel is plain."""
        self._address = address
        self._inbox = inbox
        self._process = secrets.randbits(64) or 1  # 0 is none
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        # Guards what follows: the start reports from one thread, calls are opened in another.
        self._lock = threading.Lock()
        self._call: AttachCall | None = None
        self._starting: scheduler_pb2.WorkerStarting | None = None
        self._hello: worker_pb2.Hello | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attach", daemon=True)

    def start(self) -> None:
        """Begins to dial."""
        self._thread.start()

    def report(self, starting: scheduler_pb2.WorkerStarting) -> None:
        """Tells the scheduler, now or once it can be reached, where the start is."""
        with self._lock:
            self._starting = starting
            if self._call is not None:
                self._call.say(scheduler_pb2.AttachRequest(starting=starting))

    def ready(self, hello: worker_pb2.Hello) -> None:
        """From now on every attachment says Hello, each with an incarnation of its own."""
        with self._lock:
            self._hello = hello
            if self._call is not None:
                self._greet(self._call, hello)

    def close(self) -> None:
        """Ends the call once what was said has been sent, and the thread with it."""
        self._closing.set()
        with self._lock:
            if self._call is not None:
                self._call.finish()
        if self._thread.is_alive():
            self._thread.join(_GOODBYE_S)
        self._channel.close()

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        away_since_s = time.monotonic()
        reported = False
        while not self._closing.is_set():
            call = self._open()
            num_responses, reason = self._listen(call)
            with self._lock:
                self._call = None
            call.finish()
            self._inbox.put(Lost(call))
            if self._closing.is_set():
                return
            if num_responses:
                retry_s, away_since_s, reported = _FIRST_RETRY_S, time.monotonic(), False
            if not reported and time.monotonic() - away_since_s > _PATIENCE_S:
                _LOG.warning("not attached to the scheduler at %s: %s; trying again", self._address, reason)
                reported = True
            self._closing.wait(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _open(self) -> AttachCall:
        with self._lock:
            call = AttachCall(self._stub)
            self._inbox.put(Opened(call))
            self._call = call
            if self._hello is not None:
                self._greet(call, self._hello)
            elif self._starting is not None:
                call.say(scheduler_pb2.AttachRequest(starting=self._starting))
            return call

    def _listen(self, call: AttachCall) -> tuple[int, str]:
        """Passes on what comes until the call ends; how much that was, and why it ended."""
        num_responses = 0
        try:
            for response in call.responses():
                num_responses += 1
                self._inbox.put(Received(call, response))
        except grpc.RpcError as error:
            return num_responses, _reason(error)
        return num_responses, "the scheduler ended the call"

    def _greet(self, call: AttachCall, hello: worker_pb2.Hello) -> None:
        own = worker_pb2.Hello()
        own.CopyFrom(hello)
        own.incarnation, own.process = call.incarnation, self._process
        call.say(scheduler_pb2.AttachRequest(hello=own))


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
