"""A scheduler's side of Attach, for tests of workers: says what the test says, keeps what the worker says.

A real gRPC server on loopback; it schedules nothing and checks nothing.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from octavo.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2

WAIT_S = 30.0
"""How long a test waits for something that must come before it calls it missing."""

T = TypeVar("T")


class AttachedWorker:
    """One Attach call of a worker. `None` among what it said marks the end of the call."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._said: queue.SimpleQueue[scheduler_pb2.AttachRequest | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[scheduler_pb2.AttachResponse | None] = queue.SimpleQueue()

    def tell(self, **message: object) -> None:
        """Sends an AttachResponse with this one field."""
        self.outbox.put(scheduler_pb2.AttachResponse(**message))  # type: ignore[arg-type]

    def hear(self) -> scheduler_pb2.AttachRequest | None:
        """What the worker says next; None once the call has ended."""
        return self._said.get(timeout=WAIT_S)

    def hello(self) -> worker_pb2.Hello:
        """Waits for Hello, past the phases of the start."""
        while (request := self.hear()) is not None:
            if request.WhichOneof("message") == "hello":
                return request.hello
        raise AssertionError("the worker left without Hello")

    def result(self) -> worker_pb2.StepResult:
        """The next thing said, which must be a result."""
        request = self.hear()
        assert request is not None, "the worker left"
        assert request.WhichOneof("message") == "result", request
        return request.result

    def end(self) -> None:
        """Ends the call from this side, in order."""
        self.outbox.put(None)

    def listen(self, requests: Iterator[scheduler_pb2.AttachRequest]) -> None:
        """Keeps what comes, until the worker is gone or done."""
        with contextlib.suppress(Exception):  # a cancelled call ends its iterator with an exception of no known type
            for request in requests:
                self._said.put(request)
        self._said.put(None)
        self.outbox.put(None)


class AttachServer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Hands each Attach call to the test, in the order in which they come."""

    def __init__(self) -> None:
        self._attached: queue.SimpleQueue[AttachedWorker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=8)

    def attached(self) -> AttachedWorker:
        """The next worker that attaches."""
        return self._attached.get(timeout=WAIT_S)

    def Attach(
        self, request_iterator: Iterator[scheduler_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.AttachResponse]:
        worker = AttachedWorker(context)
        self._threads.submit(worker.listen, request_iterator)
        self._attached.put(worker)
        while (response := worker.outbox.get()) is not None:
            yield response

    def Watch(
        self, request: scheduler_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.WatchResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a scheduler for workers alone")
        yield scheduler_pb2.WatchResponse()

    def Generate(
        self, request: scheduler_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.GenerateResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a scheduler for workers alone")
        yield scheduler_pb2.GenerateResponse()


def free_address() -> str:
    """A loopback address that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def serving(scheduler: AttachServer, address: str) -> Iterator[str]:
    """Serves at the address until the block ends; then every call breaks."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    if not server.add_insecure_port(address):
        raise OSError(f"{address} is taken")
    server.start()
    try:
        yield address
    finally:
        server.stop(grace=None).wait(WAIT_S)
