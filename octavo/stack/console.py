"""The supervisor's terminal: lines of several processes, and below them one status line while a start runs.

Knows how lines look; must not know what they mean.
"""

from __future__ import annotations

from typing import TextIO

from octavo.logs import NAME_WIDTH, is_log_line

_CLEAR_LINE = "\r\x1b[K"


class Console:
    """Writes whole lines to a stream; on a terminal a status line stays at the bottom until it is cleared."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._status = ""

    def child_line(self, name: str, text: str) -> None:
        """A line of a child's output; one that is no log line gets the child's name before it."""
        self.line(text if is_log_line(text) else f"{name:<{NAME_WIDTH}} | {text}")

    def line(self, text: str) -> None:
        if self._status:
            self._stream.write(_CLEAR_LINE)
        self._stream.write(f"{text}\n{self._status}")
        self._stream.flush()

    def status(self, text: str) -> None:
        """Replace the status line; nothing is written where the stream is no terminal."""
        if not self._is_terminal or text == self._status:
            return
        self._stream.write(f"{_CLEAR_LINE}{text}")
        self._stream.flush()
        self._status = text

    def close(self) -> None:
        self.status("")


def progress_bar(name: str, done: int, total: int, width: int = 30) -> str:
    """`weights   [#########.....................]  82/272`."""
    filled = width * min(done, total) // max(total, 1)
    return f"{name:<9} [{'#' * filled}{'.' * (width - filled)}] {done:>3}/{total}"
