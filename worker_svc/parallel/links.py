"""The connections between rank 0 and the others: orders go out, and a connection that ends says that a rank has died.

`OrderSender` is rank 0's side, `OrderReceiver` another rank's. Both watch from threads of their own, for the step
thread may stand in a collective operation that no death interrupts. Knows sockets and messages; no tensors, no
processes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

from octavo.internal.v1 import ranks_pb2
from octavo.process import StartError
from worker_svc.parallel.sockets import prepare
from worker_svc.parallel.wire import LinkEnded, frame, receive

_LOG = logging.getLogger(__name__)

_POLL_S = 0.2
_MAX_ARRIVAL_BYTES = 4096
# A rank that says why it ends is given so long to do it, so that its words come before those about it.
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Arrived:
    """A rank that is connected."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Loss:
    """A rank that has gone, and what it said of the reason, if it did."""

    who: Arrived
    cause: str | None


class OrderSender:
    """Rank 0's connections to all others. Orders are sent from one thread; `on_loss` is called from another."""

    def __init__(self, listener: socket.socket, num_ranks: int, on_loss: Callable[[Loss], None]) -> None:
        self.secret = secrets.token_bytes(16)
        self._num_ranks = num_ranks
        self._on_loss = on_loss
        self._listener = listener
        self._connections: dict[Arrived, socket.socket] = {}
        self._closing = threading.Event()

    @property
    def num_arrived(self) -> int:
        """Ranks that are connected, rank 0 among them."""
        return 1 + len(self._connections)

    @property
    def port(self) -> int:
        """Where it listens until all have arrived."""
        return int(self._listener.getsockname()[1])

    def accept_all(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Waits until all other ranks are connected. `check` is called again and again, and may raise.

        Raises StartError with the ranks that have arrived and those that have not.
        """
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(_POLL_S)
        while self.num_arrived < self._num_ranks:
            check()
            if time.monotonic() > deadline:
                raise StartError(self._missing(timeout_s))
            with contextlib.suppress(TimeoutError, LinkEnded):
                self._accept()
        self._listener.close()
        for arrived, connection in self._connections.items():
            watch = threading.Thread(target=self._watch, args=(arrived, connection), name=str(arrived), daemon=True)
            watch.start()

    def send(self, order: ranks_pb2.RankOrder) -> None:
        """Sends an order to every other rank. One that cannot be reached is lost, which its watcher tells."""
        framed = frame(order)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(framed)

    def close(self) -> None:
        """Tells all that the replica ends, and lets go of them."""
        self._closing.set()
        self.send(ranks_pb2.RankOrder(stop=True))
        for connection in (self._listener, *self._connections.values()):
            connection.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_LAST_WORDS_S)
        try:
            arrival = receive(connection, ranks_pb2.RankArrival, _MAX_ARRIVAL_BYTES)
        except LinkEnded:
            connection.close()
            raise
        known = {arrived.rank for arrived in self._connections}
        is_ours = hmac.compare_digest(arrival.secret, self.secret) and 0 < arrival.rank < self._num_ranks
        if not is_ours or arrival.rank in known:
            _LOG.warning("a connection that is no missing rank's is closed")
            connection.close()
            return
        prepare(connection)
        self._connections[Arrived(arrival.rank, arrival.host, arrival.pid)] = connection

    def _missing(self, timeout_s: float) -> str:
        arrived = [Arrived(0, socket.gethostname(), os.getpid()), *self._connections]
        by_rank = {each.rank: each for each in arrived}
        table = [f"{rank:>4}  {by_rank.get(rank, 'missing')}" for rank in range(self._num_ranks)]
        _LOG.error("ranks after %g s\n%s", timeout_s, "\n".join(table))
        missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in by_rank)
        return (
            f"{len(arrived)} of {self._num_ranks} ranks arrived within {timeout_s:g} s, missing: {missing}; start "
            "them with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or raise --rendezvous-timeout"
        )

    def _watch(self, who: Arrived, connection: socket.socket) -> None:
        cause = None
        with contextlib.suppress(LinkEnded):
            cause = receive(connection, ranks_pb2.RankFailure).cause
            with contextlib.suppress(OSError):
                connection.settimeout(_LAST_WORDS_S)
            receive(connection, ranks_pb2.RankFailure)
        if not self._closing.is_set():
            self._on_loss(Loss(who, cause))


class OrderReceiver:
    """Another rank's connection to rank 0. `on_end` is called from a thread: with True when the replica was ended in
    order, with False when rank 0 is gone."""

    def __init__(self, connection: socket.socket, on_end: Callable[[bool], None]) -> None:
        self._connection = connection
        self._on_end = on_end
        self._orders: SimpleQueue[ranks_pb2.RankOrder] = SimpleQueue()
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def orders(self) -> Iterator[ranks_pb2.RankOrder]:
        """What rank 0 does, in order and without end: `on_end` ends the process."""
        while True:
            yield self._orders.get()

    def fail(self, cause: str) -> None:
        """Says why this rank is about to end."""
        with contextlib.suppress(OSError):
            self._connection.sendall(frame(ranks_pb2.RankFailure(cause=cause)))

    def _receive(self) -> None:
        try:
            while True:
                order = receive(self._connection, ranks_pb2.RankOrder)
                if order.WhichOneof("order") == "stop":
                    self._on_end(True)
                    return
                self._orders.put(order)
        except LinkEnded:
            self._on_end(False)


def connect(address: tuple[str, int], rank: int, secret: bytes, timeout_s: float) -> socket.socket:
    """A rank's connection to rank 0. Raises OSError where nobody answers."""
    connection = socket.create_connection(address, timeout=timeout_s)
    prepare(connection)
    arrival = ranks_pb2.RankArrival(rank=rank, secret=secret, host=socket.gethostname(), pid=os.getpid())
    connection.sendall(frame(arrival))
    return connection
