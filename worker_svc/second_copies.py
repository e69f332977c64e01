"""Has the kernels' second copies of weights made once the worker serves, in a thread that gives way to all others.

Finding memory for them takes a good part of a second that a start can do without. Knows when; the kernels know what.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time

from kernels.api import Backend, SecondCopies
from octavo.sizes import format_bytes

_LOG = logging.getLogger(__name__)

# The least that a thread can be given of a core that others want: a hundredth or two.
_NICENESS = 19


class CopyMaker:
    """One per worker. It has nothing to do for kernels that make no copies."""

    def __init__(self, backend: Backend, leisure_s: float) -> None:
        """Begins after `leisure_s`: until then the first requests may need the cores more."""
        self._closing = threading.Event()
        self._leisure_s = leisure_s
        self._thread: threading.Thread | None = None
        if isinstance(backend, SecondCopies) and backend.info.copy_bytes:
            self._thread = threading.Thread(target=self._run, args=(backend,), name="second copies", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread once it has made the copy that it is at."""
        self._closing.set()
        self.join()

    def join(self) -> None:
        """Waits until all copies are made."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, backend: SecondCopies) -> None:
        if self._closing.wait(self._leisure_s):
            return
        _give_way()
        begun_s = time.monotonic()
        try:
            num_bytes = backend.make_copies(lambda: not self._closing.is_set())
        except (MemoryError, RuntimeError) as error:  # torch's, for memory that it does not get
            _LOG.warning("steps of few rows stay slower than they could be, second copies of weights failed: %s", error)
            return
        if not self._closing.is_set():
            seconds = time.monotonic() - begun_s
            _LOG.info("second copies of weights: %s, made in %.2f s", format_bytes(num_bytes), seconds)


def _give_way() -> None:
    """On Linux niceness is a thread's own; elsewhere it would slow the steps as well."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
