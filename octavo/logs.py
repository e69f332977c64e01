"""Logging: one line a record on standard error, with the time, the process and the level, as text or as JSON.

Knows how a line looks, so that the supervisor can tell a child's log lines from its other output.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime

NAME_WIDTH = 10

_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} |\{\"time\": ")

_JSON_EXTRAS = ("request_id",)
"""Attributes that a record may carry (`extra=`) and a JSON line shows."""


class _LineFormatter(logging.Formatter):
    """`12:03:04.567 worker     INFO    message`; later lines of a record are indented."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d {process_name:<{NAME_WIDTH}} %(levelname)-7s %(message)s", "%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, pid, logger, message, and request_id and exception where there
    are any."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _JSON_EXTRAS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _Discreet(logging.Filter):
    """Keeps what a request held out of the log: the messages of exceptions may repeat it, and so do libraries' words
    about a task that failed. Where it failed and with which type stays.

    What ends a process (the logger of `octavo`) is told in full.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "octavo":
            return True
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = "\n".join(_without_messages(record.exc_info[1]))
        if record.name == "asyncio":
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True


def _without_messages(error: BaseException | None) -> Iterator[str]:
    """Where an exception and those that led to it were raised, and their types."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield "Traceback (messages of exceptions are shown with --log-level debug):"
        yield "".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def setup_logging(process_name: str, level: str = "info", log_format: str = "text") -> None:
    """Send the root logger's records to standard error, as lines that carry the process's name; text or json.

    Libraries speak from `warning` on; ours from `level`. Safe to call again: the last call holds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process_name) if log_format == "json" else _LineFormatter(process_name))
    if level != "debug":
        handler.addFilter(_Discreet())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    for package in ("octavo", "router", "scheduler_svc", "worker_svc", "kernels"):
        logging.getLogger(package).setLevel(level.upper())


def is_log_line(line: str) -> bool:
    """Whether the line was written by a logger set up here, and so names its process already."""
    return _LOG_LINE.match(line) is not None
