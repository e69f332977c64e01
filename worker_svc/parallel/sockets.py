"""Where the ranks of a replica listen: on as little as they can. Knows addresses alone."""

from __future__ import annotations

import errno
import ipaddress
import socket

from octavo.process import StartError

# A machine that loses power closes no connection. It is asked after so many seconds of silence, so often, so many times
# in all; what was sent must be acknowledged within so many milliseconds. Systems without one of these keep their own.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on that address alone; on all of them where the address is not this machine's own (a service's
    name in a cluster). Port 0 takes a free one. Raises StartError where the port is taken."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return socket.create_server(("", port), family=family)
        raise StartError(f"MASTER_ADDR:MASTER_PORT {address}:{port} cannot be listened on: {error.strerror}") from error


def prepare(connection: socket.socket) -> None:
    """For small messages that must not wait, and noticing within half a minute that the other machine has vanished."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(address: str) -> bool:
    """Whether a name or address means this machine, reachable from nowhere else."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
