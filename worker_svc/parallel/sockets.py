"""Where the ranks of a replica listen: on as little as they can. Knows addresses alone."""

from __future__ import annotations

import errno
import ipaddress
import socket

from octavo.process import StartError


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


def is_loopback(address: str) -> bool:
    """Whether a name or address means this machine, reachable from nowhere else."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
