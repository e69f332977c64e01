"""Sends tokens to routers: one ZeroMQ PUSH socket per router, never blocking.

Knows endpoints and bytes. A router that takes nothing fills its queue and is then refused (`send` returns False);
nobody else's tokens wait for it. Only the scheduler names endpoints; only tcp:// and ipc:// are dialled.
"""

from __future__ import annotations

import logging
import re

import zmq

from octavo.internal.v1 import worker_pb2

_LOG = logging.getLogger(__name__)

_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}|ipc://.+")

# Messages that wait for one router on this side: a second or more of steps. A router that is further behind is as good
# as gone, and its sequences are resubmitted.
QUEUED_MESSAGES = 1000

# At shutdown, how long messages already accepted may take to leave.
LINGER_MS = 1000


class TokenOutlet:
    """The routers of one attachment, by id. Used by the step thread alone."""

    def __init__(self, queued_messages: int = QUEUED_MESSAGES) -> None:
        self._context = zmq.Context()
        self._queued_messages = queued_messages
        # None: known, but its endpoint was refused.
        self._sockets: dict[int, zmq.Socket[bytes] | None] = {}
        self._refusing: set[int] = set()
        self._curve_keys = zmq.curve_keypair() if zmq.has("curve") else None

    @property
    def curve_public_key(self) -> str:
        """The key by which routers know this worker, Z85; empty where libzmq speaks no CURVE."""
        return "" if self._curve_keys is None else self._curve_keys[0].decode("ascii")

    def knows(self, router_id: int) -> bool:
        """Whether the scheduler has announced the router and not said that it is gone."""
        return router_id in self._sockets

    def add_router(self, router: worker_pb2.RouterEndpoint) -> None:
        """Connects to a router; the connection is made, and remade, in the background.

        An endpoint that may not be dialled is logged and its router's tokens count as undelivered.
        """
        self.drop_router(router.router_id)
        self._sockets[router.router_id] = None
        if _ENDPOINT.fullmatch(router.endpoint) is None:
            _LOG.error(
                "router %d: token endpoint %r is refused; expected tcp://host:port or ipc://path",
                router.router_id,
                router.endpoint,
            )
            return
        socket = self._context.socket(zmq.PUSH)
        try:
            self._configure(socket, router.curve_public_key)
            socket.connect(router.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            socket.close(linger=0)
            _LOG.error("router %d: cannot connect to token endpoint %s: %s", router.router_id, router.endpoint, error)
            return
        self._sockets[router.router_id] = socket

    def drop_router(self, router_id: int) -> None:
        """Closes a router's socket; what still waits for it is dropped."""
        self._refusing.discard(router_id)
        socket = self._sockets.pop(router_id, None)
        if socket is not None:
            socket.close(linger=0)

    def send(self, router_id: int, message: worker_pb2.TokenBatch) -> bool:
        """Hands a message over without waiting; False when the router's queue is full or it cannot be reached."""
        socket = self._sockets.get(router_id)
        if socket is None:
            return False
        try:
            socket.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            if router_id not in self._refusing:
                self._refusing.add(router_id)
                _LOG.warning("router %d takes no tokens: %d messages wait for it", router_id, self._queued_messages)
            return False
        self._refusing.discard(router_id)
        return True

    def reset(self) -> None:
        """Forgets every router, as the loss of the attachment that announced them demands."""
        for router_id in list(self._sockets):
            self.drop_router(router_id)

    def close(self) -> None:
        """Lets accepted messages leave for up to LINGER_MS, then closes everything."""
        for socket in self._sockets.values():
            if socket is not None:
                socket.close(linger=LINGER_MS)
        self._sockets.clear()
        self._context.term()

    def _configure(self, socket: zmq.Socket[bytes], curve_public_key: str) -> None:
        socket.setsockopt(zmq.SNDHWM, self._queued_messages)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if curve_public_key:
            if self._curve_keys is None:
                raise ValueError("this libzmq was built without CURVE, which the router asks for")
            socket.curve_publickey, socket.curve_secretkey = self._curve_keys
            socket.curve_serverkey = curve_public_key.encode("ascii")
