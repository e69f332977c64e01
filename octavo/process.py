"""What every process of the stack shares: signals, the lifeline to the supervisor, errors that end a start.

Knows the operating system; must not know what the process serves, and imports none of the services.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

LIFELINE_VARIABLE = "OCTAVO_LIFELINE_FD"
"""Environment variable with the read end of a pipe whose other end only the supervisor holds."""

GATE_VARIABLE = "OCTAVO_GATE_FD"
"""Environment variable with the read end of a pipe that the supervisor closes when its children may begin."""

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartError(Exception):
    """A process cannot start, or go on, for a reason that its operator can mend.

    The message is the cause in one line, with the remedy; no traceback is shown for it.
    """


def quiet_grpc() -> None:
    """Keeps gRPC's C core from writing lines of its own about peers that go away. Call it before grpc is imported.

    Our logs say what matters of it; a GRPC_VERBOSITY that is set already stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def say_last_words(program: str, cause: str) -> None:
    """Write why the process ends as its last line, and in one line: whoever reads only that has all of it."""
    print(f"{program}: {' '.join(cause.split())}", file=sys.stderr, flush=True)


def exit_at_once(signum: int) -> None:
    """End the process without waiting for anything, with the status shells expect of a signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + signum)


class Shutdown:
    """The first SIGINT or SIGTERM asks for a drain; the second ends the process at once.

    Create it in the main thread. Threads wait on `wait`, coroutines on `wait_async`; `draining` may be
    polled. The handlers stand until `close`, so that a signal during the drain is the second one.
    """

    def __init__(self, at_second: Callable[[int], None] = exit_at_once) -> None:
        # A handler runs in the middle of whatever the main thread does, so nothing here may take a lock that
        # the main thread can hold: a list that one caller empties, and a gate that is only ever released.
        self._unasked = [True]
        self._gate = threading.Lock()
        self._gate.acquire()
        self._at_second = at_second
        self._listeners: list[Callable[[], None]] = []
        self._previous = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}

    @property
    def draining(self) -> bool:
        return not self._unasked

    def request(self) -> None:
        """Ask for the drain from inside, from any thread; a repeated request changes nothing."""
        try:
            self._unasked.pop()
        except IndexError:
            return
        self._gate.release()
        for listener in tuple(self._listeners):
            listener()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until a drain is asked for; False when the time ran out first."""
        opened = self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if opened:
            self._gate.release()
        return opened

    async def wait_async(self) -> None:
        """Wait in a coroutine until a drain is asked for."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(asked.set)

        self._listeners.append(wake)
        try:
            if not self.draining:
                await asked.wait()
        finally:
            self._listeners.remove(wake)

    def close(self) -> None:
        """Give the signals back to the handlers that had them."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.draining:
            self._at_second(signum)
        else:
            self.request()


def die_with_parent() -> None:
    """End this process when its supervisor is gone, however that ended. Does nothing when there is none.

    The lifeline is a pipe: the supervisor's death closes its end, and the read here returns. On Linux the
    kernel is asked for a SIGKILL as well, which reaches a process that is stuck outside Python.
    """
    text = os.environ.pop(LIFELINE_VARIABLE, None)
    if text is None:
        return
    lifeline = int(text)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_follow, args=(lifeline,), name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(128 + signal.SIGKILL)


class Lifeline:
    """The supervisor's side: a pipe that stays open as long as this process lives.

    `environment` and `descriptors` go to each child (`pass_fds`); nothing is ever written.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    @property
    def environment(self) -> dict[str, str]:
        return {LIFELINE_VARIABLE: str(self._read_end)}

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._read_end,)

    def close(self) -> None:
        """Let go: children that still run end now."""
        os.close(self._write_end)
        os.close(self._read_end)


@contextlib.contextmanager
def lifeline() -> Iterator[Lifeline]:
    """A lifeline for the children started in this block; at its end those that are left die."""
    line = Lifeline()
    try:
        yield line
    finally:
        line.close()


class StartGate:
    """Holds children back until everything was found in order: they import their code meanwhile.

    `environment` and `descriptors` go to each child (`pass_fds`), which calls `await_gate`.
    """

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        self._write_ends = [write_end]

    @property
    def environment(self) -> dict[str, str]:
        return {GATE_VARIABLE: str(self._read_end)}

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._read_end,)

    def open(self) -> None:
        """Let the children through that wait, and those that are started later."""
        while self._write_ends:
            os.close(self._write_ends.pop())

    def close(self) -> None:
        """Free the pipe, when no more children are started."""
        self.open()
        os.close(self._read_end)


def await_gate() -> None:
    """Wait until the supervisor lets this process begin; returns at once where there is none."""
    text = os.environ.pop(GATE_VARIABLE, None)
    if text is None:
        return
    gate = int(text)
    while os.read(gate, 1):
        pass
    os.close(gate)


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` in a thread that does not keep the process from ending."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else set_it(value))

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            settle(future.set_exception, error)
        else:
            settle(future.set_result, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    found: T = await future
    return found
