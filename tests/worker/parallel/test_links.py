"""Orders from rank 0 to another rank over a real connection, and what both learn of each other's end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from octavo.internal.v1 import ranks_pb2, worker_pb2
from octavo.process import StartError
from worker_svc.parallel.links import Loss, OrderReceiver, OrderSender, connect
from worker_svc.parallel.wire import LinkEnded, frame, receive

WAIT_S = 30.0
PLAN = ranks_pb2.RankOrder(plan=worker_pb2.StepPlan(step=3, row_slots=[1], row_starts=[0], row_counts=[70_000]))


class Pair:
    """Both sides of a replica of two ranks, with what each was told."""

    def __init__(self) -> None:
        self.losses: SimpleQueue[Loss] = SimpleQueue()
        self.ends: SimpleQueue[bool] = SimpleQueue()
        self.sender = OrderSender(socket.create_server(("127.0.0.1", 0)), 2, self.losses.put)
        self.connection = self.connect(self.sender.secret)
        self.sender.accept_all(WAIT_S, lambda: None)
        self.receiver = OrderReceiver(self.connection, self.ends.put)

    def connect(self, secret: bytes) -> socket.socket:
        return connect(("127.0.0.1", self.sender.port), 1, secret, WAIT_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.sender.close()
    made.connection.close()


def test_orders_arrive_in_order_and_the_last_ends_the_rank(pair: Pair) -> None:
    orders = pair.receiver.orders()
    for order in (PLAN, ranks_pb2.RankOrder(reset=True), PLAN):
        pair.sender.send(order)
        assert next(orders) == order
    pair.sender.close()
    assert pair.ends.get(timeout=WAIT_S) is True
    assert pair.losses.empty()


def test_a_rank_that_vanishes_is_a_loss_without_words(pair: Pair) -> None:
    pair.connection.shutdown(socket.SHUT_RDWR)
    loss = pair.losses.get(timeout=WAIT_S)
    assert (loss.who.rank, loss.cause) == (1, None)
    pair.sender.send(PLAN)  # nobody takes it, and that is no error


def test_a_rank_that_fails_says_why(pair: Pair) -> None:
    pair.receiver.fail("no memory")
    pair.connection.shutdown(socket.SHUT_RDWR)
    assert pair.losses.get(timeout=WAIT_S).cause == "no memory"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has all of these options")
def test_both_sides_notice_a_machine_that_vanishes(pair: Pair) -> None:
    """Its end closes nothing: only unanswered questions tell."""
    for connection in (pair.connection, *pair.sender._connections.values()):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, times = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * times <= 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        assert connection.gettimeout() is None


def test_rank_0_gone_is_not_an_end_in_order(pair: Pair) -> None:
    for connection in pair.sender._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    assert pair.ends.get(timeout=WAIT_S) is False


def test_strangers_are_turned_away_and_missing_ranks_named() -> None:
    sender = OrderSender(socket.create_server(("127.0.0.1", 0)), 3, lambda _: None)
    stranger = connect(("127.0.0.1", sender.port), 1, b"guess", WAIT_S)
    noise = socket.create_connection(("127.0.0.1", sender.port))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    friend = connect(("127.0.0.1", sender.port), 2, sender.secret, WAIT_S)
    polls: list[int] = []
    with pytest.raises(StartError, match=r"^2 of 3 ranks arrived within 1 s, missing: 1; start them with the same"):
        sender.accept_all(1.0, lambda: polls.append(sender.num_arrived))
    assert polls[-1] == 2
    sender.close()
    for connection in (stranger, noise, friend):
        connection.close()


def test_a_message_that_is_too_long_or_none_ends_the_link() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(PLAN))
        with pytest.raises(LinkEnded, match="more than 3"):
            receive(ours, ranks_pb2.RankOrder, max_bytes=3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\x00\x00\x00\x02\xff\xff")
        with pytest.raises(LinkEnded):
            receive(ours, ranks_pb2.RankOrder)
