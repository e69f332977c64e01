"""SchedulerService on gRPC: one coroutine per call, which moves messages between the wire and the engine.

Knows gRPC and the engine's queues. Decides nothing: what a status means is in `wire.py`, everything else in the core.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Never, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from octavo.internal.v1 import worker_pb2 as worker_pb
from octavo.tracing import HEADER, clean_traceparent
from scheduler_svc import wire
from scheduler_svc.core.types import IllegalTransition, Refused
from scheduler_svc.engine import Engine
from scheduler_svc.parties import Replica, UnknownRouter

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]


class _Closing(Exception):
    """The process ends, and its calls with it."""


class SchedulerService(pb_grpc.SchedulerServiceServicer):
    """Watch, Generate and Attach."""

    def __init__(self, engine: Engine, token_networks: Networks) -> None:
        self._engine = engine
        self._token_networks = token_networks
        self._connections = itertools.count()
        self._readers: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    def close(self) -> None:
        """Ends every open call with UNAVAILABLE, which routers and workers take as: try again."""
        self._is_closing = True
        for reader in self._readers:
            reader.cancel()
        self._engine.close()

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse]
    ) -> AsyncIterator[pb.WatchResponse]:
        refusal = endpoint_refusal(request.token_endpoint, context.peer(), self._token_networks)
        if refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
        router = self._engine.register_router(request.token_endpoint, request.curve_public_key, request.name)
        if self._engine.served.aliases.adopt(request.aliases):
            self._engine.served.wake_watchers()
        changed = self._engine.served.add_watcher()
        try:
            while not self._is_closing:
                changed.clear()
                yield self._engine.served.told_to(router)
                await changed.wait()
        finally:
            self._engine.served.remove_watcher(changed)
            self._engine.unregister_router(router)
        await _abort(context, wire.SHUTTING_DOWN)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            call = self._engine.submit(request, _traceparent(context))
        except Refused as refusal:
            await _abort(context, wire.refusal_to_wire(refusal))
        except UnknownRouter as unknown:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(unknown))
        try:
            while True:
                event = await call.events.get()
                if isinstance(event, wire.EndStatus):
                    await _abort(context, event)
                yield event
                if event.HasField("finished"):
                    return
        finally:
            self._engine.cancel(call)

    async def Attach(
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse],
    ) -> AsyncIterator[pb.AttachResponse]:
        connection = next(self._connections)
        try:
            hello = await self._read(self._until_hello(connection, request_iterator))
            if hello is None:
                return
            # Not while reading: a worker that leaves at this moment would stay attached, with nobody to detach it.
            replica = self._engine.attach(hello)
        except ValueError as refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"Hello: {refusal}")
        except _Closing:
            await _abort(context, wire.SHUTTING_DOWN)
        finally:
            self._engine.served.forget_starting(connection)
        reader = asyncio.create_task(self._read(self._read_results(replica, request_iterator)))
        reader.add_done_callback(lambda _: replica.outbox.put_nowait(None))
        try:
            while (message := await replica.outbox.get()) is not None:
                yield message
            mismatch = await reader
            if mismatch is not None:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        except _Closing:
            await _abort(context, wire.SHUTTING_DOWN)
        finally:
            reader.cancel()
            self._engine.detach(replica, "its connection ended")

    async def _read(self, reading: Coroutine[Any, Any, T]) -> T:
        """Reads until done. Raises _Closing when `close` comes first.

        Only what reads is interrupted: gRPC takes the interruption of a call that is writing for its end.
        """
        if self._is_closing:
            reading.close()
            raise _Closing
        reader = asyncio.create_task(reading)
        self._readers.add(reader)
        try:
            return await reader
        except asyncio.CancelledError:
            if self._is_closing and reader.cancelled():
                raise _Closing from None
            reader.cancel()
            raise
        finally:
            self._readers.discard(reader)

    async def _until_hello(self, connection: int, requests: AsyncIterator[pb.AttachRequest]) -> worker_pb.Hello | None:
        """Follows a worker's start; None when it went before it was ready. Raises ValueError on another message."""
        async for request in requests:
            match request.WhichOneof("message"):
                case "starting":
                    self._engine.served.report_starting(connection, request.starting.name, request.starting.phase)
                case "hello":
                    return request.hello
                case other:
                    raise ValueError(f"the message {other} came before hello")
        return None

    async def _read_results(self, replica: Replica, requests: AsyncIterator[pb.AttachRequest]) -> str | None:
        """Takes results until the worker goes (None) or disagrees (why)."""
        try:
            async for request in requests:
                if not request.HasField("result"):
                    return f"the message {request.WhichOneof('message')} came after hello"
                self._engine.take_result(replica, request.result)
        except (ValueError, IllegalTransition) as mismatch:  # a ResultMismatch is a ValueError
            self._engine.detach(replica, str(mismatch))
            return str(mismatch)
        except grpc.RpcError as broken:
            _LOG.debug("replica %s: %s", replica.hello.name, broken)
        return None


def _traceparent(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The span that a call names as its parent; empty where it names none."""
    metadata: Any = context.invocation_metadata() or ()
    found = [value for key, value in metadata if key == HEADER and isinstance(value, str)]
    return clean_traceparent(found[0]) if found else ""


async def _abort(context: grpc.aio.ServicerContext[Any, Any], end: wire.EndStatus) -> Never:
    status = status_pb2.Status(code=end.code.value[0], message=end.message)
    if end.detail is not None:
        detail = any_pb2.Any()
        detail.Pack(end.detail)
        status.details.append(detail)
    metadata = rpc_status.to_status(status).trailing_metadata
    await context.abort(end.code, end.message, tuple(metadata))
    raise AssertionError("abort returned")


def endpoint_refusal(endpoint: str, peer: str, networks: Networks) -> str | None:
    """Why a router's token endpoint is not acceptable, or None.

    Workers connect where routers say, so a router may name only its own address or one in `networks`; `ipc://` needs a
    peer on this machine. `peer` is gRPC's name of the caller, such as `ipv4:127.0.0.1:4711`.
    """
    kind, _, address = unquote(peer).partition(":")
    caller = None if kind == "unix" else ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    is_local = caller is None or caller.is_loopback
    if endpoint.startswith("ipc://"):
        return None if is_local else f"token_endpoint is {endpoint}, but {peer} is not on this machine; use tcp://"
    named = _tcp_address(endpoint)
    if named is None:
        return f"token_endpoint is {endpoint!r}; it must be tcp://ADDRESS:PORT with a numeric address, or ipc://PATH"
    if named == caller or (is_local and named.is_loopback) or any(named in network for network in networks):
        return None
    return (
        f"token_endpoint is {endpoint}, but the router calls from {peer}; name that address, or start the scheduler "
        f"with --token-networks {named}"
    )


def _tcp_address(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of tcp://ADDRESS:PORT; None for anything else."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) in range(1, 65536)
    if not endpoint.startswith("tcp://") or not is_port:
        return None
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
