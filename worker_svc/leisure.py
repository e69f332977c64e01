"""What makes a worker faster and need not be there when it starts, done beside the steps by threads that give way to
all others: second copies of weights, and memory for the KV cache ahead of its use.

Finding memory for the copies takes a good part of a second that a start can do without. Knows when; the kernels know
what.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from kernels.api import Backend, KVCache, MemoryAhead, SecondCopies
from octavo.sizes import format_bytes

_LOG = logging.getLogger(__name__)

# The least that a thread can be given of a core that others want: a hundredth or two.
_NICENESS = 19

# From one look at how far the KV cache is used to the next.
_LOOK_S = 0.5


class LeisureThread:
    """One piece of work. It begins after `leisure_s`: until then the first requests may need the cores more."""

    def __init__(self, name: str, work: Callable[[threading.Event], None], leisure_s: float) -> None:
        """`work` returns when it is done, or soon after the event that it is given is set."""
        self._closing = threading.Event()
        self._work = work
        self._leisure_s = leisure_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the work at the next place where it can end."""
        self._closing.set()
        self.join()

    def join(self) -> None:
        """Waits until the work is done."""
        self._thread.join()

    def _run(self) -> None:
        if not self._closing.wait(self._leisure_s):
            _give_way()
            self._work(self._closing)


def begin_leisure(backend: Backend, cache: KVCache, ahead_bytes: int, leisure_s: float) -> tuple[LeisureThread, ...]:
    """The threads of a worker, as many as its kernels have work for; `ahead_bytes` of the cache are kept ready."""
    works: dict[str, Callable[[threading.Event], None]] = {}
    if isinstance(backend, SecondCopies) and backend.info.copy_bytes:
        works["second copies"] = partial(make_copies, backend)
    if isinstance(backend, MemoryAhead):
        works["memory ahead"] = partial(find_memory, backend, cache, ahead_bytes)
    return tuple(LeisureThread(name, work, leisure_s) for name, work in works.items())


def make_copies(backend: SecondCopies, closing: threading.Event) -> None:
    """Until all are made."""
    begun_s = time.monotonic()
    try:
        num_bytes = backend.make_copies(lambda: not closing.is_set())
    except (MemoryError, RuntimeError) as error:  # torch's, for memory that it does not get
        _LOG.warning("steps of few rows stay slower than they could be, second copies of weights failed: %s", error)
        return
    if not closing.is_set():
        seconds = time.monotonic() - begun_s
        _LOG.info("second copies of weights: %s, made in %.2f s", format_bytes(num_bytes), seconds)


def find_memory(backend: MemoryAhead, cache: KVCache, ahead_bytes: int, closing: threading.Event) -> None:
    """Ahead of use, as that goes on, until closed."""
    while not closing.is_set():
        backend.find_memory(cache, ahead_bytes, lambda: not closing.is_set())
        closing.wait(_LOOK_S)


def _give_way() -> None:
    """On Linux niceness is a thread's own; elsewhere it would slow the steps as well."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
