"""TCP ports and addresses of this machine: a free port, who holds a taken one, the address that others see."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path

_LISTEN_STATE = "0A"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listened on a moment ago; another process may take it before its user binds it."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """As `free_port`, all different: asked one by one, the system may offer a port again that nobody has bound yet."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket(_family(host), socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def port_in_use(host: str, port: int) -> bool:
    """Whether binding `host:port` fails because another socket listens there; port 0 never is.

    Raises OSError where the address cannot be bound for another reason (not this machine's, not permitted).
    """
    if port == 0:
        return False
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # A port whose last connections linger in TIME_WAIT is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def port_owner(port: int) -> str | None:
    """The process that listens on the port, as `name (pid 123)`, where the system lets us see it."""
    pid = port_pid(port)
    if pid is None:
        return None
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:  # it has just ended
        return None
    return f"{name} (pid {pid})"


def port_pid(port: int) -> int | None:
    """The id of the process that listens on the port, where the system lets us see it."""
    if sys.platform != "linux":
        return None
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(Path("/proc/net") / table, port)}
    targets = {f"socket:[{inode}]" for inode in inodes}
    if not targets:
        return None
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, targets):
            return int(process.name)
    return None


def address_towards(target: str) -> str:
    """This machine's address on the way to `target` ("host:port", or "unix:PATH", which is this machine).

    Sends nothing. Raises OSError where the host has no address yet or no way leads there.
    """
    if target.startswith("unix:"):
        return "127.0.0.1"
    host, _, port = target.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _listening_inodes(table: Path, port: int) -> list[str]:
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
    # Columns of /proc/net/tcp: sl, local address:port in hex, remote, state, ..., inode at 9.
    return [row[9] for row in rows if row[3] == _LISTEN_STATE and int(row[1].rsplit(":", 1)[1], 16) == port]


def _holds(process: Path, targets: set[str]) -> bool:
    try:
        for descriptor in (process / "fd").iterdir():
            if os.readlink(descriptor) in targets:
                return True
    except OSError:  # another user's process, or one that has just ended
        return False
    return False
