"""From which addresses clients may come, and whose word about an address is taken. Knows addresses and networks."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import TypeAlias
from urllib.parse import unquote

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_MOST_HOPS = 32

# 192.0.2.7:80, [2001:db8::1]:80 and [2001:db8::1]; a bare IPv6 address has more than one colon.
_WITH_PORT = re.compile(r"^(?:([0-9.]+):[0-9]+|\[([^\]]*)\](?::[0-9]+)?)$")


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks from `10.0.0.0/8,fd00::/8,192.0.2.7`. Raises ValueError naming a bad one."""
    return tuple(ipaddress.ip_network(word.strip()) for word in text.split(",") if word.strip())


def parse_address(text: str) -> Address | None:
    """An address, an IPv4 one inside IPv6 as itself, without zone, brackets and port; None for what is none."""
    word = _WITH_PORT.sub(r"\1\2", text.strip())
    try:
        address = ipaddress.ip_address(word.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def grpc_peer_address(peer: str) -> Address | None:
    """The address in gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`; None for one without (a unix socket)."""
    kind, _, rest = unquote(peer).partition(":")
    return parse_address(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else None


class NetworkRules:
    """Who may come in. A peer without an address came through a unix socket, whose permissions decide."""

    def __init__(self, allowed: Sequence[Network] = (), trusted_proxies: Sequence[Network] = ()) -> None:
        """No `allowed` network: everybody may. Only `trusted_proxies` are believed when they say for whom they ask."""
        self._allowed = tuple(allowed)
        self._proxies = tuple(trusted_proxies)

    @property
    def checks_addresses(self) -> bool:
        """Whether some address may not come in."""
        return bool(self._allowed)

    def allows(self, peer: Address | None, forwarded_for: Sequence[str] = ()) -> bool:
        """Whether a request may come in from `peer`, with the values of X-Forwarded-For in their order.

        Behind trusted proxies the nearest address counts that is not one of them; one they wrote that cannot be read is
        not let in.
        """
        if not self._allowed:
            return True
        client = peer
        hops = [hop for value in forwarded_for for hop in value.split(",")][-_MOST_HOPS:]
        while client is not None and hops and _is_in(client, self._proxies):
            client = parse_address(hops.pop())
            if client is None:
                return False
        return client is None or _is_in(client, self._allowed)


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
