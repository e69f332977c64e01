"""Free ports, and addresses of this machine as others see them."""

from __future__ import annotations

import pytest

from octavo.ports import address_towards, free_ports


def test_ports_that_are_asked_for_together_differ() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200


@pytest.mark.parametrize("target", ["127.0.0.1:8002", "localhost:8002", "unix:/run/octavo.sock"])
def test_this_machine_is_reached_over_loopback(target: str) -> None:
    assert address_towards(target) in ("127.0.0.1", "::1")


def test_a_host_without_address_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"not known|resolution|Name"):
        address_towards("no-such-host.invalid:8002")
