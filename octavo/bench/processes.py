"""What a local server's processes use: found from the port they listen on, read from /proc (Linux).

Elsewhere, or where the processes are another user's, nothing is found, and the report leaves the figures out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.ports import port_pid

_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost", "0.0.0.0")
_SAMPLE_INTERVAL_S = 2.0


@dataclass(frozen=True)
class ServerUse:
    """Memory (proportional set size: a shared page counts once) and cores of all processes of a server together."""

    pids: tuple[int, ...]
    peak_memory_bytes: int
    cores: float

    @property
    def peak_memory_mib(self) -> float:
        """As the report shows it."""
        return self.peak_memory_bytes / 2**20


def server_root(host: str, port: int) -> int | None:
    """The process whose tree serves host:port, where it is on this machine and may be seen.

    From the one that listens up to the topmost ancestor that runs the same program, as a supervisor of it does;
    never one of which this process is a descendant, too.
    """
    if host not in _LOCAL_HOSTS or sys.platform != "linux":
        return None
    pid = port_pid(port)
    if pid is None:
        return None
    ours = set(_ancestors(os.getpid()))
    root = pid
    for ancestor in _ancestors(pid)[1:]:
        if ancestor in ours or _program(ancestor) != _program(pid):
            break
        root = ancestor
    return root


class ServerWatch:
    """Looks at a server's tree of processes every two seconds; without a root it finds nothing."""

    def __init__(self, root: int | None) -> None:
        self._root = root
        self._pids: tuple[int, ...] = ()
        self._peak_bytes = 0
        self._begun_s = 0.0
        self._cpu_s: dict[int, float] = {}
        self._first_cpu_s: dict[int, float] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch during the block."""
        self._begun_s = asyncio.get_running_loop().time()
        self._sample()
        task = asyncio.create_task(self._sample_again())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self._sample()

    def use(self) -> ServerUse | None:
        """What was used during the block; None where nothing could be seen."""
        if not self._pids or not self._peak_bytes:
            return None
        seconds = max(1e-9, asyncio.get_running_loop().time() - self._begun_s)
        busy_s = sum(cpu_s - self._first_cpu_s.get(pid, 0.0) for pid, cpu_s in self._cpu_s.items())
        return ServerUse(self._pids, self._peak_bytes, busy_s / seconds)

    async def _sample_again(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL_S)
            # The kernel walks all pages of a process for its size: not in the thread that notes when tokens come.
            await asyncio.to_thread(self._sample)

    def _sample(self) -> None:
        if self._root is None:
            return
        pids = tuple(tree_of(self._root))
        sizes = [memory_bytes(pid) for pid in pids]
        if total := sum(size for size in sizes if size is not None):
            self._pids, self._peak_bytes = pids, max(self._peak_bytes, total)
        spent = {pid: cpu_s for pid in pids if (cpu_s := cpu_seconds(pid)) is not None}
        self._first_cpu_s = self._first_cpu_s or spent
        self._cpu_s |= spent


def tree_of(root: int) -> list[int]:
    """The process and its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _all_pids():
        if (parent := _parent(pid)) is not None:
            children[parent].append(pid)
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children[pid]
    return found


def memory_bytes(pid: int) -> int | None:
    """Proportional set size; None where it may not be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def cpu_seconds(pid: int) -> float | None:
    """Processor time of the process so far; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _all_pids() -> Iterable[int]:
    return (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())


def _ancestors(pid: int) -> list[int]:
    """The process itself, its parent, and so on."""
    found = [pid]
    while (parent := _parent(found[-1])) is not None and parent > 1:
        found.append(parent)
    return found


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _program(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None
