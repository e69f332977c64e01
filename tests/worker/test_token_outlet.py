"""The token outlet against routers that listen, that listen late, that never read, that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.internal.v1 import worker_pb2
from tests.fakes.attach_server import free_address
from tests.fakes.token_sink import token_sink
from worker_svc.token_outlet import TokenOutlet


@pytest.fixture
def outlet() -> Iterator[TokenOutlet]:
    outlet = TokenOutlet(queued_messages=10)
    yield outlet
    outlet.reset()
    outlet.close()


def batch(position: int, num_bytes: int = 0) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(stream_keys=[1], positions=[position], token_ids=[1] * num_bytes)


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_messages_arrive_in_order(outlet: TokenOutlet, curve: bool) -> None:
    with token_sink(curve=curve) as sink:
        outlet.add_router(sink.router(7))
        assert all(outlet.send(7, batch(position)) for position in range(5))
        assert [sink.next().positions[0] for _ in range(5)] == list(range(5))


def test_ipc_endpoints_are_dialled(outlet: TokenOutlet, tmp_path: Path) -> None:
    with token_sink(f"ipc://{tmp_path}/tokens") as sink:
        outlet.add_router(sink.router(7))
        assert outlet.send(7, batch(3))
        assert sink.next().positions[0] == 3


def test_a_router_that_listens_late_gets_everything(outlet: TokenOutlet) -> None:
    endpoint = f"tcp://{free_address()}"
    outlet.add_router(worker_pb2.RouterEndpoint(router_id=7, endpoint=endpoint))
    assert outlet.send(7, batch(0))
    with token_sink(endpoint) as sink:
        assert sink.next().positions[0] == 0


def test_a_router_that_never_reads_is_refused_and_holds_up_nobody(outlet: TokenOutlet) -> None:
    with token_sink() as reading:
        outlet.add_router(worker_pb2.RouterEndpoint(router_id=1, endpoint=f"tcp://{free_address()}"))
        outlet.add_router(reading.router(2))
        taken = [outlet.send(1, batch(position)) for position in range(30)]
        assert taken == [True] * 10 + [False] * 20
        assert outlet.send(2, batch(5))
        assert reading.next().positions[0] == 5


def test_a_router_that_is_gone_is_unknown(outlet: TokenOutlet) -> None:
    with token_sink() as sink:
        outlet.add_router(sink.router(7))
        assert outlet.knows(7)
        outlet.drop_router(7)
        assert not outlet.knows(7)
        assert not outlet.send(7, batch(0))


@pytest.mark.parametrize(
    "endpoint",
    ["", "inproc://tokens", "pgm://eth0;239.1.1.1:5555", "tcp://*:5555", "tcp://host", "tcp://host:80;other", "ipc://"],
)
def test_other_endpoints_are_not_dialled(outlet: TokenOutlet, endpoint: str) -> None:
    outlet.add_router(worker_pb2.RouterEndpoint(router_id=7, endpoint=endpoint))
    assert outlet.knows(7)
    assert not outlet.send(7, batch(0))


def test_a_wrong_key_is_refused(outlet: TokenOutlet) -> None:
    outlet.add_router(
        worker_pb2.RouterEndpoint(router_id=7, endpoint=f"tcp://{free_address()}", curve_public_key="short")
    )
    assert not outlet.send(7, batch(0))
