"""One line on a terminal while a run lasts: how many requests have ended, and the rate of tokens so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from octavo.bench.records import Record

_CLEAR_LINE = "\r\x1b[K"
_BAR_WIDTH = 24
_LEAST_INTERVAL_S = 0.1


class Progress:
    """Writes to a terminal and nothing elsewhere. `clock` gives seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._label = ""
        self._total = self._done = self._num_tokens = self._num_failed = 0
        self._begun_s = self._shown_s = 0.0

    def begin(self, label: str, total: int) -> None:
        """A run of so many requests begins."""
        self._label, self._total = label, total
        self._done = self._num_tokens = self._num_failed = 0
        self._begun_s, self._shown_s = self._clock(), float("-inf")
        self._show()

    def note(self, record: Record) -> None:
        """A request has ended."""
        self._done += 1
        self._num_tokens += record.num_output_tokens
        self._num_failed += not record.is_complete
        self._show()

    def end(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def _show(self) -> None:
        now = self._clock()
        if not self._is_terminal or now - self._shown_s < _LEAST_INTERVAL_S:
            return
        self._shown_s = now
        seconds = max(1e-9, now - self._begun_s)
        filled = _BAR_WIDTH * self._done // max(1, self._total)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._stream.write(
            f"{_CLEAR_LINE}{self._label} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {self._done}/{self._total}"
            f"  {self._num_tokens / seconds:.0f} tok/s  {seconds:.0f} s{failed}"
        )
        self._stream.flush()
