"""A supervisor of child processes: starts them, passes their lines on, restarts what died, drains them in order.

Knows commands, signals and deadlines. Must not know what the children serve: readiness is asked of a function.
Before the children were ready together, one's death stops all with its cause; afterwards it is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.process import Lifeline, Shutdown, StartGate, exit_at_once, in_thread, lifeline
from octavo.stack.console import Console

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
_KILL_AFTER_S = 5.0


@dataclass(frozen=True)
class ChildSpec:
    """One child: its name in messages, its command, and what its environment has beside ours."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Backoff:
    """Waits between restarts: doubling from `first_s` to `longest_s`, and back to the first after a calm time."""

    first_s: float = 0.2
    longest_s: float = 30.0
    calm_s: float = 60.0

    def wait_s(self, restarts_in_row: int) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** min(restarts_in_row, 30))


@dataclass(frozen=True)
class Stages:
    """What a stack goes through before it serves.

    `check` runs in a thread while the children import their code, and holds them back until then; what it raises ends
    the stack before any has begun. `wait_ready` returns once the children serve together; `announce` is awaited after
    that, and cancelled when the stack stops meanwhile.
    """

    check: Callable[[], None]
    wait_ready: Callable[[], Awaitable[None]]
    announce: Callable[[], Awaitable[None]]


class Child:
    """One running child: its process, and the last line it wrote."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.process = process
        self.started = time.monotonic()
        self.last_line = ""

    def send(self, signum: signal.Signals) -> None:
        """Signal the child's whole process group; one that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def cause(self) -> str:
        """Why it ended, in its own words where it left any."""
        code = self.process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the system may be out of memory, see `octavo doctor`" if name == "SIGKILL" else ""
            return f"{self.spec.name} was killed by {name}{hint}"
        words = self.last_line.removeprefix(f"octavo {self.spec.name}: ")
        return f"{self.spec.name}: {words}" if words else f"{self.spec.name} ended with exit status {code}"


class Supervisor:
    """Runs the children in `specs`, which are given in the order in which they drain."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stages: Stages,
        console: Console,
        *,
        drain_timeout_s: float = 30.0,
        backoff: Backoff = Backoff(),
    ) -> None:
        self._specs = tuple(specs)
        self._stages = stages
        self._console = console
        self._drain_timeout_s = drain_timeout_s
        self._backoff = backoff
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._gate = StartGate()
        self._was_ready = False
        self._draining = False

    async def run(self) -> int:
        """Run until a signal asks for the end or the start fails; returns the exit status. Raises what `check` raises.

        The first SIGINT or SIGTERM drains, the second kills the children and ends this process at once.
        """
        shutdown = Shutdown(at_second=self._stop_at_once)
        try:
            with lifeline() as line:
                return await self._run(shutdown, line)
        finally:
            self._gate.close()
            shutdown.close()

    async def _run(self, shutdown: Shutdown, line: Lifeline) -> int:
        failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for spec in reversed(self._specs):  # what computes takes longest to start
            keeper = asyncio.create_task(self._keep(spec, line, failure), name=f"keep {spec.name}")
            self._keepers[spec.name] = keeper
        asked = asyncio.create_task(shutdown.wait_async(), name="shutdown")
        serving = asyncio.create_task(self._serve(), name="serve")
        watched: set[asyncio.Future[Any]] = {asked, serving, failure, *self._keepers.values()}
        try:
            while not (asked.done() or failure.done()):
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                watched -= done
                for task in done - {failure}:
                    task.result()  # the check's finding, or a defect of ours, which must not be passed over
        except BaseException:
            await self._stop_all()
            raise
        serving.cancel()
        asked.cancel()
        if failure.done():
            await self._stop_all()
            self._console.close()
            print(f"octavo: {failure.result()}", file=sys.stderr, flush=True)
            return 1
        await self._drain()
        return 0

    async def _serve(self) -> None:
        await in_thread(self._stages.check, "check")
        self._gate.open()
        await self._stages.wait_ready()
        self._was_ready = True
        self._console.status("")
        await self._stages.announce()

    async def _keep(self, spec: ChildSpec, line: Lifeline, failure: asyncio.Future[str]) -> None:
        """Keep one child running; ends when the stack drains or failed."""
        restarts_in_row = 0
        while not (self._draining or failure.done()):
            child = await self._start(spec, line)
            await self._pass_lines_on(child)
            await child.process.wait()
            if self._draining or failure.done():
                return
            if not self._was_ready:
                failure.set_result(child.cause())
                return
            lived_s = time.monotonic() - child.started
            restarts_in_row = 0 if lived_s >= self._backoff.calm_s else restarts_in_row
            wait_s = self._backoff.wait_s(restarts_in_row)
            restarts_in_row += 1
            _LOG.warning("%s; it is started again in %.1f s", child.cause(), wait_s)
            await asyncio.sleep(wait_s)

    async def _start(self, spec: ChildSpec, line: Lifeline) -> Child:
        # A group of its own keeps the terminal's Ctrl-C from the child: it is drained when its turn comes.
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **line.environment, **self._gate.environment, **spec.environment},
            pass_fds=(*line.descriptors, *self._gate.descriptors),
            process_group=0,
        )
        child = Child(spec, process)
        self._children[spec.name] = child
        _LOG.debug("%s started, pid %d", spec.name, process.pid)
        return child

    async def _pass_lines_on(self, child: Child) -> None:
        """Show the child's lines as they come, until it closes its output."""
        stream = child.process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for text in lines:
                self._show(child, text)
            if len(rest) > _LONGEST_LINE_BYTES:
                self._show(child, rest)
                rest = b""
        self._show(child, rest)

    def _show(self, child: Child, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            child.last_line = text
            self._console.child_line(child.spec.name, text)

    async def _drain(self) -> None:
        """Ask the children to end, one after the other in their order; kill what outlasts its time."""
        self._draining = True
        _LOG.info("draining; press Ctrl-C again to stop at once")
        for spec in self._specs:
            await self._end(spec.name, self._drain_timeout_s)
        self._console.close()

    async def _stop_all(self) -> None:
        """End every child at the same time, without waiting for their work."""
        self._draining = True
        await asyncio.gather(*(self._end(spec.name, _KILL_AFTER_S) for spec in self._specs))

    async def _end(self, name: str, timeout_s: float) -> None:
        keeper = self._keepers[name]
        child = self._children.get(name)
        if child is None or child.process.returncode is not None:
            keeper.cancel()  # it waits to start the child again, or has yet to start it
            await asyncio.wait({keeper})
            child = self._children.get(name)
            if child is None or child.process.returncode is not None:
                return
        child.send(signal.SIGTERM)
        done, _ = await asyncio.wait({keeper}, timeout=timeout_s)
        if not done:
            _LOG.warning("%s did not end within %.0f s and is killed", name, timeout_s)
            child.send(signal.SIGKILL)
            await asyncio.wait({keeper})

    def _stop_at_once(self, signum: int) -> None:
        for child in self._children.values():
            if child.process.returncode is None:
                child.send(signal.SIGKILL)
        exit_at_once(signum)
