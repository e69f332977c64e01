"""Which addresses come in, and whose word about an address is taken."""

from __future__ import annotations

import pytest

from router.access.networks import NetworkRules, grpc_peer_address, parse_address, parse_networks

OFFICE, PROXY = "10.0.0.0/8,2001:db8::/32", "192.0.2.1,fd00::/8"


def rules(allowed: str = OFFICE, proxies: str = PROXY) -> NetworkRules:
    return NetworkRules(parse_networks(allowed), parse_networks(proxies))


@pytest.mark.parametrize(
    ("peer", "forwarded", "inside"),
    [
        ("10.1.2.3", [], True),
        ("::ffff:10.1.2.3", [], True),
        ("2001:db8::5", [], True),
        ("11.1.2.3", [], False),
        ("11.1.2.3", ["10.1.2.3"], False),
        ("10.1.2.3", ["11.1.1.1"], True),
        ("192.0.2.1", [], False),
        ("192.0.2.1", ["10.1.2.3"], True),
        ("192.0.2.1", ["10.1.2.3:5512"], True),
        ("192.0.2.1", ["[2001:db8::5]:80"], True),
        ("192.0.2.1", ["10.1.2.3, 11.1.1.1"], False),
        ("192.0.2.1", ["10.1.2.3", "11.1.1.1"], False),
        ("192.0.2.1", ["11.1.1.1, 10.1.2.3"], True),
        ("192.0.2.1", ["10.1.2.3, fd00::7"], True),
        ("fd00::9", ["10.1.2.3, fd00::7"], True),
        ("192.0.2.1", ["unknown"], False),
        ("192.0.2.1", ["10.1.2.3, "], False),
        ("192.0.2.1", ["10.1.2.3" + ", fd00::1" * 100], False),
    ],
)
def test_who_comes_in(peer: str, forwarded: list[str], inside: bool) -> None:
    address = parse_address(peer)
    assert address is not None
    assert rules().allows(address, forwarded) is inside


def test_without_a_list_everybody_comes_in_and_a_unix_socket_has_its_permissions() -> None:
    everybody = NetworkRules()
    assert not everybody.checks_addresses
    assert everybody.allows(parse_address("203.0.113.9"), ["nonsense"])
    assert rules().allows(None, ["11.1.1.1"])


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("ipv4:10.1.2.3:5000", "10.1.2.3"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[2001:db8::5]:1", "2001:db8::5"),
        ("unix:", None),
        ("unix:/run/x.sock", None),
    ],
)
def test_grpc_names_of_peers(peer: str, shown: str | None) -> None:
    found = grpc_peer_address(peer)
    assert (None if found is None else str(found)) == shown


def test_a_bad_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.1/8"):
        parse_networks("10.0.0.1/8")
