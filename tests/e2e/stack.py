"""Runs `octavo serve` as a user does, for tests that look at real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.ports import free_ports

_LOOPBACK = "127.0.0.1"
_START_LIMIT_S = 120.0
_POLL_S = 0.02


def eventually(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Waits until `condition` holds and returns the seconds it took; fails, saying what, after `limit_s`."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < limit_s, f"not within {limit_s} s: {what}"
        threading.Event().wait(_POLL_S)
    return time.monotonic() - start


@dataclass
class Stack:
    """A running `octavo serve`."""

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    lines: list[str] = field(default_factory=list)

    @property
    def http(self) -> str:
        return f"http://{_LOOPBACK}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{_LOOPBACK}:{self.grpc_port}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Status and body of GET /ready; status 0 where nobody listens."""
        try:
            with urllib.request.urlopen(f"{self.http}/ready", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            return refusal.code, json.load(refusal)
        except OSError:
            return 0, {}

    def wait_until_ready(self, limit_s: float = _START_LIMIT_S) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"octavo serve ended:\n{self.log}"
            return self.ready()[0] == 200

        eventually(is_ready, limit_s, "the stack is ready")

    def pid_of(self, service: str) -> int:
        """The process id of the child that runs `octavo SERVICE` now."""
        for pid in children_of(self.process.pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
                if f"\0{service}\0" in file.read():
                    return pid
        raise AssertionError(f"no {service} among the children of {self.process.pid}")

    def replicas(self) -> list[scheduler_pb2.Replica]:
        """What the scheduler's ControlService reports."""
        port = self.scheduler_port
        with grpc.insecure_channel(f"{_LOOPBACK}:{port}") as channel:
            stub = scheduler_pb2_grpc.ControlServiceStub(channel)
            return list(stub.ListReplicas(scheduler_pb2.ListReplicasRequest(), timeout=10).replicas)

    @property
    def scheduler_port(self) -> int:
        """The port of the scheduler's services, as its log says it."""
        return self._logged(r"\bscheduler\b.*\bready on 127\.0\.0\.1:(\d+)")

    @property
    def metrics_ports(self) -> dict[str, int]:
        """Where each process is scraped, by its name; the last start of each counts."""
        scheduler = self._logged(r"\bscheduler\b.*\bmetrics on http://127\.0\.0\.1:(\d+)/metrics")
        worker = self._logged(r"\bworker\b.*\bmetrics on http://127\.0\.0\.1:(\d+)/metrics")
        return {"router": self.http_port, "scheduler": scheduler, "worker": worker}

    def _logged(self, pattern: str) -> int:
        eventually(lambda: re.search(pattern, self.log) is not None, 10.0, f"the log says {pattern}")
        return int(re.findall(pattern, self.log)[-1])

    def stop(self, limit_s: float = 30.0) -> int:
        """One Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(limit_s)


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[Stack]:
    """A stack that is ready, and gone afterwards."""
    with starting(model, *options) as stack:
        stack.wait_until_ready()
        # From here on what dies is started again; before, it ends the stack.
        eventually(lambda: "Talk to it" in stack.log, _START_LIMIT_S, "the supervisor has seen it")
        yield stack


@contextlib.contextmanager
def starting(model: str, *options: str) -> Iterator[Stack]:
    """A stack that has been started, ready or not; gone afterwards."""
    http_port, grpc_port = free_ports(2, _LOOPBACK)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    command = [sys.executable, "-m", "octavo", "serve", model, *ports, *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    stack = Stack(process, http_port, grpc_port)
    assert process.stdout is not None
    stdout = process.stdout
    reader = threading.Thread(target=lambda: stack.lines.extend(line.rstrip("\n") for line in stdout), daemon=True)
    reader.start()
    try:
        yield stack
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait(10)
        reader.join(10)


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def listeners_of(pid: int) -> list[tuple[str, int]]:
    """(address, port) of the TCP sockets on which a process listens, IPv4 and IPv6."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            if match:
                inodes.add(match.group(1))
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.append((address, int(port, 16)))
    return found


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
