"""The scheduler as this router sees it: what is served now, and calls for single sequences.

Keeps Watch open, which registers the token endpoint, and holds the newest state; translates Generate's events and
statuses into the state machine's inputs. Knows gRPC and the internal protos; knows no prompt text and no policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from octavo import tracing
from octavo.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.keepalive import keepalive_options
from router.errors import ErrorKind
from router.streams.token_inlet import read_finish
from router.streams.types import AttemptEnded, Finished, Input, Preempted, Progress, Queued, Scheduled

_LOG = logging.getLogger(__name__)

_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *keepalive_options(interval_s=10, timeout_s=20),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # its pings add to the keepalive's, for messages that are all small
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
_WATCH_PAUSE_S = 0.1
_NS = 1e-9

_RETRIABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED})
"""CANCELLED is here because this router's own cancels are never read: it comes from a server going away."""

_KINDS: Mapping[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE: ErrorKind.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.ABORTED: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.CANCELLED,  # by an operator
}


class GenerateCall(Protocol):
    """One attempt: its events, and its end from this side."""

    def __aiter__(self) -> AsyncIterator[scheduler_pb2.GenerateResponse]: ...

    def cancel(self) -> object:
        """Nothing more is wanted; does nothing to a call that has ended."""


@dataclass(frozen=True)
class SchedulerState:
    """The newest word of the scheduler. `connected` is false while Watch is down; the rest is then the last known."""

    connected: bool = False
    router_id: int = 0
    models: Mapping[str, scheduler_pb2.ServedModel] = field(default_factory=dict)
    starting: tuple[scheduler_pb2.StartingWorker, ...] = ()
    worker_curve_keys: frozenset[str] = frozenset()
    aliases: scheduler_pb2.AliasTable = field(default_factory=scheduler_pb2.AliasTable)
    """Those that operators have set."""

    def can_serve(self, model: str) -> bool:
        """Whether some replica of the model can produce a token now."""
        served = self.models.get(model)
        return self.connected and served is not None and served.num_ready_replicas > 0


class SchedulerClient:
    """One channel. `run` keeps Watch open; create it in a running event loop."""

    def __init__(
        self,
        address: str,
        token_endpoint: str,
        name: str,
        curve_public_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`curve_public_key` is the token endpoint's, Z85; without `credentials` the channel is plain."""
        self.address = address
        self._registration = scheduler_pb2.WatchRequest(
            token_endpoint=token_endpoint, curve_public_key=curve_public_key, name=name
        )
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._listeners: list[Callable[[SchedulerState], None]] = []
        self.state = SchedulerState()

    def on_change(self, listener: Callable[[SchedulerState], None]) -> None:
        """Call `listener` with every new state."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Keep Watch open until cancelled, and say what changes."""
        while True:
            try:
                self._registration.aliases.CopyFrom(self.state.aliases)
                async for response in self._stub.Watch(self._registration, wait_for_ready=True):
                    self._replace(_read_state(response))
                _LOG.warning("scheduler %s ended the watch; asking again", self.address)
            except grpc.aio.AioRpcError as error:
                _LOG.warning("scheduler %s is lost (%s: %s)", self.address, error.code().name, error.details())
            self._replace(replace(self.state, connected=False))
            await asyncio.sleep(_WATCH_PAUSE_S)

    def generate(self, request: scheduler_pb2.GenerateRequest, traceparent: str = "") -> GenerateCall:
        """Open one attempt, which its reader cancels when it leaves. An empty traceparent is none."""
        metadata = ((tracing.HEADER, traceparent),) if traceparent else None
        call: GenerateCall = self._stub.Generate(request, metadata=metadata)
        return call

    async def close(self) -> None:
        await self._channel.close(None)

    def _replace(self, state: SchedulerState) -> None:
        if state.connected and not self.state.connected:
            _LOG.info("scheduler %s connected; this router is %d", self.address, state.router_id)
        self.state = state
        for listener in self._listeners:
            listener(state)


def _read_state(response: scheduler_pb2.WatchResponse) -> SchedulerState:
    models = {served.info.name: served for served in response.models}
    return SchedulerState(
        True,
        response.router_id,
        models,
        tuple(response.starting),
        frozenset(response.worker_curve_public_keys),
        response.aliases,
    )


def read_event(attempt: int, response: scheduler_pb2.GenerateResponse) -> Input | None:
    """One event of a Generate call, None for one that this version does not know."""
    match response.WhichOneof("event"):
        case "queued":
            eta_s = response.queued.eta_ns * _NS if response.queued.HasField("eta_ns") else None
            return Queued(attempt, response.queued.position, eta_s)
        case "scheduled":
            event = response.scheduled
            return Scheduled(
                attempt,
                event.replica,
                event.cached_tokens,
                event.recomputed_tokens,
                event.queue_ns * _NS,
                event.numerics,
                event.batch_invariant,
            )
        case "preempted":
            return Preempted(attempt)
        case "progress":
            return Progress(attempt, response.progress.num_output_tokens)
        case "finished":
            finished = response.finished
            return Finished(attempt, finished.num_output_tokens, read_finish(finished.finish_reason))
    return None


def read_status(attempt: int, error: grpc.aio.AioRpcError) -> AttemptEnded:
    """How a Generate call failed. Only our scheduler's own words are kept; a transport's stay here."""
    code, message = error.code(), error.details() or ""
    details = _details(error)
    lost = scheduler_pb2.ReplicaLost()
    retry = error_details_pb2.RetryInfo()
    crash_group_size = retry_after_s = None
    for detail in details:
        if detail.Unpack(lost):
            crash_group_size = lost.rows_in_step
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos * _NS
    kind = _KINDS.get(code, ErrorKind.INTERNAL)
    if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED):
        _LOG.error("scheduler call failed with %s: %s", code.name, message)
        message = "the scheduler failed"
    return AttemptEnded(
        attempt,
        retriable=code in _RETRIABLE,
        failure=kind,
        message=message,
        crash_group_size=crash_group_size,
        retry_after_s=retry_after_s,
        # An aborted attempt whose replica is not lost: its tokens could not be handed to this router.
        tokens_lost=code is grpc.StatusCode.ABORTED and crash_group_size is None,
    )


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    status = status_pb2.Status()
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            try:
                status.ParseFromString(value)
            except DecodeError:
                return []
    return list(status.details)
