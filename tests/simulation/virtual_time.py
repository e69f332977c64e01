"""An event loop whose clock jumps: nothing sleeps, and the same program does the same things in the same order.

Knows asyncio alone. Time passes only when every task waits for it, at once and to the next timer. A loop in which
nothing can ever happen again, or in which everything happens without time passing, raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio

T = TypeVar("T")

_MOST_TURNS_AT_ONCE = 100_000


class LiveLock(AssertionError):
    """Everything waits for something else, or everything runs and no time passes."""


class _VirtualSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turns_at_once = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise LiveLock("every task waits and no timer is set: nothing will ever happen")
        self._turns_at_once = 0 if timeout > 0 else self._turns_at_once + 1
        if self._turns_at_once > _MOST_TURNS_AT_ONCE:
            raise LiveLock(f"{_MOST_TURNS_AT_ONCE} turns of the loop and the clock still says {self.now_s}")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Collects in `failures` what any task or callback raised, for whoever runs it to look at."""

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)
        self.failures: list[BaseException] = []
        self.set_exception_handler(self._take_exception)

    def time(self) -> float:
        return self._virtual_selector.now_s

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        task.add_done_callback(self._take_end)
        return task

    def _take_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError):
            self.failures.append(error)

    def _take_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, grpc.aio.AioRpcError):
            self.failures.append(error or AssertionError(context["message"]))


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine in a loop of its own that starts at time 0."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
