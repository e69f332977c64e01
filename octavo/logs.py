"""Logging: one line a record on standard error, with the time, the process and the level, as text or as JSON.

Knows how a line looks, so that the supervisor can tell a child's log lines from its other output.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
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
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(process_name: str, level: str = "info", log_format: str = "text") -> None:
    """Send the root logger's records to standard error, as lines that carry the process's name; text or json.

    Libraries speak from `warning` on; ours from `level`. Safe to call again: the last call holds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process_name) if log_format == "json" else _LineFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    for package in ("octavo", "router", "scheduler_svc", "worker_svc", "kernels"):
        logging.getLogger(package).setLevel(level.upper())


def is_log_line(line: str) -> bool:
    """Whether the line was written by a logger set up here, and so names its process already."""
    return _LOG_LINE.match(line) is not None
