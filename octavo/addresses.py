"""Addresses that a process listens on or dials: which reach this machine alone, and how gRPC spells them."""

from __future__ import annotations

import ipaddress

UNIX_PREFIX = "unix:"


def is_local_host(host: str) -> bool:
    """Whether a listener on `host` can be reached from this machine alone: loopback, or a unix socket."""
    name = host.strip("[]")
    if name == "localhost" or host.startswith(UNIX_PREFIX):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything


def grpc_address(host: str, port: int) -> str:
    """What gRPC listens on or dials: `host:port`, an IPv6 host in brackets, or the `unix:` path as it is."""
    if host.startswith(UNIX_PREFIX):
        return host
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
