"""Where a router may have its tokens sent: nowhere but to itself, unless the operator allows a network."""

from __future__ import annotations

import ipaddress

import grpc
import pytest

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.service import endpoint_refusal
from tests.scheduler_svc.harness import end_of, run, scheduler

LOCAL, REMOTE, UNIX, LOCAL6, REMOTE6 = (
    "ipv4:127.0.0.1:4711",
    "ipv4:10.0.0.5:4711",
    "unix:/run/octavo/scheduler",
    "ipv6:%5B::1%5D:4711",
    "ipv6:%5B2001:db8::5%5D:4711",
)
NETWORKS = (ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8"))


@pytest.mark.parametrize(
    ("endpoint", "peer"),
    [
        ("tcp://127.0.0.1:5000", LOCAL),
        ("tcp://127.0.0.2:5000", LOCAL),
        ("tcp://[::1]:5000", LOCAL),
        ("tcp://127.0.0.1:5000", LOCAL6),
        ("tcp://127.0.0.1:5000", UNIX),
        ("tcp://127.0.0.1:5000", "unix:"),
        ("ipc:///run/octavo/tokens", LOCAL),
        ("ipc:///run/octavo/tokens", UNIX),
        ("tcp://10.0.0.5:5000", REMOTE),
        ("tcp://[2001:db8::5]:5000", REMOTE6),
        ("tcp://[2001:db8:0:0::5]:5000", REMOTE6),
        ("tcp://10.1.2.3:5000", REMOTE),
        ("tcp://10.1.2.3:5000", LOCAL),
        ("tcp://[fd00::1]:5000", REMOTE6),
    ],
)
def test_own_addresses_and_allowed_networks_are_accepted(endpoint: str, peer: str) -> None:
    assert endpoint_refusal(endpoint, peer, NETWORKS) is None


@pytest.mark.parametrize(
    ("endpoint", "peer", "words"),
    [
        ("ipc:///run/octavo/tokens", REMOTE, "not on this machine"),
        ("tcp://127.0.0.1:5000", REMOTE, "--token-networks 127.0.0.1"),
        ("tcp://10.0.0.6:5000", REMOTE, "--token-networks 10.0.0.6"),
        ("tcp://10.0.0.5:5000", LOCAL, "--token-networks 10.0.0.5"),
        ("tcp://10.2.0.1:5000", REMOTE, "--token-networks"),
        ("tcp://0.0.0.0:5000", LOCAL, "--token-networks"),
        ("tcp://localhost:5000", LOCAL, "numeric"),
        ("tcp://169.254.169.254:80", LOCAL, "--token-networks"),
        ("tcp://127.0.0.1:1;10.0.0.9:80", LOCAL, "tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1", LOCAL, "tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:http", LOCAL, "tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:70000", LOCAL, "tcp://ADDRESS:PORT"),
        ("127.0.0.1:5000", LOCAL, "tcp://ADDRESS:PORT"),
        ("udp://127.0.0.1:5000", LOCAL, "tcp://ADDRESS:PORT"),
        ("inproc://x", LOCAL, "tcp://ADDRESS:PORT"),
        ("", LOCAL, "tcp://ADDRESS:PORT"),
    ],
)
def test_any_other_is_refused_with_the_remedy(endpoint: str, peer: str, words: str) -> None:
    refusal = endpoint_refusal(endpoint, peer, NETWORKS)
    assert refusal is not None
    assert endpoint in refusal
    assert words in refusal


def test_a_refused_endpoint_registers_no_router() -> None:
    async def test() -> None:
        async with scheduler() as shell:
            watch = shell.stub.Watch(pb.WatchRequest(token_endpoint="tcp://10.9.9.9:1", name="router"))
            code, message = await end_of(watch)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "tcp://10.9.9.9:1" in message

    run(test)


def test_an_allowed_network_is_accepted_over_the_wire() -> None:
    async def test() -> None:
        async with scheduler(networks=[ipaddress.ip_network("10.9.0.0/16")]) as shell:
            watch = shell.stub.Watch(pb.WatchRequest(token_endpoint="tcp://10.9.9.9:1", name="router"))
            assert (await watch.read()).router_id

    run(test)
