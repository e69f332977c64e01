"""A router's token socket, for tests of workers: a PULL socket that keeps what it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from octavo.internal.v1 import worker_pb2

WAIT_MS = 30_000


@dataclass(frozen=True)
class TokenSink:
    """A listening router. `public_key` is its CURVE key, empty when it is plain."""

    socket: zmq.Socket[bytes]
    endpoint: str
    public_key: str

    def router(self, router_id: int) -> worker_pb2.RouterEndpoint:
        """The router as a scheduler announces it."""
        return worker_pb2.RouterEndpoint(router_id=router_id, endpoint=self.endpoint, curve_public_key=self.public_key)

    def next(self) -> worker_pb2.TokenBatch:
        """The next message. Fails when none comes."""
        assert self.socket.poll(WAIT_MS), f"no message at {self.endpoint}"
        return worker_pb2.TokenBatch.FromString(self.socket.recv())


@contextlib.contextmanager
def token_sink(endpoint: str = "tcp://127.0.0.1:*", *, curve: bool = False) -> Iterator[TokenSink]:
    """Listens until the block ends."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        public_key = b""
        if curve:
            public_key, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_server = True
        socket.bind(endpoint)
        yield TokenSink(socket, str(socket.getsockopt_string(zmq.LAST_ENDPOINT)), public_key.decode())
